"""The host: its memory and cores, and faster malloc settings for CPUs."""

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

# From glibc's malloc.h, and Linux' mman.h.
_MXFAST, _TRIM_THRESHOLD, _MMAP_MAX = 1, -1, -4
_MADV_HUGEPAGE = 14
_HUGE = 1 << 21  # bytes of a huge page on x86 and most others
_keeping: list[ctypes.CDLL] = []  # the C library, if it keeps freed memory


def keep_freed_memory() -> bool:
    """Keep malloc from returning large blocks to the system; returns whether malloc supports that.

    By default glibc maps every block above 32 MiB anew, and the kernel zeroes its pages. With the
    gradients of many experts this took up to a third of a step. In exchange, the process never shrinks.
    """
    try:
        library = ctypes.CDLL(None)
        # Without bins of small blocks, a large one does not have to merge their contents first.
        settings = {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1, _MXFAST: 0}
        kept = all(library.mallopt(*setting) for setting in settings.items())
    except (AttributeError, OSError, TypeError):
        return False  # not glibc
    _keeping[:] = [library] * kept
    return kept


def reserve_huge_pages(size: int) -> None:
    """Let the next ``size`` bytes that this thread allocates lie in huge pages, if freed memory is kept.

    A step of a search reads all weights; with pages of 4 KiB it takes up to a quarter longer.
    """
    if not _keeping or size < _HUGE:
        return
    (library,) = _keeping
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes, library.free.restype = [ctypes.c_void_p], None
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if block := library.malloc(size + 2 * _HUGE):  # not touched, so it takes no memory yet
        start = -(-block // _HUGE) * _HUGE
        library.madvise(start, size // _HUGE * _HUGE, _MADV_HUGEPAGE)
        library.free(block)


def let_threads_sleep() -> None:
    """Keep libgomp's threads from spinning while they wait; called before torch is imported.

    They make a run on a busy machine 2 to 10 times slower. Programs that are started inherit it.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def machine_memory(root: Path = Path("/")) -> int | None:
    """Bytes of memory, without swap, that this process can use; None if unknown.

    The smallest of the machine's memory and the limits of this process's control groups, such as those of
    a container, a SLURM job or a systemd unit.

    Args:
        root: where /proc and /sys are.
    """
    limits = []
    try:
        meminfo = (root / "proc/meminfo").read_text()
        limits.append(1024 * int(re.search(r"^MemTotal:\s*(\d+)", meminfo, re.M)[1]))
    except (OSError, TypeError):
        with suppress(OSError, ValueError):
            limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for file in _group_files(root, "memory", "memory.max", "memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # missing, or "max"
            limits.append(int(file.read_text()))
    return min(limits, default=None)


def cores(root: Path = Path("/")) -> int:
    """The number of CPU cores that this process may use, by its affinity and its control groups' quotas."""
    number = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        number = len(os.sched_getaffinity(0))
    for file in _group_files(root, "cpu", "cpu.max", "cpu.cfs_quota_us"):
        with suppress(OSError, ValueError):  # missing, or "max"
            if file.name != "cpu.max":
                quota, period = file.read_text(), file.with_name("cpu.cfs_period_us").read_text()
            else:
                quota, period = file.read_text().split()
            if int(quota) > 0:  # -1: no limit
                number = min(number, int(quota) // int(period))
    return max(number, 1)


def _group_files(root: Path, controller: str, name: str, name_in_v1: str) -> Iterator[Path]:
    """A controller's files for this process's control groups and their ancestors."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:  # version 2
            folder, file = root / "sys/fs/cgroup", name
        elif controller in controllers.split(","):
            folder, file = root / "sys/fs/cgroup" / controller, name_in_v1
        else:
            continue
        # In a container the group's path may be that of the host, which is not mounted here.
        for above in (PurePosixPath(group), *PurePosixPath(group).parents):
            yield folder / str(above).strip("/") / file
