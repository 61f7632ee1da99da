"""The activation between an expert's two linear maps, with its dropout, forward and backward.

Shapes: N rows, F feed-forward.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smoe_fairseq.modules.strata import OptionError

Activation = str | Callable[[Tensor], Tensor]


def activation(given: Activation) -> Callable[[Tensor], Tensor]:
    """A function, or one of `torch.nn.functional` by its name.

    Raises:
        OptionError: there is none of this name.
    """
    function = getattr(F, given, None) if isinstance(given, str) else given
    if not callable(function):
        raise OptionError(
            "{activation_fn} {given}: expected a function, or the name of one in torch.nn.functional "
            "such as relu, gelu or silu",
            given=repr(given),
        )
    return function


class Hidden:
    """``a = dropout(activation(h))``, and its gradient, for an autograd function of the experts.

    Args:
        dropout: the probability; 0 in evaluation.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], dropout: float):
        self.function, self.dropout = function, dropout
        self.is_relu = function in (F.relu, torch.relu) or type(function) is nn.ReLU
        self.changes_input = getattr(function, "inplace", False)

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Of the activation, such as those of ``nn.PReLU``."""
        return tuple(self.function.parameters()) if isinstance(self.function, nn.Module) else ()

    def forward(self, h_NF: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """``a`` and what `reopen` needs of it; overwrites ``h``."""
        if self.is_relu:
            a_NF = h_NF.relu_()
            a_NF = F.dropout(a_NF, self.dropout) if self.dropout else a_NF
            return a_NF, (a_NF,)
        a_NF = self.function(h_NF.clone() if self.changes_input else h_NF)
        if not self.dropout:
            return a_NF, (h_NF,)
        a_NF, kept_NF = torch.native_dropout(a_NF, self.dropout, True)
        return a_NF, (h_NF, kept_NF)

    def reopen(self, h_NF: Tensor, kept_NF: Tensor | None = None) -> tuple[Tensor, Callable]:
        """``a`` again, and its backward pass.

        That takes the gradient of ``a``, which it overwrites, and weights ``(N, 1)`` or None for 1. It
        returns the gradient of ``h``, and those of the `parameters`, in which rows have these weights.
        """
        scale = 1 / (1 - self.dropout) if self.dropout < 1 else 0.0
        if self.is_relu:

            def relu_backward(grad_NF: Tensor, weight_N1: Tensor | None) -> list[Tensor]:
                torch.ops.aten.threshold_backward.grad_input(grad_NF, h_NF, 0, grad_input=grad_NF)
                return [grad_NF.mul_(scale) if self.dropout else grad_NF]

            return h_NF, relu_backward
        with torch.enable_grad():
            leaf_NF = h_NF.detach().requires_grad_()
            plain_NF = self.function(leaf_NF.clone() if self.changes_input else leaf_NF)
        a_NF = plain_NF.detach()

        def backward(grad_NF: Tensor, weight_N1: Tensor | None) -> list[Tensor]:
            if kept_NF is not None:
                grad_NF = grad_NF.mul_(kept_NF).mul_(scale)
            parameters = self.parameters
            grads = torch.autograd.grad(plain_NF, leaf_NF, grad_NF, retain_graph=bool(parameters))
            if parameters:
                grad_NF = grad_NF if weight_N1 is None else grad_NF.mul_(weight_N1)
                grads += torch.autograd.grad(plain_NF, parameters, grad_NF)
            return list(grads)

        return a_NF if kept_NF is None else a_NF * kept_NF * scale, backward
