"""The activation between an expert's two linear maps, with its dropout, forward and backward.

Shapes: N rows, F feed-forward.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smoe_fairseq.modules.strata import OptionError

Activation = str | Callable[[Tensor], Tensor]


class Gated:
    """``function(g) * u`` of hidden numbers ``(..., 2 F)``, first g, then u (Shazeer 2020)."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        self.function = function

    def __call__(self, h: Tensor) -> Tensor:
        gate, up = h.chunk(2, -1)
        return self.function(gate) * up


GATED = {"swiglu": Gated(F.silu), "geglu": Gated(F.gelu), "reglu": Gated(F.relu)}


def hidden_width(activation_fn: Activation, ffn_embed_dim: int) -> int:
    """The outputs of a network's first linear map: F, or 2 F for a gated activation."""
    is_gated = isinstance(activation_fn, Gated) or str(activation_fn) in GATED
    return 2 * ffn_embed_dim if is_gated else ffn_embed_dim


def activation(activation_fn: Activation) -> Callable[[Tensor], Tensor]:
    """The function itself, or the function of this name in `GATED` or `torch.nn.functional`.

    Raises:
        OptionError: there is no function of this name.
    """
    function = activation_fn
    if isinstance(activation_fn, str):
        function = GATED.get(activation_fn) or getattr(F, activation_fn, None)
    if not callable(function):
        raise OptionError(
            "{activation_fn} {value}: expected a function, or the name of one in torch.nn.functional "
            "such as relu, gelu or silu, or swiglu, geglu or reglu",
            value=repr(activation_fn),
        )
    return function


class Hidden:
    """``a = dropout(activation(h))`` and its gradient, for the autograd functions of the experts.

    Args:
        dropout: the probability; 0 in evaluation.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], dropout: float):
        self.function, self.dropout = function, dropout
        self.is_relu = function in (F.relu, torch.relu) or type(function) is nn.ReLU
        self.is_inplace = getattr(function, "inplace", False)

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Parameters of the activation, such as the slope of ``nn.PReLU``."""
        return tuple(self.function.parameters()) if isinstance(self.function, nn.Module) else ()

    def forward(self, h_NF: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns ``a`` and the tensors that `recompute` needs; overwrites ``h``."""
        if self.is_relu:
            a_NF = h_NF.relu_()
            a_NF = F.dropout(a_NF, self.dropout) if self.dropout else a_NF
            return a_NF, (a_NF,)
        a_NF = self.function(h_NF.clone() if self.is_inplace else h_NF)
        if not self.dropout:
            return a_NF, (h_NF,)
        a_NF, kept_NF = torch.native_dropout(a_NF, self.dropout, True)
        return a_NF, (h_NF, kept_NF)

    def recompute(self, h_NF: Tensor, kept_NF: Tensor | None = None) -> tuple[Tensor, Callable]:
        """Returns ``a`` and a function for its backward pass.

        The function takes the gradient of ``a``, which it overwrites, and row weights ``(N, 1)``.
        It returns the gradient of ``h``, then the gradients of the `parameters`, weighted by row.
        """
        scale = 1 / (1 - self.dropout) if self.dropout < 1 else 0.0
        if self.is_relu:

            def relu_backward(grad_NF: Tensor, weight_N1: Tensor) -> list[Tensor]:
                torch.ops.aten.threshold_backward.grad_input(grad_NF, h_NF, 0, grad_input=grad_NF)
                return [grad_NF.mul_(scale) if self.dropout else grad_NF]

            return h_NF, relu_backward
        with torch.enable_grad():
            leaf_NF = h_NF.detach().requires_grad_()
            plain_NF = self.function(leaf_NF.clone() if self.is_inplace else leaf_NF)
        a_NF = plain_NF.detach()

        def backward(grad_NF: Tensor, weight_N1: Tensor) -> list[Tensor]:
            if kept_NF is not None:
                grad_NF = grad_NF.mul_(kept_NF).mul_(scale)
            parameters = self.parameters
            grads = torch.autograd.grad(plain_NF, leaf_NF, grad_NF, retain_graph=bool(parameters))
            if parameters:
                grads += torch.autograd.grad(plain_NF, parameters, grad_NF.mul_(weight_N1))
            return list(grads)

        return a_NF if kept_NF is None else a_NF * kept_NF * scale, backward
