"""Linear maps of single experts, whose weights are stacked with those of all others.

Plain autograd would make a gradient for each expert's weights, copy these into a stack, and add up one such
stack per stratum: with few tokens per expert, half the time of the products. Here each product adds to its
place in one stack.

Shapes: N rows of one expert, I inputs, O outputs, E experts.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from smoe_fairseq.modules import torch_features


class SharedGradient:
    """The gradient of stacked weights ``(E, O, I)`` and biases ``(E, O)`` that all uses add to.

    A sum belongs to one backward pass. One that never fetches it (``torch.autograd.grad`` of the inputs
    alone, or a pass that is interrupted) leaves nothing behind for the next.
    """

    def __init__(self):
        self.backward_pass: int | None = None

    def add(self, expert: int, y_grad_NO: Tensor, x_NI: Tensor, weight: Tensor) -> None:
        """Adds the gradient from the rows of one expert."""
        if self.backward_pass != backward_pass():
            self.backward_pass = backward_pass()
            self.weight = torch.empty_like(weight)
            self.bias = weight.new_empty(weight.shape[:2])
            self.written: set[int] = set()
        if expert in self.written:
            self.weight[expert].addmm_(y_grad_NO.t(), x_NI)
            self.bias[expert] += y_grad_NO.sum(0)
        else:
            torch.mm(y_grad_NO.t(), x_NI, out=self.weight[expert])
            torch.sum(y_grad_NO, 0, out=self.bias[expert])
            self.written.add(expert)

    def add_all(self, weight_grad: Tensor, bias_grad: Tensor) -> None:
        """Adds the gradient from the rows of all experts; takes over both tensors."""
        if self.backward_pass != backward_pass():
            self.backward_pass = backward_pass()
            self.weight, self.bias = weight_grad, bias_grad
            self.written = set(range(len(weight_grad)))
        else:
            self.weight.add_(weight_grad)
            self.bias.add_(bias_grad)

    def take(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of this backward pass, 0 for experts without rows."""
        if self.backward_pass != backward_pass():
            return torch.zeros_like(weight), weight.new_zeros(weight.shape[:2])
        for expert in set(range(len(weight))) - self.written:
            self.weight[expert].zero_()
            self.bias[expert].zero_()
        gradients = self.weight, self.bias
        self.backward_pass = self.weight = self.bias = None
        return gradients


def backward_pass() -> int:
    """Number of the backward pass that is under way.

    Private to torch, whose activation checkpointing asks for it too; tests/test_torch_features.py says what
    is expected of it.
    """
    return torch._C._current_graph_task_id()


class ShareGradient(torch.autograd.Function):
    """Weights and biases as they are; going back, the gradient that their uses have added up."""

    @staticmethod
    def forward(ctx, weight: Tensor, bias: Tensor, gradient: SharedGradient):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weight)
        ctx.gradient = gradient
        return weight.view_as(weight), bias.view_as(bias)

    @staticmethod
    def backward(ctx, *_):
        # `once_differentiable` would look at the incoming gradients, and there are none.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the experts' weights have no second derivative: expected create_graph=False"
            )
        return *ctx.gradient.take(*ctx.saved_tensors), None


class StackedLinear(NamedTuple):
    """The weights ``(E, O, I)`` and biases ``(E, O)`` of one linear map of each expert."""

    weight: Tensor
    bias: Tensor
    gradient: SharedGradient | None = None  # sums the gradient; None: autograd does

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor) -> "StackedLinear":
        """For the strata of one pass, which sum their gradients in one place."""
        if not torch.is_grad_enabled():
            return cls(weight, bias)
        gradient = SharedGradient()
        return cls(*ShareGradient.apply(weight, bias, gradient), gradient)


