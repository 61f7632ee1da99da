"""Times contenders in turns, so that whatever else runs meets all alike; describes the machine."""

import importlib.metadata
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

PACKAGES = (
    "torch",
    "fairseq",
    "fairscale",
    "ctranslate2",
    "transformers",
    "st-moe-pytorch",
    "deepspeed",
)
ROOT = Path(__file__).resolve().parent.parent


def describe(device: torch.device, threads: int | None = None) -> dict:
    return {
        "command": f"python -m benchmarks.{Path(sys.argv[0]).stem} {shlex.join(sys.argv[1:])}".strip(),
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": threads or torch.get_num_threads(),
        "device": str(device) if device.type == "cpu" else torch.cuda.get_device_name(device),
        "load": os.getloadavg()[0],
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    """The checkout's commit, with ``+`` where files differ from it."""
    try:
        return _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*args: str) -> str:
    return subprocess.run(
        ["git", "-C", ROOT, *args], capture_output=True, text=True, check=True
    ).stdout.strip()


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


MIN_ROUNDS, MAX_ROUNDS = 5, 200


def in_turns(
    contenders: dict[str, Callable[[], object]],
    device: torch.device,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each call, by contender and round.

    Every round calls each contender once, starting with another one than the round before. There are
    as many rounds as fit into ``seconds``, at least `MIN_ROUNDS`, after two that do not count.

    Args:
        clock: on a CPU; `time.process_time` leaves out what other programs take, and adds up threads.
    """
    names = list(contenders)
    start = time.perf_counter()
    for _ in range(2):
        for name in names:
            measure(contenders[name], device, clock)
    per_round = (time.perf_counter() - start) / 2
    rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, round(seconds / per_round)))
    times = {name: [] for name in names}
    for i in range(rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(measure(contenders[name], device, clock))
    return times


def measure(
    call: Callable[[], object],
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
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
    # One value twice has quartiles too, all the same.
    low, _, high = statistics.quantiles(
        values * 2 if len(values) == 1 else values, n=4, method="inclusive"
    )
    return {"median": statistics.median(values), "low": low, "high": high}


def ratio(times: dict[str, list[float]], over: str, under: str) -> dict[str, float]:
    """Summary of the ratios round by round, both sides of each having met the same state of the machine.

    ``best`` is that of the shortest times, which a busy machine disturbs least.
    """
    ratios = summary([a / b for a, b in zip(times[over], times[under])])
    return {**ratios, "best": min(times[over]) / min(times[under])}
