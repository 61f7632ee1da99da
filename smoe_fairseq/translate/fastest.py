"""Which kind of linear layer is the fastest for a matrix: measured in a few ms, then remembered.

Their results differ in the last bits, so the choice has to stay the same on a machine: the file `MEMORY`
has it for each processor, version of torch and shape. Where it cannot be written, each process measures.
"""

import functools
import json
import os
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import write_whole
from smoe_fairseq.translate.threads import one_thread

MEMORY = Path(
    os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "smoe-fairseq/products.json"
)
LEAST_WEIGHTS = 1 << 17  # of a matrix that is measured
ROWS = (5,)  # of a step for one sentence
_ROUNDS = 3
_TICK = 1e-9  # for a clock that moves in large steps
_MARGIN = 0.8  # another than the first has to take less of its time, else noise could decide


def fastest(kinds: Mapping[str, Callable], weight_OI: Tensor, rows: Sequence[int] = ROWS) -> str:
    """The name of the kind of linear layer that is the fastest, or the first if none is much faster.

    Args:
        kinds: they create a layer from a weight and a bias.
        rows: the numbers of rows that count equally.
    """
    if weight_OI.numel() < LEAST_WEIGHTS:
        return next(iter(kinds))
    known, machine = _remembered(), f"{_machine()}, {' or '.join(kinds)}"
    key = f"{machine}: {'x'.join(map(str, weight_OI.shape))}"
    if known.get(key) not in list(kinds):
        layers = {name: kind(weight_OI, None) for name, kind in kinds.items()}
        known[key] = _measured(layers, weight_OI, rows)
        with suppress(OSError, UsageError):  # a folder that cannot be written, as in a container
            MEMORY.parent.mkdir(parents=True, exist_ok=True)
            write_whole(MEMORY, json.dumps(known | _file(), indent=1) + "\n")
    return known[key]


def _measured(layers: Mapping[str, Callable], weight_OI: Tensor, rows: Sequence[int]) -> str:
    first, times = next(iter(layers)), dict.fromkeys(layers, 0.0)
    for number in rows:
        x_NI = weight_OI.new_ones(number, weight_OI.shape[1])
        seconds = dict.fromkeys(layers, float("inf"))
        with one_thread():
            for again in range(1 + _ROUNDS):
                for name, layer in layers.items():
                    start = time.thread_time()
                    layer(x_NI)
                    if again:
                        seconds[name] = min(seconds[name], time.thread_time() - start)
        for name, one in seconds.items():
            times[name] += one / max(seconds[first], _TICK) / len(rows)
    best = min(times, key=times.get)
    return best if times[best] < _MARGIN else first


@functools.cache
def _machine() -> str:
    """The processor, with the numbers that name its generation, and the version of torch."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
        fields = re.findall(r"^(?:model name|cpu family|model|stepping)\s*: (.*)", lines, re.M)
        return ", ".join([*fields, f"torch {torch.__version__}"])
    return f"{platform.machine()} {platform.processor()}, torch {torch.__version__}"


@functools.cache
def _remembered() -> dict[str, str]:
    """The choices by machine and shape; what is added to them stays for this process."""
    return _file()


def _file() -> dict[str, str]:
    with suppress(OSError, ValueError):
        content = json.loads(MEMORY.read_text())
        return content if isinstance(content, dict) else {}
    return {}
