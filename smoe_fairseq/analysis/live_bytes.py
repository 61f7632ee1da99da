"""How many bytes of tensors are alive, counted on the meta device: shapes and lifetimes, and no data."""

import math
import weakref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_READ = torch.ops.aten._local_scalar_dense.default
_COPY = torch.ops.aten._to_copy.default


class TooMuch(Exception):
    """More bytes are alive than may be."""


class LiveBytes(TorchDispatchMode):
    """Within it, all storages that tensors on the meta device have: `now`, and `peak` at most.

    Each storage counts once, whatever shows parts of it, from the operation that makes it until its last
    tensor is gone, backward passes included. What a kernel takes and gives back within one operation, and
    gaps between blocks of memory, count nowhere. A number that is read on the host, of which there is none,
    is 1, a condition does not hold, and a tensor that is copied there is full of 0.

    Args:
        limit: where `TooMuch` is raised.
    """

    def __init__(self, limit: float = math.inf):
        super().__init__()
        self.limit = limit
        self.now = self.peak = 0
        self._alive: dict[int, weakref.ref] = {}

    def forget_peak(self) -> None:
        """Lets `peak` count from here on."""
        self.peak = self.now

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _READ and args[0].is_meta:
            return args[0].dtype != torch.bool and 1
        kwargs = kwargs or {}
        if (
            func is _COPY
            and args[0].is_meta
            and torch.device(kwargs.get("device", "meta")).type != "meta"
        ):
            dtype = kwargs.get("dtype", args[0].dtype)
            return torch.zeros((), dtype=dtype).expand(args[0].shape)  # which takes no memory
        result = func(*args, **kwargs)
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor) and each.is_meta:
                self._count(each.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def gone(_):
            del self._alive[key]
            self.now -= size

        self._alive[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)
        if self.now > self.limit:
            raise TooMuch
