"""Batches beside each other on a CPU, each on one thread: small products gain little from several."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch


def in_threads(
    function: Callable, items: Iterable, number: int, stop: Callable[[], None] | None = None
) -> Iterator:
    """The results in the order of the items, so many of which are computed at a time.

    Args:
        stop: has those that are being computed end soon, by any exception; called where nobody waits for
            them. None: with one at a time nothing is left behind.
    """
    if number == 1:
        yield from map(function, items)
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(number)
    try:
        yield from pool.map(function, items)
    except BaseException:
        stop()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)
