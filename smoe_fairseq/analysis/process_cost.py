"""What each process of a run holds and sends: replicated experts beside sharded ones (docs/distributed.md).

Adam's two moments are counted, activations are not. An all-reduce over n processes is counted as a ring:
each sends 2 (n - 1) / n of what is reduced.
"""

from dataclasses import asdict, dataclass

from tabulate import tabulate
from torch import nn

from smoe_fairseq.analysis.cost import copies_per_stop
from smoe_fairseq.models.moe_layers import moe_blocks
from smoe_fairseq.modules.placement import Placement

# Bytes per parameter: what is trained, its gradient, and the optimizer's copies of both and moments.
STATE = {"fp32": 4 + 4 + 8, "fp16": 2 + 2 + 4 + 4 + 8}
NUMBER = {"fp32": 4, "fp16": 2}  # of a gradient or an activation on its way


@dataclass(frozen=True)
class ProcessCost:
    """Bytes of one process: held for parameters and optimizer, and sent per update."""

    memory: float
    gradients: float  # sent
    tokens: float  # sent, forward and backward, under uniform routing

    @property
    def sent(self) -> float:
        return self.gradients + self.tokens

    def as_dict(self) -> dict:
        return {**asdict(self), "sent": self.sent}


def process_costs(
    model: nn.Module, world_size: int, tokens: int, batches: int = 1, precision: str = "fp32"
) -> dict[str, ProcessCost]:
    """Keys "replicated" and "sharded"; a dense model has only the first.

    Args:
        model: on the meta device or another, with all experts.
        tokens: of a batch of one process, on the source and on the target side each.
        batches: per update (``--update-freq``).
        precision: a key of `STATE`.

    Raises:
        ValueError: the experts cannot be spread over so many processes.
    """
    blocks = moe_blocks(model).values()
    experts = sum(p.numel() for block in blocks for p in block.experts.parameters())
    shared = sum(p.numel() for p in model.parameters()) - experts
    state, number = STATE[precision], NUMBER[precision]

    def ring(processes: int) -> float:
        return 2 * (processes - 1) / processes * number

    costs = {
        "replicated": ProcessCost(
            (shared + experts) * state, (shared + experts) * ring(world_size), 0.0
        )
    }
    if blocks:
        place = Placement(next(iter(blocks)).strata.num_experts, world_size)
        held = experts / place.group_size
        away = (place.group_size - 1) / place.group_size  # share of the copies that travel
        rows = sum(  # to the experts and back, and their gradients the same
            4 * copies_per_stop(block) * block.strata.expected_requested_capacity() * _width(block)
            for block in blocks
        )
        costs["sharded"] = ProcessCost(
            (shared + held) * state,
            shared * ring(world_size) + held * ring(place.num_replicas),
            away * rows * tokens * batches * number,
        )
    return costs


def _width(block) -> int:
    return block.experts.w1.shape[2]


def print_process_costs(costs: dict[str, ProcessCost], world_size: int, tokens: int) -> None:
    print(f"\neach of {world_size} processes, {tokens} tokens per batch, uniform routing")
    header = ["experts", "parameters and\noptimizer", "sent per update"]
    rows = [
        [name, *map(_mega, (cost.memory, cost.sent, cost.gradients, cost.tokens))]
        for name, cost in costs.items()
    ]
    print(aligned([*header, "of it\ngradients", "of it\ntokens"], rows))


def aligned(header: list[str], rows: list[list[str]]) -> str:
    """A name and numbers in each row, for a terminal; a header may have several lines."""
    alignment = ["left", *["right"] * (len(header) - 1)]
    return tabulate(rows, header, tablefmt="plain", colalign=alignment, disable_numparse=True)


def _mega(number: float) -> str:
    return f"{number / 2**20:,.0f} MiB"
