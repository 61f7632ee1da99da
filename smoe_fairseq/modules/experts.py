"""The experts of one block: feed-forward networks with stacked weights.

Shapes: N copies sorted by expert, D embedding, F feed-forward, E experts.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smoe_fairseq.modules.grouped import grouped_mm
from smoe_fairseq.modules.placement import Placement
from smoe_fairseq.modules.products import SharedGradient, ShareGradient, expert_linear


class Experts(nn.Module):
    """``FFN_e(x) = w2_e activation(w1_e x + b1_e) + b2_e`` for E experts, initialised as ``nn.Linear``.

    Where they are spread over processes, E here are those of this one.
    """

    def __init__(
        self,
        placement: Placement,
        embed_dim: int,
        ffn_embed_dim: int,
        activation_fn: str = "relu",
        activation_dropout: float = 0.0,
        output_init_scale: float = 1.0,
    ):
        from fairseq.utils import get_activation_fn  # here, so that modules import without fairseq

        super().__init__()
        self.placement = placement
        num_experts = placement.num_local
        self.w1 = nn.Parameter(torch.empty(num_experts, ffn_embed_dim, embed_dim))
        self.b1 = nn.Parameter(torch.empty(num_experts, ffn_embed_dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, embed_dim, ffn_embed_dim))
        self.b2 = nn.Parameter(torch.empty(num_experts, embed_dim))
        self.activation_fn = get_activation_fn(activation_fn)
        self.activation_dropout = activation_dropout
        self.output_init_scale = output_init_scale
        self.reset_parameters()
        if placement.is_sharded:
            for parameter in self.parameters():
                mark_as_expert(parameter, placement.world_size)

    def reset_parameters(self):
        """Draws the values of all experts, so that each has the same whatever the number of processes."""
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

    def weights(self, grouped: bool = False) -> "Weights":
        """The parameters for one pass through a block, whose strata share them: in autocast's type."""
        dtype = self.w1.dtype
        if torch.is_autocast_enabled(self.w1.device.type):
            dtype = torch.get_autocast_dtype(self.w1.device.type)
        w1, b1, w2, b2 = (p.to(dtype) for p in (self.w1, self.b1, self.w2, self.b2))
        if grouped and self.can_group(w1):
            return Weights(w1, b1, w2, b2, None, None)
        gradient1, gradient2 = SharedGradient(), SharedGradient()
        if torch.is_grad_enabled():
            w1, b1 = ShareGradient.apply(w1, b1, gradient1)
            w2, b2 = ShareGradient.apply(w2, b2, gradient2)
        return Weights(w1, b1, w2, b2, gradient1, gradient2)

    def can_group(self, x_ND: Tensor) -> bool:
        """Whether `torch.nn.functional.grouped_mm` takes these products: rows of a multiple of 16 bytes."""
        per_16_bytes = 16 // x_ND.element_size()
        sizes_fit = all(size % per_16_bytes == 0 for size in self.w1.shape[1:])
        return sizes_fit and x_ND.dtype in (torch.float32, torch.float16, torch.bfloat16)

    def forward(self, x_ND: Tensor, ends_E: Tensor, weights: "Weights") -> Tensor:
        """Each expert's network on its rows.

        Args:
            x_ND: rows sorted by expert.
            ends_E: where each expert's rows end.
            weights: of this pass. Made for grouped products, there is one for all experts, and the ends
                stay on the device. Otherwise, and for types and sizes that a grouped product cannot take,
                there is one product per expert, which measures faster on CPU but needs the ends on the
                host.

        Returns:
            ``(N, D)``; rows past the last end are 0.
        """
        x_ND = x_ND.to(weights.w1.dtype)
        if weights.gradient1 is None:
            return self.forward_grouped(x_ND, ends_E, weights)
        sizes = torch.diff(ends_E, prepend=ends_E.new_zeros(1)).tolist()
        *rows, rest = x_ND.split([*sizes, len(x_ND) - sum(sizes)])
        # One expert is always passed, or a process without rows would leave out the backward exchange.
        busy = [(e, x) for e, x in enumerate(rows) if len(x) > 0] or [(0, rows[0])]
        outputs = [self.forward_expert(e, x, weights) for e, x in busy]
        return torch.cat([*outputs, torch.zeros_like(rest)])

    def forward_expert(self, expert: int, x_ND: Tensor, weights: "Weights") -> Tensor:
        w1, b1, w2, b2, gradient1, gradient2 = weights
        h_NF = self.hidden(expert_linear(x_ND, w1, b1, expert, gradient1))
        return expert_linear(h_NF, w2, b2, expert, gradient2)

    def forward_grouped(self, x_ND: Tensor, ends_E: Tensor, weights: "Weights") -> Tensor:
        w1, b1, w2, b2, *_ = weights
        if len(x_ND) == 0:  # which a grouped product does not take
            return F.linear(self.hidden(F.linear(x_ND, w1[0], b1[0])), w2[0], b2[0])
        row_N1 = torch.arange(x_ND.shape[0], device=x_ND.device).unsqueeze(1)
        routed_N1 = row_N1 < ends_E[-1]
        expert_N = torch.searchsorted(ends_E, row_N1.squeeze(1), right=True)
        expert_N = expert_N.clamp(max=ends_E.shape[0] - 1)
        ends_E = ends_E.int()
        # Rows that are no expert's come back uninitialised, in the gradient too, and NaN times 0
        # is NaN: `where` keeps them out in both directions.
        x_ND = torch.where(routed_N1, x_ND, 0)
        h_NF = grouped_mm(x_ND, w1.transpose(1, 2), ends_E)
        h_NF = self.hidden(torch.where(routed_N1, h_NF + b1[expert_N], 0))
        y_ND = grouped_mm(h_NF, w2.transpose(1, 2), ends_E)
        return torch.where(routed_N1, y_ND + b2[expert_N], 0)

    def hidden(self, h_NF: Tensor) -> Tensor:
        return F.dropout(self.activation_fn(h_NF), self.activation_dropout, self.training)


class Weights(NamedTuple):
    """The parameters of one pass; where each expert has its own product, also what gathers gradients."""

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor
    gradient1: SharedGradient | None
    gradient2: SharedGradient | None


def mark_as_expert(parameter: nn.Parameter, world_size: int) -> None:
    """Tells fairseq that other processes hold other experts: ``legacy_ddp`` leaves it alone then.

    Its gradient sums over the tokens of all processes already. That of any other parameter becomes a
    mean over them, which fairseq multiplies by their number: so the division is made up for here.
    """
    parameter.expert = True
    parameter.register_hook(lambda gradient: gradient / world_size)
