"""What would make a run fit into memory: changes of its flags that the forecast says are enough."""

from collections.abc import Iterator
from dataclasses import replace

from smoe_fairseq.analysis.forecast import Run, forecast
from smoe_fairseq.analysis.live_bytes import TooMuch
from smoe_fairseq.analysis.meta_model import config_of
from smoe_fairseq.modules.placement import Placement

Flags = dict[str, object]


def first_that_fits(run: Run, room: float) -> tuple[str, int] | None:
    """The first change with a peak of at most ``room`` bytes, as words to add, and that peak; or None.

    Those that leave the result as it is come first: batches in more parts, then what is spread over
    processes, then fewer copies in float32, recomputing, and all of these together; last, more GPUs.
    """
    for changed in filter(None, _candidates(run)):
        try:
            return _words(run, changed), forecast(changed, limit=room).peak
        except TooMuch:
            continue
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
    flags = run.flags
    return (
        run.with_flags(fp16_no_flatten_grads=True)
        if flags.fp16 and not run.memory_efficient
        else run
    )


def _memory_efficient(run: Run) -> Run | None:
    flags = run.flags
    if run.memory_efficient or run.half is None:
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
