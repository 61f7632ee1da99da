"""The experts of one block: feed-forward networks with stacked weights.

Shapes: N copies sorted by expert, D embedding, F feed-forward, E experts.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smoe_fairseq.modules.option_error import OptionError
from smoe_fairseq.modules.placement import Placement
from smoe_fairseq.modules.torch_features import autocast_dtype

Activation = str | Callable[[Tensor], Tensor]


class Experts(nn.Module):
    """``FFN_e(x) = w2_e activation(w1_e x + b1_e) + b2_e`` for E experts, initialised as ``nn.Linear``.

    The parameters and what they mean; how they are computed is the execution's (execution.py). Where
    experts are spread over processes, E here are those of this one.
    """

    def __init__(
        self,
        placement: Placement,
        embed_dim: int,
        ffn_embed_dim: int,
        activation_fn: Activation = "relu",
        activation_dropout: float = 0.0,
        output_init_scale: float = 1.0,
    ):
        super().__init__()
        self.placement = placement
        num_experts = placement.num_local
        self.w1 = nn.Parameter(torch.empty(num_experts, ffn_embed_dim, embed_dim))
        self.b1 = nn.Parameter(torch.empty(num_experts, ffn_embed_dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, embed_dim, ffn_embed_dim))
        self.b2 = nn.Parameter(torch.empty(num_experts, embed_dim))
        self.activation_fn = activation(activation_fn)
        self.activation_dropout = activation_dropout
        self.output_init_scale = output_init_scale
        self.reset_parameters()
        if placement.is_sharded:
            for parameter in self.parameters():
                mark_as_expert(parameter, placement.world_size)

    def reset_parameters(self):
        """Draws the values of all experts, so that each has the same whatever the number of processes."""
        if self.w1.is_meta:
            return  # no values; going over hundreds of experts would take seconds
        local = self.placement.local
        scale2 = self.output_init_scale
        for weight, bias, scale in ((self.w1, self.b1, 1.0), (self.w2, self.b2, scale2)):
            bound = scale / math.sqrt(weight.shape[2])
            for stacked in (weight, bias):
                values = torch.empty_like(stacked[0])
                for e in range(self.placement.num_experts):
                    nn.init.uniform_(values, -bound, bound)
                    if e in local:
                        with torch.no_grad():
                            stacked[e - local.start] = values

    def weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``w1``, ``b1``, ``w2``, ``b2`` in the type that is computed in, autocast's where it is on."""
        dtype = autocast_dtype(self.w1.device) or self.w1.dtype
        return tuple(p.to(dtype) for p in (self.w1, self.b1, self.w2, self.b2))

    def hidden(self, h_NF: Tensor) -> Tensor:
        """What stands between the two linear maps of an expert."""
        return F.dropout(self.activation_fn(h_NF), self.activation_dropout, self.training)


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


def mark_as_expert(parameter: nn.Parameter, world_size: int) -> None:
    """Marks what other processes do not have: whoever averages gradients over processes leaves it alone.

    fairseq's ``legacy_ddp`` looks for the mark. The gradient sums over the tokens of all processes
    already, and that of any other parameter becomes a mean over them: so the division is made up for
    here.
    """
    parameter.expert = True
    parameter.register_hook(lambda gradient: gradient / world_size)
