"""How many threads torch computes on."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

_lock, _before = threading.Lock(), 1
_inside = Counter()  # calls of `one_thread`, by thread


@contextmanager
def one_thread() -> Iterator[None]:
    """torch computes on one thread for who is within, and as before for who has left.

    torch has this number for each thread, and one with which new threads begin.
    """
    global _before
    caller = threading.get_ident()
    with _lock:
        _before = _before if _inside else torch.get_num_threads()
        _inside[caller] += 1
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _lock:
            _inside[caller] -= 1
            if not _inside[caller]:
                del _inside[caller]
                torch.set_num_threads(_before)


def in_threads(
    function: Callable, items: Iterable, number: int, stop: Callable[[], None] | None = None
) -> Iterator:
    """The results of all items, in their order; ``number`` are computed at a time, each on one thread.

    Small products gain little from several threads, and lose much on a busy machine.

    Args:
        number: 0: one at a time, on torch's threads.
        stop: ends running computations when their results are no longer needed; not needed if ``number``
            is 1.
    """
    if number == 0:
        yield from map(function, items)
        return
    with one_thread():
        if number == 1:
            yield from map(function, items)
            return
        with ThreadPoolExecutor(number, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            try:
                yield from pool.map(function, items)
            except BaseException:
                stop()
                pool.shutdown(cancel_futures=True)
                raise
