"""What a pass keeps for its backward pass, what it takes at its peak, and what there is room for."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.contenders import Case

# How many (T, E, C) tensors of 4 bytes the peers that make such have at once in training.
CAPACITY_TENSORS = {"train": 10, "infer": 5}


class NoRoom(Exception):
    """The machine has too little memory for this case."""


def of(step: Callable[[], object], module: nn.Module, train: bool, device: torch.device) -> dict:
    """Bytes that one pass saves for the backward pass, and has allocated at its peak.

    Parameters count in neither; their gradients count in the peak, for the bare products too.
    """
    step.clear_gradients()
    peak = cuda_peak_bytes(step, device) if device.type == "cuda" else cpu_peak_bytes(step)
    return {"saved": saved_bytes(step.forward, module) if train else None, "peak": peak}


def saved_bytes(forward: Callable[[], object], module: nn.Module) -> int:
    """Bytes saved for the backward pass: each storage once, parameters not counted."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    sizes = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept_alive = (
            forward()
        )  # or storages could be freed, and counted as one where they are reused
    del kept_alive
    return sum(sizes.values())


def cpu_peak_bytes(step: Callable[[], object]) -> int:
    """Most bytes that ``step`` had allocated beyond those before it, by the profiler's account."""
    with quiet_stderr():
        with profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as run:
            step()
    changes = [
        event for event in run.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    now = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """The profiler's own C++ code writes there whenever it starts and stops."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def cuda_peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def check_room(case: Case, device: torch.device) -> None:
    """For a peer with tensors of shape (T, E, C), E C being 2 T.

    Raises:
        NoRoom: they would not fit.
    """
    needed = CAPACITY_TENSORS[case.mode] * case.tokens * 2 * case.tokens * 4
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _free_bytes()
    if needed > 0.8 * free:
        raise NoRoom(
            f"its (T, E, C) tensors take about {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free"
        )


def _free_bytes() -> float:
    info = Path("/proc/meminfo")
    if not info.exists():
        return float("inf")
    fields = dict(line.split(":") for line in info.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024
