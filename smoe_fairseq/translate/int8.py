"""Translation in int8 on a CPU: linear layers, experts and the output projection of a loaded model.

Weights have a scale for each output, computed once; activations have one for each row, computed at every
call, so that translations do not depend on their batch. Both are symmetric: ``x_n = s_n q_n`` with
``s_n = max |x_n| / 127`` (the vector-wise quantisation of Dettmers et al. 2022, section 2). Sums are exact in
int32; biases, norms, attention weights and gates stay in float32.

It uses the faster of two products of plain int8 tensors, oneDNN's and fbgemm's. torch 2.13 deprecates the
latter, which without VNNI takes a third of the time for a few rows, and torch's quantised tensor types.

Shapes: N rows, I inputs, O outputs, E experts.
"""

import functools
import warnings

import torch
from torch import Tensor, nn

from smoe_fairseq.errors import UsageError
from smoe_fairseq.translate.fastest import fastest
from smoe_fairseq.translate.packed import pack

INT8_HELP = "compute in 8-bit integers: faster on a CPU, nearly the same translations"
# oneDNN compiles a kernel for each number of rows, in 0.4 ms: of more rows only multiples of this are used.
STEP = 8
_ROWS = (5, 40)  # of a step for one and eight sentences
_TINY = torch.finfo(torch.float32).tiny


def check_int8(device: torch.device) -> None:
    """Raise UsageError unless the device has int8 products."""
    if device.type != "cpu":
        raise UsageError(f"--int8 with --device {device}: int8 is for a CPU; expected --device cpu")
    if not levels():
        raise UsageError("--int8: oneDNN has no int8 products for this CPU; leave it out")


@functools.cache
def levels() -> int:
    """The maximum of quantised activations: 127, or 63 on CPUs without VNNI; 0 if int8 is not supported.

    Those CPUs add products in 16 bits, which saturate (oneDNN's guide, "Nuances of int8 computations").
    """
    ones_OI = torch.ones(16, 64, dtype=torch.int8)
    largest_NI = torch.full((STEP, 64), 255, dtype=torch.uint8)
    try:
        zeros_O, scale_O = torch.zeros(16, dtype=torch.int32), torch.ones(16, dtype=torch.float32)
        y_NO = _product(largest_NI, 128, _packed(127 * ones_OI), scale_O, zeros_O)
    except (AttributeError, RuntimeError):
        return 0
    return 127 if bool((y_NO == 127 * 127 * 64).all()) else 63


def _packed(weight_OI: Tensor) -> Tensor:
    return torch.ops.onednn.qlinear_prepack(weight_OI, None)


def _product(q_NI: Tensor, zero: int, packed: Tensor, scale_O: Tensor, zeros_O: Tensor) -> Tensor:
    """``scale_O * ((q - zero) W')`` in float32; ``zeros_O`` are the zero points of symmetric weights."""
    output = 1.0, 0, torch.float32  # scale, zero point and type
    return torch.ops.onednn.qlinear_pointwise(
        *(q_NI, 1.0, zero, packed, scale_O, zeros_O, None, *output, "none", [], "")
    )


def quantized_rows(x_NI: Tensor) -> tuple[Tensor, Tensor]:
    """``q`` of type uint8, ``(N, I)`` or more with arbitrary last rows, and scales ``(N, 1)``.

    Row n is ``scale_n / levels() * (q_n - zero)``, with ``zero = levels() + 1``.
    """
    number, inputs = x_NI.shape
    max_N1 = x_NI.abs().amax(1, keepdim=True)
    # From 3 << 22 on, a float's last bit has the value 1: the sum's lowest byte is q, rounded.
    # A row of zeros gets arbitrary q; its scale is 0.
    most, offset_I = _constants(levels(), inputs)
    sum_NI = torch.addcmul(offset_I, x_NI, most / max_N1)
    q_NI = sum_NI.view(torch.int32)
    if number <= STEP:
        return q_NI.to(torch.uint8), max_N1
    padded_NI = torch.empty(number + STEP, inputs, dtype=torch.uint8)
    padded_NI[:number] = q_NI
    return padded_NI, max_N1


@functools.cache
def _constants(most: int, inputs: int) -> tuple[Tensor, Tensor]:
    """torch adds a vector several times as fast as it adds a scalar tensor."""
    offset_I = torch.full((inputs,), (3 << 22) + most + 1, dtype=torch.float32)
    return torch.tensor(most, dtype=torch.float32), offset_I


