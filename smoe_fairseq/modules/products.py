"""Linear maps of single experts, whose weights are stacked with those of all others.

Plain autograd would make a gradient of each expert's weights, copy them into a stack, and add up such a
stack for every stratum that uses them: with few tokens per expert, half the time of the products. Here
each product adds to its place in one stack.

Shapes: N rows of one expert, I inputs, O outputs, E experts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class SharedGradient:
    """The gradient of stacked weights ``(E, O, I)`` and biases ``(E, O)`` that all uses add to.

    A sum belongs to one backward pass. One that never fetches it (``torch.autograd.grad`` of the inputs
    alone, or a pass that is interrupted) leaves nothing behind for the next.
    """

    def __init__(self):
        self.backward_pass: int | None = None

    def add(self, expert: int, y_grad_NO: Tensor, x_NI: Tensor, weight: Tensor) -> None:
        """Adds what the rows of one expert say."""
        if self.backward_pass != _backward_pass():
            self.backward_pass = _backward_pass()
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
        """Adds what the rows of all experts say, in tensors that are this one's from now on."""
        if self.backward_pass != _backward_pass():
            self.backward_pass = _backward_pass()
            self.weight, self.bias = weight_grad, bias_grad
            self.written = set(range(len(weight_grad)))
        else:
            self.weight.add_(weight_grad)
            self.bias.add_(bias_grad)

    def take(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of this backward pass, 0 for experts without rows."""
        if self.backward_pass != _backward_pass():
            return torch.zeros_like(weight), weight.new_zeros(weight.shape[:2])
        for expert in set(range(len(weight))) - self.written:
            self.weight[expert].zero_()
            self.bias[expert].zero_()
        gradients = self.weight, self.bias
        self.backward_pass = self.weight = self.bias = None
        return gradients


def _backward_pass() -> int:
    """Number of the backward pass that is under way; torch's own activation checkpointing asks for it."""
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
        # Not `once_differentiable`, which looks at what comes in: here that is nothing.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the experts' weights have no second derivative: expected create_graph=False"
            )
        return *ctx.gradient.take(*ctx.saved_tensors), None


def expert_linear(
    x_NI: Tensor,
    weight: Tensor,
    bias: Tensor,
    expert: int,
    gradient: SharedGradient,
    scale_N: Tensor | None = None,
    origin: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """``y = scale (W_e x + b_e)`` of one expert ``(N, O)``.

    Args:
        weight, bias: those of all experts, as `ShareGradient` returns them; the gradient of this one goes
            to ``gradient``.
        scale_N: 1 where there is none. Its gradient is found without keeping what was scaled.
        origin: ``(z, index)`` with ``x = z[index]``, where that is kept anyway: ``x`` is then taken again for
            the gradient and not kept.
    """
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
