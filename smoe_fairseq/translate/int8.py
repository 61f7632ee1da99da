"""Translation in int8 on a CPU: linear layers, experts and the output projection of a loaded model.

Weights have a scale for each output, computed once; activations have one for each row, computed at every
call, so that translations do not depend on their batch. Both are symmetric: ``x_n = s_n q_n`` with
``s_n = max |x_n| / 127`` (the vector-wise quantisation of Dettmers et al. 2022, section 2). Sums are exact in
int32; biases, norms, attention weights and gates stay in float32.

It uses oneDNN's product of plain int8 tensors; torch's quantised tensor types are deprecated since 2.13.

Shapes: N rows, I inputs, O outputs, E experts.
"""

import functools

import torch
from torch import Tensor, nn

from smoe_fairseq.errors import UsageError
from smoe_fairseq.translate.packed import pack

INT8_HELP = "compute in 8-bit integers: faster on a CPU, nearly the same translations"
# oneDNN compiles a kernel for each number of rows, in 0.4 ms: of more rows only multiples of this are used.
STEP = 8
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
    """``y = W x + b`` with ``W (O, I)`` in int8, for evaluation."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None):
        super().__init__()
        weight_OI = weight_OI.detach().float()
        scale_O = (weight_OI.abs().amax(1) / 127).clamp_(min=_TINY)
        self.packed = _packed((weight_OI / scale_O.unsqueeze(1)).round_().to(torch.int8))
        self.scale_O = scale_O / levels()
        self.zeros_O = torch.zeros_like(scale_O, dtype=torch.int32)
        self.bias_O = None if bias_O is None else bias_O.detach().float()

    def forward(self, x: Tensor) -> Tensor:
        x_NI = x.reshape(-1, x.shape[-1]).float()
        y_NO = self.apply_rows(*quantized_rows(x_NI), 0, x_NI.shape[0])
        return y_NO.view(*x.shape[:-1], y_NO.shape[1])

    prepare = staticmethod(quantized_rows)

    def apply_rows(self, q_NI: Tensor, scale_N1: Tensor, start: int, end: int) -> Tensor:
        """The outputs ``(end - start, O)`` of some rows of `quantized_rows`."""
        if start == end:
            return scale_N1.new_zeros(0, len(self.scale_O))
        number = end - start
        if number < len(q_NI):
            q_NI = q_NI[start : start + (number + STEP - 1) // STEP * STEP]
            scale_N1 = scale_N1[start:end]
        y_NO = _product(q_NI, levels() + 1, self.packed, self.scale_O, self.zeros_O)[:number]
        if self.bias_O is None:
            return y_NO.mul_(scale_N1)
        return torch.addcmul(self.bias_O, y_NO, scale_N1, out=y_NO)


def quantize(model: nn.Module) -> None:
    """Make a `SMoETransformerModel` compute in int8; it can no longer be trained or saved.

    Raises:
        UsageError: this CPU has no int8 products.
    """
    check_int8(next(model.parameters()).device)
    pack(model, Int8Linear)
