"""Products of all experts' rows in one launch, by torch or by our kernels.

torch's kernel is taken where it is one (bf16 on compute capability 9 and 10), elsewhere ours, in Triton. With
both, the host does not wait for the numbers of rows.

Shapes: N rows, sorted by expert, I inputs, O outputs, E experts.
"""

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from smoe_fairseq.modules import torch_features

logger = logging.getLogger(__name__)
TYPES = (torch.float32, torch.float16, torch.bfloat16)
ONE_KERNEL = (9, 10)  # major compute capabilities for which torch has the kernel
OLDEST = (7, 5)  # compute capability; Triton supports none before
SHRINKS = (1, 2, 4, 8)  # of tiles, tried in this order
SPILLS = 16  # numbers of a thread that a kernel may keep in memory
TILE = 128  # rows and columns of a tile of our products
DEPTH = 32  # how many numbers it sums at a time


def can_group(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether torch has a grouped product for weights of this shape in ``dtype``; rows are whole 16 bytes."""
    if torch_features.grouped_mm is None or dtype not in TYPES:
        return False
    return all(size * dtype.itemsize % 16 == 0 for size in weight.shape[1:])


@functools.cache
def kernels():
    """The kernels; None without Triton, or with one before 3.6, which launches compiled kernels otherwise."""
    if importlib.util.find_spec("triton") is None:
        return None
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
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
    if dtype == torch.float32 and torch_features.float32_is_exact():
        return "float32 is exact; half precision is faster"
    if dtype not in TYPES:
        return f"our kernels do not know {str(dtype).removeprefix('torch.')}"
    return "" if kernels() is not None else "Triton 3.6 or later is not installed"


def torch_has_one(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether torch has a grouped product for such weights that is one kernel in this type, or on a CPU."""
    if weight.device.type != "cuda" or not can_group(weight, dtype):
        return can_group(weight, dtype)
    if torch.version.cuda is None or dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(weight.device)[0] in ONE_KERNEL


def products_of(weight: Tensor) -> "TorchProducts | None":
    """torch's product for weights ``(E, O, I)`` where it is one kernel, or traced; else ours, if they fit."""
    if torch.compiler.is_compiling():
        return TorchProducts(_traced) if can_group(weight, weight.dtype) else None
    if torch_has_one(weight, weight.dtype):
        return TorchProducts()
    tile = tile_of(weight.device, weight.dtype)
    return TritonProducts(tile) if tile else None


@functools.cache
def tile_of(device: torch.device, dtype: torch.dtype) -> int | None:
    """The rows and columns of our products' tiles, the largest that fit the device; None if none do."""
    if kernels() is None or dtype not in TYPES:
        return None
    if device.type != "cuda" and not kernels().is_interpreted():
        return None
    x = torch.ones(32, 32, device=device, dtype=dtype)
    ends = torch.full((1,), 32, device=device, dtype=torch.int32)

    def try_products(shrink: int) -> int:
        products = TritonProducts(TILE // shrink)
        products.multiply(x, x.unsqueeze(0), ends)
        products.outer(x, x, ends)
        return 0

    shrink = largest_tiles(try_products, f"grouped products on {device}")
    return shrink and TILE // shrink


def largest_tiles(spills_of: Callable[[int], int], what: str) -> int | None:
    """The number that divides the tiles so that kernels fit the device, and spill least; None: none does.

    Args:
        spills_of: from that number to how many numbers a thread keeps in memory, at most.
        what: the kernels; it is logged with the error if none fits.
    """
    spills, reason = {}, ""
    for shrink in SHRINKS:
        try:
            spills[shrink] = spills_of(shrink)
        except Exception as error:  # of a compiler, a driver or Triton itself
            reason = str(error)
            if type(error).__name__ == "OutOfResources":
                continue
            break
        if spills[shrink] <= SPILLS:
            break
    if not spills:
        logger.warning("no %s, since Triton fails: %s", what, reason)
    return min(spills, key=spills.get, default=None)


class TorchProducts:
    """By torch's grouped product, or one like it."""

    def __init__(self, product: Callable | None = None):
        self.product = product or torch_features.grouped_mm

    def multiply(
        self, x_NI: Tensor, weight: Tensor, ends_E: Tensor, first: int = 0, back: bool = False
    ) -> Tensor:
        """``x W_e'``, with ``back`` ``x W_e``, of the experts from the ``first`` on ``(N, O)``.

        Rows behind the last end are uninitialised.

        Args:
            weight: ``(E, O, I)``, with ``back`` ``(E, I, O)``.
        """
        weight = weight[first:] if first else weight
        return self.product(x_NI, weight if back else weight.transpose(1, 2), offs=ends_E)

    def outer(self, y_NO: Tensor, x_NI: Tensor, ends_E: Tensor) -> Tensor:
        """``sum_n y_n x_n'`` over each expert's rows ``(E, O, I)``; 0 without rows."""
        gradient_EOI = self.unsettled_outer(y_NO, x_NI, ends_E)
        empty_E = ends_E.diff(prepend=ends_E.new_zeros(1)) == 0
        return gradient_EOI.masked_fill_(empty_E.view(-1, 1, 1), 0)

    def unsettled_outer(self, y_NO: Tensor, x_NI: Tensor, ends_E: Tensor) -> Tensor:
        """`outer` that leaves experts without rows uninitialised."""
        return self.product(y_NO.t(), x_NI, offs=ends_E)


class TritonProducts(TorchProducts):
    """By our kernels.

    Args:
        tile: see `tile_of`.
        launch: a `Launcher`, which has the arguments of the end of a product.
        ranks: the rows are sorted by rank and expert, and the ends are those of each pair.
    """

    def __init__(self, tile: int, launch: "Launcher | None" = None, ranks: int = 1):
        self.tile, self.launch, self.ranks = tile, launch, ranks

    def multiply(self, x_NI, weight, ends_E, first=0, back=False, bias=None, end="") -> Tensor:
        """As of torch.

        Args:
            end: "bias" adds a bias ``(E, O)``; "relu" then also applies ReLU and dropout.
        """
        x_NI, (rows, inputs) = x_NI.contiguous(), x_NI.shape
        outputs = weight.shape[2 if back else 1]
        y_NO = x_NI.new_empty(rows, outputs)
        tiles = -(-rows // self.tile) + len(ends_E), -(-outputs // self.tile)
        self._launch(
            kernels().multiply, tiles[0] * tiles[1], x=x_NI, w=weight, y=y_NO, ends=ends_E, first=first,
            bias=weight if bias is None else bias, INPUTS=inputs, OUTPUTS=outputs, BACK=back, END=end,
            BLOCK_E=max(next_power(len(ends_E)), 16), BLOCK_N=self.tile, BLOCK_O=self.tile, BLOCK_I=DEPTH,
        )  # fmt: skip
        return y_NO

    def outer(self, y_NO, x_NI, ends_E) -> Tensor:
        y_NO, x_NI = y_NO.contiguous(), x_NI.contiguous()
        experts, outputs, inputs = len(ends_E) // self.ranks, y_NO.shape[1], x_NI.shape[1]
        gradient_EOI = y_NO.new_empty(experts, outputs, inputs)
        self._launch(
            kernels().outer, experts * -(-outputs // self.tile) * -(-inputs // self.tile),
            x=x_NI, y=y_NO, grad=gradient_EOI, ends=ends_E, OUTPUTS=outputs, INPUTS=inputs,
            BLOCK_O=self.tile, BLOCK_I=self.tile, BLOCK_N=DEPTH,
        )  # fmt: skip
        return gradient_EOI

    unsettled_outer = outer

    def _launch(self, kernel, programs: int, x: Tensor, ends: Tensor, **named) -> None:
        named |= {"x": x, "ends": ends, "held": len(ends) // self.ranks, "ranks": self.ranks}
        # Whether float32 may be rounded, as Triton names it.
        named["PRECISION"] = "ieee" if torch_features.float32_is_exact() else "tf32"
        if self.launch is not None:
            return self.launch(kernel, programs, num_warps=8, **named)
        tensors = [value for value in named.values() if isinstance(value, Tensor)]
        launch = Launcher({"seed": x, "stratum": 0, "INNER_DROPOUT": 0.0}, *tensors)
        with torch.cuda.device_of(x):  # where Triton launches
            launch(kernel, programs, num_warps=8, **named)


class Launcher:
    """Launches kernels with arguments by name: through Triton the first time, then directly.

    Triton inspects every argument of every launch, which takes the host longer than the kernel takes the
    device.

    Args:
        named: arguments of all launches, which a launch may replace; others that a kernel lacks are ignored.
        tensors: the inputs, whose types and alignment decide which compiled kernel fits.
    """

    compiled: ClassVar[dict] = {}

    def __init__(self, named: dict[str, Any], *tensors: Tensor):
        self.named = named
        self.types = tuple(t.dtype for t in tensors), tensors[0].device
        self.direct = not any(t.data_ptr() % 16 for t in tensors)

    def __call__(self, kernel, *grid: int, num_warps: int = 4, **named) -> None:
        named = {**self.named, **named}
        values = {name: named[name] for name in kernel.arg_names}
        self.start(kernel, grid, values, num_warps=num_warps)

    def start(self, kernel, grid: tuple[int, ...], values: dict[str, Any], **options) -> None:
        constants = kernel.fn.__annotations__  # all others have none
        key = kernel.__name__, self.types, *map(values.get, constants)
        compiled = self.compiled.get(key) if self.direct else None
        if compiled is None:  # interpreted kernels return None
            self.compiled[key] = kernel[grid](**values, **options)
        else:
            compiled[(*grid, 1, 1)[:3]](*values.values())


def next_power(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()


@torch.library.custom_op("smoe_fairseq::grouped_mm", mutates_args=())
def _traced(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """torch's grouped product, for `torch.compile`.

    In float32 and float16, torch 2.13 gives the compiler no shape of its result. Its own gradient is
    arbitrary for experts without rows on compute capability 10 (pytorch issue 172439).
    """
    return torch_features.grouped_mm(x, w, offs=offs)


@_traced.register_fake
def shape_of_product(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """A tensor of the product's shape, without values."""
    if w.dim() == 3:
        return x.new_empty(x.shape[0], w.shape[2])
    return x.new_empty(offs.shape[0], x.shape[0], w.shape[1])  # the gradient of weights


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_NO):
    x_NI, w_EIO, ends_E = ctx.saved_tensors
    # Only called while tracing, although torch 2.11 does not report that.
    products = TorchProducts(_traced)
    x_grad_NI = products.multiply(grad_NO, w_EIO, ends_E)
    return x_grad_NI, products.outer(grad_NO, x_NI, ends_E).transpose(1, 2), None


_traced.register_autograd(_backward, setup_context=_save)
