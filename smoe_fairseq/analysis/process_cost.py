"""What each process of a run holds and sends: replicated experts beside sharded ones (docs/distributed.md).

An all-reduce over n processes is counted as a ring: each sends 2 (n - 1) / n of what is reduced. What each
of them sends to all others (``--zero-sharding os``) is half of that.
"""

from dataclasses import asdict, dataclass

from tabulate import tabulate
from torch import nn

from smoe_fairseq.analysis.cost import copies_per_stop
from smoe_fairseq.analysis.forecast import Forecast, Run, forecast
from smoe_fairseq.models.moe_layers import moe_blocks
from smoe_fairseq.modules.placement import Placement


@dataclass(frozen=True)
class ProcessCost:
    """Bytes of one process: held, and sent per update."""

    held: Forecast
    gradients: float  # sent
    tokens: float  # sent, forward and backward, under uniform routing
    parameters: float  # sent, where each process has the optimizer's state of some

    @property
    def sent(self) -> float:
        return self.gradients + self.tokens + self.parameters

    def as_dict(self) -> dict:
        return {**asdict(self), "memory": self.held.memory, "sent": self.sent}


def process_costs(run: Run, model: nn.Module) -> dict[str, ProcessCost]:
    """Keys "replicated" and "sharded"; a dense model has only the first.

    Args:
        run: whatever it says of ``--expert-parallel``.
        model: the run's, on the meta device or another, with all experts.

    Raises:
        ValueError: the experts cannot be spread over so many processes.
    """
    sharded = {"replicated": False} | ({"sharded": True} if moe_blocks(model) else {})
    return {
        name: process_cost(run.with_flags(expert_parallel=how), model)
        for name, how in sharded.items()
    }


def process_cost(run: Run, model: nn.Module) -> ProcessCost:
    """As `process_costs`, of the run as its flags say."""
    flags = run.flags
    blocks = moe_blocks(model).values()
    of_block = [sum(p.numel() for p in block.experts.parameters()) for block in blocks]
    experts = sum(of_block)
    shared = sum(p.numel() for p in model.parameters()) - experts
    number = 4 if run.half is None else 2  # bytes of a gradient or an activation on its way
    gradients, tokens = (shared + experts) * _ring(run.processes), 0.0
    if flags.expert_parallel and blocks:
        gradients, rows = shared * _ring(run.processes), 0.0
        for block, weights in zip(blocks, of_block, strict=True):
            place = Placement(block.strata.num_experts, run.processes)
            gradients += weights / place.group_size * _ring(place.num_replicas)
            away = (place.group_size - 1) / place.group_size  # share of the copies that travel
            copies = copies_per_stop(block) * block.strata.expected_requested_capacity()
            rows += (
                away * 4 * copies * _width(block)
            )  # there and back, and their gradients the same
        tokens = rows * flags.max_tokens * flags.update_freq * number
    parameters = 0.0
    if (
        flags.zero_sharding == "os"
    ):  # what the optimizer updates: float32 but for memory-efficient ones
        spread = shared if flags.expert_parallel else shared + experts
        parameters = spread * _ring(run.processes) / 2 * (number if run.memory_efficient else 4)
    return ProcessCost(forecast(run), gradients * number, tokens, parameters)


def _ring(processes: int) -> float:
    return 2 * (processes - 1) / processes


def _width(block) -> int:
    return block.experts.w1.shape[2]


def print_process_costs(costs: dict[str, ProcessCost], run: Run) -> None:
    """A table; of what is sent, tokens and parameters have columns where there are any."""
    print(
        f"\neach of {run.processes} processes, {run.flags.max_tokens} tokens per batch in sentences of "
        f"{run.length}, uniform routing"
    )
    header = ["experts", "weights, gradients,\noptimizer", "activations", "at the\npeak"]
    header += ["sent per update", "of it\ngradients", "of it\ntokens"]
    columns = ["memory", "activations", "peak", "sent", "gradients", "tokens"]
    if any(cost.parameters for cost in costs.values()):
        header, columns = [*header, "of it\nparameters"], [*columns, "parameters"]
    rows = []
    for name, cost in costs.items():
        numbers = cost.as_dict()
        numbers |= {key: numbers["held"][key] for key in ("activations", "peak")}
        rows.append([name, *(mebibytes(numbers[column]) for column in columns)])
    print(aligned(header, rows))


def aligned(header: list[str], rows: list[list[str]]) -> str:
    """A name and numbers in each row, for a terminal; a header may have several lines."""
    alignment = ["left", *["right"] * (len(header) - 1)]
    return tabulate(rows, header, tablefmt="plain", colalign=alignment, disable_numparse=True)


def mebibytes(number: float) -> str:
    return f"{number / 2**20:,.0f} MiB"
