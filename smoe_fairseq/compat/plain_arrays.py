"""numpy arrays and scalars of a checkpoint, built only from shape, type and bytes.

numpy's own constructors trust their arguments: with a type of objects, bytes of the file would become
memory addresses. Here types are numeric, and the number of bytes must match shape and type.
"""

import math
import pickle
import re

import numpy

MOST_DIMENSIONS = 8  # numpy itself gives up at 64, for want of memory
LARGEST = 1 << 40
NUMBERS = re.compile(r"[<>=|]?([?bhilqBHILQefd]|b1|[iu][1248]|f[248])")


class Array(numpy.ndarray):
    """Stands for ``numpy.ndarray``: starts empty, and is filled by what a checkpoint says of it, once.

    A second time would free what a tensor may have been made of meanwhile.
    """

    filled = False

    def __new__(cls, *given):
        if given:  # numpy's own takes a buffer, a shape and strides, and believes all of them
            raise pickle.UnpicklingError("an array of its own kind: expected one as numpy saves it")
        return super().__new__(cls, (0,), numpy.float64)

    def __setstate__(self, state: tuple) -> None:
        """Of version, shape, type, order and bytes, as numpy writes them."""
        _, shape, kind, fortran, content = state
        _check(kind, content, shape)
        if self.filled:
            raise pickle.UnpicklingError("an array that is filled twice")
        self.filled = True
        super().__setstate__((1, tuple(shape), kind.dtype, bool(fortran), content))

    def __reduce__(self):
        """Saved again, it is an array as any other."""
        return numpy.array(self, subok=False).__reduce__()


class Kind:
    """Stands for ``numpy.dtype``: numbers of one size and byte order."""

    dtype = None

    def __init__(self, code: str, *_):
        if not isinstance(code, str) or not NUMBERS.fullmatch(code):
            raise pickle.UnpicklingError(f"numpy's type {code!r}: expected one of numbers")
        self.dtype = numpy.dtype(code)

    def __setstate__(self, state: tuple) -> None:
        order, *further = state[1:5]
        if self.dtype is None or order not in ("<", ">", "=", "|") or further != [None] * 3:
            raise pickle.UnpicklingError(f"numpy's type {state!r}: expected one of numbers")
        self.dtype = self.dtype.newbyteorder(order)


def reconstruct(array: type, *_) -> Array:
    """Stands for numpy's function that makes an empty array, of which it is told shape and type too."""
    if array is not Array:
        raise pickle.UnpicklingError(f"an array of {array!r}: expected numpy's own")
    return Array()


def scalar(kind: Kind, content: bytes) -> numpy.generic:
    _check(kind, content, ())
    return numpy.frombuffer(content, kind.dtype)[0]


def _check(kind: Kind, content: bytes, shape: tuple) -> None:
    fine = isinstance(kind, Kind) and kind.dtype and isinstance(content, bytes)
    fine = fine and all(type(size) is int and 0 <= size <= LARGEST for size in shape)
    fine = fine and len(shape) <= MOST_DIMENSIONS
    if not fine or math.prod(shape) * kind.dtype.itemsize != len(content):
        raise pickle.UnpicklingError("an array with other bytes than its shape and type say")
