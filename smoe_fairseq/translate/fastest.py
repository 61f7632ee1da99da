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
from collections.abc import Callable, Mapping
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
_ROWS = 5  # of a step for one sentence
_ROUNDS = 3
_MARGIN = 0.8  # another than the first has to take less of its time, else noise could decide


def fastest(kinds: Mapping[str, Callable], weight_OI: Tensor) -> str:
    """The name of the kind of linear layer that is the fastest, or the first if none is much faster.

    Args:
        kinds: they create a layer from a weight and a bias.
    """
    if weight_OI.numel() < LEAST_WEIGHTS:
        return next(iter(kinds))
    known, key = _remembered(), f"{_machine()}: {'x'.join(map(str, weight_OI.shape))}"
    if known.get(key) not in list(kinds):
        known[key] = _measured(
            {name: kind(weight_OI, None) for name, kind in kinds.items()}, weight_OI
        )
        with suppress(OSError, UsageError):  # a folder that cannot be written, as in a container
            MEMORY.parent.mkdir(parents=True, exist_ok=True)
            write_whole(MEMORY, json.dumps(known | _file(), indent=1) + "\n")
    return known[key]


def _measured(layers: Mapping[str, Callable[[Tensor], Tensor]], weight_OI: Tensor) -> str:
    x_NI = weight_OI.new_ones(_ROWS, weight_OI.shape[1])
    seconds = dict.fromkeys(layers, float("inf"))
    with one_thread():
        for again in range(1 + _ROUNDS):
            for name, layer in layers.items():
                start = time.thread_time()
                layer(x_NI)
                if again:
                    seconds[name] = min(seconds[name], time.thread_time() - start)
    first, best = next(iter(layers)), min(seconds, key=seconds.get)
    return best if seconds[best] < _MARGIN * seconds[first] else first


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
