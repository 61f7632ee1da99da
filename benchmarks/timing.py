"""Times contenders in interleaved runs, so that other load on the machine meets all alike; measures
their memory; describes the machine.
"""

import importlib.metadata
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

PACKAGES = "torch fairseq fairscale ctranslate2 transformers st-moe-pytorch deepspeed".split()
ROOT = Path(__file__).resolve().parent.parent


def describe(device: torch.device) -> dict:
    return {
        "command": f"python -m benchmarks.{Path(sys.argv[0]).stem} {shlex.join(sys.argv[1:])}".strip(),
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": dict(_versions()),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device) if device.type == "cpu" else torch.cuda.get_device_name(device),
        "load": os.getloadavg()[0],
    }


def _versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)


def _commit() -> str:
    """The checkout's commit, with ``+`` if files differ from it."""
    words = ["git", "-C", ROOT, "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _cpu() -> str:
    with suppress(OSError, TypeError):
        return re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.M)[1]
    return platform.processor() or platform.machine()


MIN_ROUNDS, MAX_ROUNDS = 5, 200


def in_turns(
    contenders: dict[str, Callable[[], object]],
    device: torch.device,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each call, by contender and round.

    Every round calls each contender once, beginning with the next one. There are as many rounds as
    fit into ``seconds``, at least `MIN_ROUNDS`, after two rounds to warm up, of which the second is as
    long as the others.

    Args:
        clock: for CPUs; `time.process_time` excludes other programs and adds up threads.
    """
    names = list(contenders)
    for _ in range(2):
        start = time.perf_counter()
        for name in names:
            measure(contenders[name], device, clock)
    per_round = time.perf_counter() - start
    rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, round(seconds / per_round)))
    times = {name: [] for name in names}
    for i in range(rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(measure(contenders[name], device, clock))
    return times


def measure(call: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    """Seconds of one call."""
    if device.type != "cuda":
        start = clock()
        call()
        return clock() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1000


def summary(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, _, high = statistics.quantiles(values * (1 + (len(values) == 1)), n=4, method="inclusive")
    return {"median": statistics.median(values), "low": low, "high": high}


def ratio(times: dict[str, list[float]], over: str, under: str) -> dict[str, float]:
    """Summary of the ratios within each round; ``best`` is the ratio of the shortest times."""
    ratios = summary([a / b for a, b in zip(times[over], times[under])])
    return {**ratios, "best": min(times[over]) / min(times[under])}


def memory_of(
    step: Callable[[], object], module: nn.Module, train: bool, device: torch.device
) -> dict:
    """Bytes that one pass saves for the backward pass, and has allocated at its peak.

    Parameters count in neither; their gradients count in the peak, for the bare products too.
    """
    step.clear_gradients()
    peak = cuda_peak(step, device) if device.type == "cuda" else _cpu_peak(step)
    saved = saved_bytes(step.forward, module.parameters()) if train else None
    return {"saved": saved, "peak": peak}


def saved_bytes(forward: Callable[[], object], parameters: Iterable[nn.Parameter]) -> int:
    """Bytes saved for the backward pass: each storage once, parameters not counted."""
    known = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    sizes = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = forward()  # kept, so that no storage is freed and used again
    del outputs
    return sum(sizes.values())


def _cpu_peak(step: Callable[[], object]) -> int:
    """Most bytes that ``step`` had allocated at once, as the profiler counts them."""
    options = {"activities": [ProfilerActivity.CPU], "profile_memory": True, "acc_events": True}
    with _quiet_stderr(), profile(**options) as run:
        step()
    events = run.profiler.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(accumulate((event.nbytes() for event in changes), initial=0))


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """The profiler's C++ code writes to stderr when it starts and stops."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def cuda_peak(step: Callable[[], object], device: torch.device) -> int:
    """Most bytes that ``step`` had allocated at once, besides what was there before."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
