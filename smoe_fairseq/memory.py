"""Memory of training on the CPU: what one update has freed, the next one takes again."""

import ctypes

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