def expert_linear(
    x_NI: Tensor,
    linear: StackedLinear,
    expert: int,
    scale_N: Tensor | None = None,
    origin: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """``y = scale (W_e x + b_e)`` of one expert ``(N, O)``.

    Args:
        scale_N: None is 1. Its gradient needs no copy of the unscaled output.
        origin: ``(z, index)`` with ``x = z[index]``, if z is kept anyway: the backward pass gathers ``x``
            again instead of keeping it.
    """
    weight, bias, gradient = linear
    if torch.is_grad_enabled():
        kept = (x_NI, None) if origin is None else (origin[0].detach(), origin[1])
        return _ExpertLinear.apply(x_NI, weight, bias, scale_N, *kept, expert, gradient)
    return _scaled_linear(x_NI, weight[expert], bias[expert], scale_N)


class _ExpertLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x_NI: Tensor,
        weight: Tensor,
        bias: Tensor,
        scale_N: Tensor | None,
        kept: Tensor,
        index_N: Tensor | None,
        expert: int,
        gradient: SharedGradient,
    ) -> Tensor:
        ctx.save_for_backward(weight, bias, scale_N, kept, index_N)
        ctx.expert, ctx.gradient = expert, gradient
        return _scaled_linear(x_NI, weight[expert], bias[expert], scale_N)

    @staticmethod
    @once_differentiable
    def backward(ctx, y_grad_NO: Tensor):
        weight, bias, scale_N, x_NI, index_N = ctx.saved_tensors
        if index_N is not None:
            x_NI = x_NI.index_select(0, index_N)
        x_grad_NI = scale_grad_N = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[3]:
            x_grad_NI = y_grad_NO @ weight[ctx.expert]
        if scale_N is not None:
            if ctx.needs_input_grad[3]:  # <g, W x + b> = <W' g, x> + <g, b>
                scale_grad_N = torch.linalg.vecdot(x_grad_NI, x_NI)
                scale_grad_N.addmv_(y_grad_NO, bias[ctx.expert])
            scale_N1 = scale_N.unsqueeze(1)
            y_grad_NO = y_grad_NO * scale_N1
            x_grad_NI = x_grad_NI.mul_(scale_N1) if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[1]:
            ctx.gradient.add(ctx.expert, y_grad_NO, x_NI, weight)
        return x_grad_NI, None, None, scale_grad_N, None, None, None, None


def _scaled_linear(x_NI: Tensor, weight: Tensor, bias: Tensor, scale_N: Tensor | None) -> Tensor:
    y_NO = F.linear(x_NI, weight, bias)
    return y_NO if scale_N is None else y_NO.mul_(scale_N.unsqueeze(1))


# Products of each expert's rows with its weights, in one kernel where torch has one.
#
# torch 2.13 computes `torch.nn.functional.grouped_mm` in float32 and float16 too, but only knows the shape
# of its result, which `torch.compile` needs, in bfloat16; and on a GPU it does so one expert after the other,
# reading the ends on the host for every product. Its own gradient is not used, compiled or not: on GPUs of
# compute capability 10 that of experts without rows was seen to be anything (pytorch issue 172439).
#
# Shapes: N rows that lie by expert, I inputs, O outputs, E experts.


_CAPABILITIES = (9, 10)  # major ones, for which torch has the kernel


def can_group(weight: Tensor) -> bool:
    """Whether torch has a grouped product for such weights: their rows are multiples of 16 bytes."""
    per_16_bytes = 16 // weight.element_size()
    sizes_fit = all(size % per_16_bytes == 0 for size in weight.shape[1:])
    return sizes_fit and torch_features.has_grouped_mm(weight)


