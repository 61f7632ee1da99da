"""Memory of each process of a run (models/memory.py), and the bytes that it sends.

An all-reduce over n processes is counted as a ring: each sends 2 (n - 1) / n of the tensor. Sending
each share to all others (``--zero-sharding os``) is half of that. docs/distributed.md has examples.
"""

from dataclasses import asdict, dataclass

from tabulate import tabulate

from smoe_fairseq.models.memory import (
    Forecast,
    Run,
    choices,
    forecast,
    gpu_room,
    tokens_that_fit,
    translation,
)
from smoe_fairseq.modules.parallel import Placement


@dataclass(frozen=True)
class ProcessCost:
    """Bytes of one process: held, and sent per update."""

    held: Forecast
    gradients: float
    tokens: float  # forward and backward, under uniform routing
    parameters: float  # where each has the optimizer's state of some (``--zero-sharding os``)

    @property
    def sent(self) -> float:
        return self.gradients + self.tokens + self.parameters

    def as_dict(self) -> dict:
        return {**asdict(self), "memory": self.held.memory, "sent": self.sent}


def process_costs(run: Run) -> dict[str, ProcessCost]:
    """Keys "replicated" and "sharded"; a dense model has only the first.

    Args:
        run: whatever it says of ``--expert-parallel``.

    Raises:
        ValueError: the experts cannot be spread over so many processes.
    """
    sharded = {"replicated": False} | ({"sharded": True} if _strata(run) else {})
    return {
        name: process_cost(run.with_flags(expert_parallel=how)) for name, how in sharded.items()
    }


def _strata(run: Run) -> list[tuple[str, object]]:
    """Each MoE layer's side and strata."""
    return [(side, each) for side in run.config.SIDES for each in run.config.strata_of(side)]


def process_cost(run: Run) -> ProcessCost:
    """As `process_costs`, of the run as its flags say."""
    shared, of_layers = run.weights_by_layer()
    experts = sum(of_layers)
    reduced, travelling = (shared + experts) * _ring(run.processes), 0.0
    if run.flags.expert_parallel:
        reduced = shared * _ring(run.processes)
        for (side, strata), of_layer in zip(_strata(run), of_layers, strict=True):
            place = Placement(strata.num_experts, run.processes)
            reduced += of_layer * _ring(place.num_replicas)
            away = (place.group_size - 1) / place.group_size  # share of the copies that travel
            pairs = zip(strata.expected_visits(), strata.visible, strict=True)
            copies = sum(visits * choices(run.config, visible) for visits, visible in pairs)
            width = getattr(run.config, f"{side}_embed_dim")
            travelling += away * 4 * copies * width  # there and back, and their gradients the same
    parameters = 0.0
    if run.flags.zero_sharding == "os":  # what the optimizer updates, mostly float32
        spread = shared if run.flags.expert_parallel else shared + experts
        number = run.bytes if run.memory_efficient else 4
        parameters = spread * _ring(run.processes) / 2 * number
    tokens = travelling * run.flags.max_tokens * run.flags.update_freq * run.bytes
    return ProcessCost(forecast(run), reduced * run.bytes, tokens, parameters)


def _ring(processes: int) -> float:
    return 2 * (processes - 1) / processes


def print_process_costs(costs: dict[str, ProcessCost], run: Run) -> None:
    """A table; of what is sent, tokens and parameters have columns where there are any."""
    each = "one process" if run.processes == 1 else f"each of {run.processes} processes"
    batch = f"{run.flags.max_tokens} tokens per batch in sentences of {run.length}"
    print(f"\n{each}, {batch}, uniform routing")
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


def fits(run: Run, gibibytes: float) -> dict[str, int]:
    """The most tokens of a forward pass on a GPU of so much memory: of training, with keys as
    `process_costs` has them, and of translating; 0 if the model itself does not fit."""
    room = gpu_room(gibibytes * 2**30)
    found = {
        name: tokens_that_fit(run.with_flags(expert_parallel=name == "sharded"), room)
        for name in process_costs(run)
        if run.processes > 1 or name == "replicated"
    }
    weights, each = translation(run)
    return found | {"translation": max(0, int((room - weights) / each))}


def aligned(header: list[str], rows: list[list[str]]) -> str:
    """A name and numbers in each row, for a terminal; a header may have several lines."""
    alignment = ["left", *["right"] * (len(header) - 1)]
    return tabulate(rows, header, tablefmt="plain", colalign=alignment, disable_numparse=True)


def mebibytes(number: float) -> str:
    return f"{number / 2**20:,.0f} MiB"
