"""The host's memory: how much there is, and a faster setting of malloc for training on a CPU."""

import ctypes
import os
from pathlib import Path

# Of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Keep malloc from returning large blocks to the system. Returns whether it could be set.

    By default glibc maps every block above 32 MiB anew, and the kernel zeroes its pages. With the
    gradients of many experts this took up to a third of a step. In exchange, the process keeps the most
    memory that it has ever used.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False  # not glibc
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, -1))


def machine_memory() -> int | None:
    """Bytes of memory and swap that this process can use; None if unknown.

    The smaller of the machine's memory and the container's limit.
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
    for file in ("memory.max", "memory/memory.limit_in_bytes"):  # control groups 2 and 1
        try:
            limits.append(int(Path("/sys/fs/cgroup", file).read_text()))
        except (OSError, ValueError):  # missing, or "max"
            continue
    return min(limits, default=None)