def one_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device computes grouped products in one kernel, and nothing waits for it."""
    if device.type != "cuda" or torch.version.cuda is None or dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(device)[0] in _CAPABILITIES


def grouped_linear(
    x_NI: Tensor, linear: StackedLinear, ends_E: Tensor, expert_NE: Tensor
) -> Tensor:
    """``y = W_e x + b_e`` for the rows of each expert ``(N, O)``; rows past the last end are undefined.

    Args:
        expert_NE: which rows are of which expert.
    """
    weight, bias, gradient = linear
    if gradient is None:
        return _linear(x_NI, weight, bias, ends_E, expert_NE)
    return _GroupedLinear.apply(x_NI, weight, bias, ends_E, expert_NE, gradient)


def _linear(x_NI, weight, bias, ends_E, expert_NE):
    # The bias by a product: the gradient of a gather of it would be a sum in which one warp walks all rows
    # of an expert.
    y_NO = grouped_mm(x_NI, weight.transpose(1, 2), ends_E)
    return torch.addmm(y_NO, expert_NE.to(y_NO.dtype), bias)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_NI, weight, bias, ends_E, expert_NE, gradient):
        ctx.save_for_backward(x_NI, weight, ends_E, expert_NE)
        ctx.gradient = gradient
        return _linear(x_NI, weight, bias, ends_E, expert_NE)

    @staticmethod
    @once_differentiable
    def backward(ctx, y_grad_NO: Tensor):
        x_NI, weight, ends_E, expert_NE = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            bias_grad_EO = expert_NE.t().to(y_grad_NO.dtype) @ y_grad_NO
            weight_grad_EOI = weight_gradient(y_grad_NO, x_NI, ends_E)
            ctx.gradient.add_all(weight_grad_EOI, bias_grad_EO)
        x_grad_NI = None
        if ctx.needs_input_grad[0]:
            x_grad_NI = grouped_mm(y_grad_NO, weight, ends_E)
        return x_grad_NI, None, None, None, None, None


def weight_gradient(
    y_grad_NO: Tensor, x_NI: Tensor, ends_E: Tensor, product: Callable | None = None
) -> Tensor:
    """``(E, O, I)``: of the weights of each expert; 0 for those without rows, which kernels leave as is."""
    gradient_EOI = (product or _product)(y_grad_NO.t(), x_NI, ends_E)
    empty_E = ends_E.diff(prepend=ends_E.new_zeros(1)) == 0
    return gradient_EOI.masked_fill_(empty_E.view(-1, 1, 1), 0)


def grouped_mm(x_NI: Tensor, w_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """``x W_e`` for the rows of each expert ``(N, O)``; rows past the last end are uninitialised.

    Where torch has no grouped product, one after the other, and the ends are read on the host.
    """
    if not can_group(w_EIO):
        sizes = torch.diff(ends_E, prepend=ends_E.new_zeros(1)).tolist()
        *rows, rest = x_NI.split([*sizes, len(x_NI) - sum(sizes)])
        products = [x @ w_IO for x, w_IO in zip(rows, w_EIO, strict=True)]
        return torch.cat([*products, rest.new_zeros(len(rest), w_EIO.shape[2])])
    return _product(x_NI, w_EIO, ends_E)


def _product(x: Tensor, w: Tensor, ends_E: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return _traced(x, w, ends_E)
    return torch_features.grouped_mm(x, w, offs=ends_E)


@torch.library.custom_op("smoe_fairseq::grouped_mm", mutates_args=())
def _traced(x: Tensor, w: Tensor, ends_E: Tensor) -> Tensor:
    return torch_features.grouped_mm(x, w, offs=ends_E)


@_traced.register_fake
def _(x, w, ends_E):
    if w.dim() == 3:
        return x.new_empty(x.shape[0], w.shape[2])
    return x.new_empty(ends_E.shape[0], x.shape[0], w.shape[1])  # the gradient of weights


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_NO):
    x_NI, w_EIO, ends_E = ctx.saved_tensors
    # Called while torch traces, also where it does not say so (2.11).
    x_grad_NI = _traced(grad_NO, w_EIO.transpose(1, 2), ends_E)
    w_grad_EOI = weight_gradient(grad_NO, x_NI, ends_E, _traced)
    return x_grad_NI, w_grad_EOI.transpose(1, 2), None


_traced.register_autograd(_backward, setup_context=_save)
