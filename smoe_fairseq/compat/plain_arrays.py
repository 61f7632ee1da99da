"""numpy arrays and scalars of a checkpoint, built only from shape, type and bytes.

numpy's constructors trust their arguments: with the type object, bytes of the file would become memory
addresses. Here types are numeric, and the number of bytes must match shape and type.
"""

import math
import pickle
import re

import numpy

MAX_DIMENSIONS = 8
MAX_SIZE = 1 << 40
NUMBERS = re.compile(r"[<>=|]?([?bhilqBHILQefd]|b1|[iu][1248]|f[248])")


class Array(numpy.ndarray):
    """Replaces ``numpy.ndarray``: created empty, and filled by the unpickler once.

    Filling it again would free memory that a tensor may share.
    """

    filled = False

    def __new__(cls, *arguments):
        if arguments:  # numpy's constructor trusts a buffer, a shape and strides
            raise pickle.UnpicklingError("an array with arguments: expected one as numpy saves it")
        return super().__new__(cls, (0,), numpy.float64)

    def __setstate__(self, state: tuple) -> None:
        """The state is (version, shape, type, order, bytes), as numpy writes it."""
        _, shape, kind, fortran, content = state
        _check(kind, content, shape)
        if self.filled:
            raise pickle.UnpicklingError("an array that is filled twice")
        self.filled = True
        super().__setstate__((1, tuple(shape), kind.dtype, bool(fortran), content))

    def __reduce__(self):
        """Saved again, it is an ordinary array."""
        return numpy.array(self, subok=False).__reduce__()


class Kind:
    """Replaces ``numpy.dtype``: numbers of one size and byte order."""

    dtype = None

    def __init__(self, code: str, *_):
        if not isinstance(code, str) or not NUMBERS.fullmatch(code):
            raise pickle.UnpicklingError(f"numpy's type {code!r}: expected one of numbers")
        self.dtype = numpy.dtype(code)

    def __setstate__(self, state: tuple) -> None:
        order, *others = state[1:5]
        if self.dtype is None or order not in ("<", ">", "=", "|") or others != [None] * 3:
            raise pickle.UnpicklingError(f"numpy's type {state!r}: expected one of numbers")
        self.dtype = self.dtype.newbyteorder(order)


def reconstruct(array: type, *_) -> Array:
    """Replaces numpy's function that creates an empty array; its shape and type are ignored."""
    if array is not Array:
        raise pickle.UnpicklingError(f"an array of {array!r}: expected numpy's own")
    return Array()


def scalar(kind: Kind, content: bytes) -> numpy.generic:
    _check(kind, content, ())
    return numpy.frombuffer(content, kind.dtype)[0]


def _check(kind: Kind, content: bytes, shape: tuple) -> None:
    valid = isinstance(kind, Kind) and kind.dtype and isinstance(content, bytes)
    valid = valid and all(type(size) is int and 0 <= size <= MAX_SIZE for size in shape)
    valid = valid and len(shape) <= MAX_DIMENSIONS
    if not valid or math.prod(shape) * kind.dtype.itemsize != len(content):
        raise pickle.UnpicklingError("an array whose bytes do not match its shape and type")
