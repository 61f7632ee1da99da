"""The machine's main memory: how much there is, and what training on the CPU does with it."""

import ctypes
import os
from pathlib import Path

# Of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Stops malloc from handing large blocks back to the system; whether it could be told so.

    glibc maps every block above 32 MiB anew, and the system fills its pages with zeros one by one: with
    the gradients of many experts that took up to a third of a step. The price is that the process keeps
    the most it has ever used.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False  # not glibc
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, -1))


def machine_memory() -> int | None:
    """Bytes that this process can have at most, with what is swapped out; None where that is not told.

    A container's limit counts where it is lower than what the machine has.
    """
    limits = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kib = dict(line.split(":") for line in lines)
        limits.append(1024 * sum(int(kib[name].split()[0]) for name in ("MemTotal", "SwapTotal")))
    except (OSError, ValueError, KeyError):
        try:
            limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        except (OSError, ValueError):
            pass
    for file in (
        "memory.max",
        "memory/memory.limit_in_bytes",
    ):  # versions 2 and 1 of control groups
        try:
            limits.append(int(Path("/sys/fs/cgroup", file).read_text()))
        except (OSError, ValueError):  # the latter: "max"
            continue
    return min(limits, default=None)