class Int8Linear(nn.Module):
    """``y = W x + b`` with ``W (O, I)`` in int8, for evaluation, by oneDNN's product."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None):
        super().__init__()
        weight_OI = weight_OI.detach().float()
        scale_O = (weight_OI.abs().amax(1) / 127).clamp_(min=_TINY)
        self.pack((weight_OI / scale_O.unsqueeze(1)).round_().to(torch.int8))
        self.scale_O = scale_O / levels()
        self.bias_O = None if bias_O is None else bias_O.detach().float()

    def forward(self, x: Tensor) -> Tensor:
        x_NI = x.reshape(-1, x.shape[-1]).float()
        y_NO = self.apply_rows(*self.prepare(x_NI), 0, x_NI.shape[0])
        return y_NO.view(*x.shape[:-1], y_NO.shape[1])

    prepare = staticmethod(quantized_rows)

    def apply_rows(self, q_NI: Tensor, scale_N1: Tensor, start: int, end: int) -> Tensor:
        """The outputs ``(end - start, O)`` of some rows of `prepare`."""
        if start == end:
            return scale_N1.new_zeros(0, len(self.scale_O))
        y_NO, scale_N1 = self.product(q_NI, start, end), scale_N1[start:end]
        if self.bias_O is None:
            return y_NO.mul_(scale_N1)
        return torch.addcmul(self.bias_O, y_NO, scale_N1, out=y_NO)

    def pack(self, weight_OI: Tensor) -> None:
        self.packed = _packed(weight_OI)
        self.zeros_O = torch.zeros(len(weight_OI), dtype=torch.int32)

    def product(self, q_NI: Tensor, start: int, end: int) -> Tensor:
        number = end - start
        if number < len(q_NI):
            q_NI = q_NI[start : start + (number + STEP - 1) // STEP * STEP]
        return _product(q_NI, levels() + 1, self.packed, self.scale_O, self.zeros_O)[:number]


class FbgemmLinear(Int8Linear):
    """The same by fbgemm's product, which quantises all rows alike, by their smallest and largest number.

    So each row is divided by its maximum, and one more row has the two numbers with which 1 becomes `levels`.
    """

    @staticmethod
    def prepare(x_NI: Tensor) -> tuple[Tensor, Tensor]:
        max_N1 = x_NI.abs().amax(1, keepdim=True).clamp_(min=_TINY)
        return x_NI / max_N1, max_N1

    def pack(self, weight_OI: Tensor) -> None:
        outputs, self.inputs = weight_OI.shape
        self.packed = torch.fbgemm_pack_quantized_matrix(weight_OI)
        self.sum_O = weight_OI.sum(1, dtype=torch.int32)
        self.zeros_O = torch.zeros(outputs, dtype=torch.float32)
        self.shape_OI = weight_OI.new_zeros(1).expand(
            weight_OI.shape
        )  # the product reads its shape

    def product(self, q_NI: Tensor, start: int, end: int) -> Tensor:
        rows_NI = torch.cat((q_NI[start:end], _range(levels(), self.inputs)))
        y_NO = torch.fbgemm_linear_int8_weight_fp32_activation(
            *(rows_NI, self.shape_OI, self.packed, self.sum_O, float(levels()), 0, self.zeros_O)
        )
        return y_NO[: end - start].mul_(self.scale_O)


@functools.cache
def _range(most: int, inputs: int) -> Tensor:
    """A row with which fbgemm quantises 1 to ``most`` and 0 to ``most + 1``, of 0 to 255."""
    row_1I = torch.full((1, inputs), -(most + 1) / most, dtype=torch.float32)
    row_1I[0, 0] = (254 - most) / most
    return row_1I


@functools.cache
def has_fbgemm() -> bool:
    """Whether torch has fbgemm's product, and it has the largest sums."""
    x_NI = torch.ones(2, 64, dtype=torch.float32)
    with warnings.catch_warnings(action="ignore"):  # which torch gives once
        try:
            y_NO = FbgemmLinear(x_NI, None)(x_NI)
        except (AttributeError, RuntimeError):
            return False
    return bool(((y_NO - 64).abs() < 0.01).all())


def fastest_int8(weight_OI: Tensor, bias_O: Tensor | None) -> Int8Linear:
    """An `Int8Linear`, or a `FbgemmLinear` where that is much faster."""
    kinds = {"onednn-int8": Int8Linear}
    if has_fbgemm():
        kinds["fbgemm-int8"] = FbgemmLinear
    return kinds[fastest(kinds, weight_OI, _ROWS)](weight_OI, bias_O)


def quantize(model: nn.Module) -> None:
    """Make a `SMoETransformerModel` compute in int8; it can no longer be trained or saved.

    Raises:
        UsageError: this CPU has no int8 products.
    """
    check_int8(next(model.parameters()).device)
    pack(model, fastest_int8)
