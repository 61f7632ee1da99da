"""Products of all experts in one launch: which kernel computes them on a device, and how ours are launched.

torch's kernel is taken where it is one (bf16 on compute capability 9 and 10), elsewhere ours, in Triton. With
both, the host does not wait for the numbers of rows.

Shapes: N rows, sorted by expert, I inputs, O outputs, E experts.
"""

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from smoe_fairseq.modules import torch_features

logger = logging.getLogger(__name__)
TYPES = (torch.float32, torch.float16, torch.bfloat16)
ONE_KERNEL = (9, 10)  # major compute capabilities for which torch has the kernel
OLDEST = (7, 5)  # compute capability; Triton supports none before
SHRINKS = (1, 2, 4, 8)  # of tiles, tried in this order
TILE, DEPTH = (
    128,
    32,
)  # rows and columns of a tile of our products, and how many numbers it sums at a time


def can_group(weight: Tensor) -> bool:
    """Whether torch has a grouped product for such weights, whose rows must be multiples of 16 bytes."""
    if torch_features.grouped_mm is None or weight.dtype not in TYPES:
        return False
    return all(size * weight.element_size() % 16 == 0 for size in weight.shape[1:])


def one_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch computes a grouped product in one kernel, so that the host does not wait."""
    if device.type != "cuda" or torch.version.cuda is None or dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(device)[0] in ONE_KERNEL


@functools.cache
def kernels():
    """The kernels; None without Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    from smoe_fairseq.modules import kernels

    return kernels


def why_not_triton(device: torch.device, dtype: torch.dtype) -> str:
    """Why our kernels are not for a device and type; empty if they are.

    Where float32 may not be rounded to TF32, Triton's products have no tensor cores.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return "our kernels are for NVIDIA's GPUs"
    if torch.cuda.get_device_capability(device) < OLDEST:
        return "our kernels need compute capability 7.5"
    if dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest":
        return "float32 is exact; --tf32 or half precision is faster"
    if dtype not in TYPES:
        return f"our kernels do not know {str(dtype).removeprefix('torch.')}"
    return "" if kernels() is not None else "Triton is not installed"


@functools.cache
def tile_of(device: torch.device, dtype: torch.dtype) -> int | None:
    """The rows and columns of our products' tiles, the largest that fit the device; None if none do."""
    if kernels() is None or dtype not in TYPES:
        return None
    if device.type != "cuda" and not kernels().is_interpreted():
        return None
    x = torch.ones(32, 32, device=device, dtype=dtype)
    ends = torch.full((1,), 32, device=device, dtype=torch.int32)
    for shrink in SHRINKS:
        try:
            multiply(launch, TILE // shrink, x, x.unsqueeze(0), ends)
            outer(launch, TILE // shrink, x, x, ends)
            return TILE // shrink
        except Exception as error:  # of a compiler, a driver or Triton itself
            if type(error).__name__ != "OutOfResources":
                logger.warning("no grouped products on %s, since Triton fails: %s", device, error)
                return None
    return None


class Launcher:
    """Launches kernels through Triton the first time, then directly.

    Triton inspects every argument of every launch, which takes the host longer than the kernel takes the
    device.

    Args:
        tensors: the inputs, whose types and alignment decide which compiled kernel fits.
    """

    compiled: ClassVar[dict] = {}

    def __init__(self, *tensors: Tensor):
        self.types = tuple(t.dtype for t in tensors), tensors[0].device
        self.direct = not any(t.data_ptr() % 16 for t in tensors)

    def __call__(self, kernel, grid: tuple, arguments: tuple, constants: tuple, **options) -> None:
        key = kernel.__name__, constants, self.types
        compiled = self.compiled.get(key) if self.direct else None
        if compiled is None:  # interpreted kernels return None
            self.compiled[key] = kernel[grid](*arguments, *constants, **options)
        else:
            compiled[(*grid, 1, 1)](*arguments, *constants)


def launch(kernel, grid: tuple, arguments: tuple, constants: tuple, **options) -> None:
    """As a `Launcher` for the tensors of ``arguments``."""
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    with torch.cuda.device_of(tensors[0]):  # where Triton launches
        Launcher(*tensors)(kernel, grid, arguments, constants, **options)


def precision() -> str:
    """Of products in float32, as Triton names it."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def multiply(
    launch: Callable,
    tile: int,
    x_NI: Tensor,
    weight: Tensor,
    ends_E: Tensor,
    first: int = 0,
    back: bool = False,
    activation: tuple | None = None,
) -> Tensor:
    """``x W_e'`` by our kernel, with ``back`` ``x W_e``, for weights ``(E, O, I)`` from the ``first`` on.

    Args:
        activation: bias, seed, stratum and dropout; then ``dropout(relu(x W_e' + bias))``.
    """
    (rows, inputs), outputs = x_NI.shape, weight.shape[2 if back else 1]
    y_NO = x_NI.new_empty(rows, outputs)
    bias, seed, i, dropout = activation or (weight, weight, 0, 0.0)
    programs = (-(-rows // tile) + len(ends_E)) * -(-outputs // tile)
    launch(
        kernels().multiply, (programs,),
        (x_NI, weight, bias, y_NO, ends_E, seed, i, len(ends_E), first),
        (inputs, outputs, back, activation is not None, dropout, precision(),
         max(next_power(len(ends_E)), 16), tile, tile, DEPTH),
        num_warps=8,
    )  # fmt: skip
    return y_NO


def outer(launch: Callable, tile: int, y_NO: Tensor, x_NI: Tensor, ends_E: Tensor) -> Tensor:
    """``sum_n y_n x_n'`` over each expert's rows ``(E, O, I)`` by our kernel; 0 without rows."""
    outputs, inputs = y_NO.shape[1], x_NI.shape[1]
    gradient_EOI = y_NO.new_empty(len(ends_E), outputs, inputs)
    launch(
        kernels().outer, (len(ends_E) * -(-outputs // tile) * -(-inputs // tile),),
        (y_NO, x_NI, gradient_EOI, ends_E),
        (outputs, inputs, precision(), tile, tile, DEPTH),
        num_warps=8,
    )  # fmt: skip
    return gradient_EOI


def next_power(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()
