"""What each process of a run holds and sends, and which change of its flags makes it fit into memory.

An all-reduce over n processes is counted as a ring: each sends 2 (n - 1) / n of what is reduced.
What each of them sends to all others (``--zero-sharding os``) is half of that. docs/distributed.md
has examples.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from tabulate import tabulate
from torch import nn

from smoe_fairseq.analysis.cost import build_meta_model, config_of, copies_per_stop
from smoe_fairseq.analysis.memory import Forecast, Run, forecast
from smoe_fairseq.models.transformer import moe_blocks
from smoe_fairseq.modules.parallel import Placement

MEMORY_EFFICIENT = ("adafactor", "adam", "adamax", "nag")  # that --memory-efficient-fp16 takes


@dataclass(frozen=True)
class ProcessCost:
    """Bytes of one process: held, and sent per update.

    Args:
        gradients: sent.
        tokens: sent, forward and backward, under uniform routing.
        parameters: sent, where each process has the optimizer's state of some (``--zero-sharding os``).
    """

    held: Forecast
    gradients: float
    tokens: float
    parameters: float

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
    flags, blocks = run.flags, moe_blocks(model).values()
    of_block = [sum(p.numel() for p in block.experts.parameters()) for block in blocks]
    shared = sum(p.numel() for p in model.parameters()) - sum(of_block)
    reduced, travelling = (shared + sum(of_block)) * _ring(run.processes), 0.0
    if flags.expert_parallel and blocks:
        reduced = shared * _ring(run.processes)
        for block, weights in zip(blocks, of_block, strict=True):
            place = Placement(block.strata.num_experts, run.processes)
            reduced += weights / place.group_size * _ring(place.num_replicas)
            away = (place.group_size - 1) / place.group_size  # share of the copies that travel
            copies = copies_per_stop(block) * block.strata.expected_requested_capacity()
            width = block.experts.w1.shape[2]
            travelling += away * 4 * copies * width  # there and back, and their gradients the same
    parameters = 0.0
    if flags.zero_sharding == "os":  # what the optimizer updates, mostly float32
        spread = shared if flags.expert_parallel else shared + sum(of_block)
        number = run.bytes if run.memory_efficient else 4
        parameters = spread * _ring(run.processes) / 2 * number
    tokens = travelling * flags.max_tokens * flags.update_freq * run.bytes
    return ProcessCost(forecast(run, model), reduced * run.bytes, tokens, parameters)


def _ring(processes: int) -> float:
    return 2 * (processes - 1) / processes


def print_process_costs(costs: dict[str, ProcessCost], run: Run) -> None:
    """A table; of what is sent, tokens and parameters have columns where there are any."""
    each = "one process" if run.processes == 1 else f"each of {run.processes} processes"
    print(
        f"\n{each}, {run.flags.max_tokens} tokens per batch in sentences of "
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


# Changes of the flags that the forecast says are enough.


def first_that_fits(run: Run, room: float) -> tuple[str, int] | None:
    """The first change with a peak of at most ``room`` bytes, as words to add, and that peak; or None.

    Changes that keep the result come first: batches in more parts, then what is spread over
    processes, then fewer copies in float32, recomputing, and all of these together; last, more GPUs.
    """
    model = build_meta_model(run.flags, run.vocabulary)
    for changed in filter(None, _candidates(run)):
        if (peak := forecast(changed, model).peak) <= room:
            return _words(run, changed), peak
    return None


def _candidates(run: Run) -> Iterator[Run | None]:
    yield from _smaller_batches(run)
    sharded = _sharded(run)
    yield sharded
    yield _zero(run)
    yield sharded and _zero(sharded)
    yield _memory_efficient(run)
    yield _checkpointed(run)
    for change in (_sharded, _zero, _memory_efficient, _checkpointed):
        run = change(run) or run
    yield run
    yield from _smaller_batches(run)
    if not run.flags.cpu:  # where more processes share one memory
        yield from _more_processes(run)


def _smaller_batches(run: Run) -> Iterator[Run]:
    """By half and half again, in more parts of the same update, until a sentence fills one."""
    flags = run.flags
    tokens, parts = flags.max_tokens // 2, 2
    while tokens >= max(run.length, 1) and flags.batch_size is None:
        yield run.with_flags(max_tokens=tokens, update_freq=flags.update_freq * parts)
        tokens, parts = tokens // 2, parts * 2


def _more_processes(run: Run) -> Iterator[Run | None]:
    """Twice as many and so on, each with fewer of the experts, for the same update."""
    parts = run.flags.update_freq
    while run.processes < max(_experts(run), default=0):
        parts = max(1, parts // 2)
        run = replace(run, processes=2 * run.processes).with_flags(update_freq=parts)
        wider = _sharded(run.with_flags(expert_parallel=False))
        yield wider
        yield from _smaller_batches(wider) if wider else ()


def _sharded(run: Run) -> Run | None:
    if run.processes == 1 or run.flags.expert_parallel or not (experts := _experts(run)):
        return None
    try:
        for number in experts:
            Placement(number, run.processes)
    except ValueError:
        return None
    return _unflattened(run.with_flags(expert_parallel=True, ddp_backend="legacy_ddp"))


def _experts(run: Run) -> list[int]:
    """Of each MoE layer; a dense model has none."""
    config = config_of(run.flags)
    return [strata.num_experts for side in config.SIDES for strata in config.strata_of(side)]


def _zero(run: Run) -> Run | None:
    if run.processes == 1 or run.flags.zero_sharding == "os":
        return None
    return _unflattened(run.with_flags(zero_sharding="os"))


def _unflattened(run: Run) -> Run:
    if run.flags.fp16 and not run.memory_efficient:
        return run.with_flags(fp16_no_flatten_grads=True)
    return run


def _memory_efficient(run: Run) -> Run | None:
    flags = run.flags
    if run.memory_efficient or run.half is None or flags.optimizer not in MEMORY_EFFICIENT:
        return None
    name = "memory_efficient_bf16" if flags.bf16 else "memory_efficient_fp16"
    return run.with_flags(**{name: True, "fp16_no_flatten_grads": False})


def _checkpointed(run: Run) -> Run | None:
    if getattr(run.flags, "checkpoint_activations", False):
        return None
    return run.with_flags(checkpoint_activations=True)


def _words(before: Run, after: Run) -> str:
    """The flags that are new; more processes come first."""
    old, words = vars(before.flags), []
    if after.processes > before.processes:
        words.append(f"{after.processes} GPUs with")
    for name, value in vars(after.flags).items():
        if value != old.get(name, False) and name != "ddp_backend" and value is not False:
            words.append(f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}"))
    return " ".join(words)
