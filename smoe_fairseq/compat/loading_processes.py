"""Processes that load data end with the iterator that they are for.

fairseq's `EpochBatchIterator` refers to the sampler of its batches, and the sampler, by a bound method,
to it. So an iterator that nobody needs any more stays, with its processes, until the garbage collector
comes by; and then torch cannot tell them to end, since Python closes the queues within such a circle
first: it waits five seconds and kills them (fairseq 0.12, whose loaders keep their processes, with any
torch). Each validation leaves some, each direction that is translated, and with ``--task
translation_multi_simple_epoch`` each epoch. Without the circle they end within milliseconds, as soon as
the iterator is left; only the iterator itself calls the method, so it is there.
"""

import functools
import inspect
import weakref
from types import ModuleType


def end_loading_processes(iterators: ModuleType) -> None:
    """`FrozenBatchSampler` does not keep the iterator that has made it."""
    original = iterators.FrozenBatchSampler.__init__

    @functools.wraps(original)
    def __init__(self, ordered_batches, *arguments, **options):
        original(self, _weak(ordered_batches), *arguments, **options)

    iterators.FrozenBatchSampler.__init__ = __init__


def _weak(method):
    if not inspect.ismethod(method):
        return method
    found = weakref.WeakMethod(method)
    return lambda *arguments: found()(*arguments)
