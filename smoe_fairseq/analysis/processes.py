"""Memory of each rank of a run (models/memory.py), and the bytes that it sends.

An all-reduce over n ranks is counted as a ring: each sends 2 (n - 1) / n of the tensor. Broadcasting each
rank's share (``--zero-sharding os``) takes half of that. docs/distributed.md has examples.
"""

from dataclasses import asdict, dataclass

from tabulate import tabulate

from smoe_fairseq.analysis.cost import copies_per_stop
from smoe_fairseq.models.memory import (
    Forecast,
    Run,
    forecast,
    gpu_room,
    tokens_that_fit,
    translation,
)
from smoe_fairseq.modules.parallel import Placement


@dataclass(frozen=True)
class ProcessCost:
    """Bytes of one rank: in memory, and sent per update."""

    held: Forecast
    gradients: float
    tokens: float  # forward and backward, under uniform routing
    parameters: float  # with a sharded optimizer state (``--zero-sharding os``)

    @property
    def sent(self) -> float:
        return self.gradients + self.tokens + self.parameters

    def as_dict(self) -> dict:
        return {**asdict(self), "memory": self.held.memory, "sent": self.sent}


def process_costs(run: Run) -> dict[str, ProcessCost]:
    """Keys "replicated" and "sharded"; a dense model has only the first.

    Args:
        run: its ``--expert-parallel`` is ignored.

    Raises:
        ValueError: the experts cannot be divided among so many ranks.
    """
    return {
        name: process_cost(run.with_flags(expert_parallel=name == "sharded"))
        for name in (("replicated", "sharded") if run.blocks else ("replicated",))
    }


def process_cost(run: Run) -> ProcessCost:
    """The cost of a run with its flags."""
    shared, by_layer = run.weights_by_layer()
    experts = sum(by_layer)
    reduced, sent_per_token = (shared + experts) * _ring(run.processes), 0.0
    if run.flags.expert_parallel:
        reduced = shared * _ring(run.processes)
        for block, layer_experts in zip(run.blocks, by_layer, strict=True):
            place = Placement(block.strata.num_experts, run.processes)
            reduced += layer_experts * _ring(place.num_replicas)
            away = (place.group_size - 1) / place.group_size  # share of the copies that are sent
            copies = copies_per_stop(block) * block.strata.expected_requested_capacity()
            width = block.experts.w1.shape[2]
            sent_per_token += away * 4 * copies * width  # copies and outputs, and their gradients
    parameters = 0.0
    if run.flags.zero_sharding == "os":  # updated parameters, mostly in float32
        sharded = shared if run.flags.expert_parallel else shared + experts
        size = run.bytes if run.memory_efficient else 4
        parameters = sharded * _ring(run.processes) / 2 * size
    tokens = sent_per_token * run.flags.max_tokens * run.flags.update_freq * run.bytes
    return ProcessCost(forecast(run), reduced * run.bytes, tokens, parameters)


def _ring(processes: int) -> float:
    return 2 * (processes - 1) / processes


def print_process_costs(costs: dict[str, ProcessCost], run: Run) -> None:
    """A table; parameters that are sent have a column only if there are any."""
    each = "one rank" if run.processes == 1 else f"each of {run.processes} ranks"
    batch = f"batches of {run.flags.max_tokens:,} tokens, sentences of {run.length}"
    print(f"\nfor {each}, with {batch} tokens and uniform routing")
    header = ["experts", "weights, gradients,\noptimizer", "activations", "at the\npeak"]
    header += ["sent per update", "gradients\nin it", "tokens\nin it"]
    columns = ["memory", "activations", "peak", "sent", "gradients", "tokens"]
    if any(cost.parameters for cost in costs.values()):
        header, columns = [*header, "parameters\nin it"], [*columns, "parameters"]
    rows = []
    for name, cost in costs.items():
        numbers = cost.as_dict()
        numbers |= {key: numbers["held"][key] for key in ("activations", "peak")}
        rows.append([name, *(mebibytes(numbers[column]) for column in columns)])
    print(aligned(header, rows))


def fits(run: Run, gibibytes: float) -> dict[str, int]:
    """The maximum number of tokens of a forward pass on a GPU with this memory: of training, with the keys of
    `process_costs`, and of translation; 0 if the model does not fit."""
    room = gpu_room(gibibytes * 2**30)
    tokens = {
        name: tokens_that_fit(run.with_flags(expert_parallel=name == "sharded"), room)
        for name in process_costs(run)
        if run.processes > 1 or name == "replicated"
    }
    weights, per_token = translation(run)
    return tokens | {"translation": max(0, int((room - weights) / per_token))}


def aligned(header: list[str], rows: list[list[str]]) -> str:
    """A table with a name and numbers in each row, for a terminal; a header may have several lines."""
    alignment = ["left", *["right"] * (len(header) - 1)]
    return tabulate(rows, header, tablefmt="plain", colalign=alignment, disable_numparse=True)


def mebibytes(number: float) -> str:
    return f"{number / 2**20:,.0f} MiB"
