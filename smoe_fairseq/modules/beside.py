"""Networks beside the experts, which every token uses.

Shapes: T tokens, D embedding, F feed-forward.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smoe_fairseq.modules.experts import Activation, activation


class FeedForward(nn.Module):
    """``fc2 activation(fc1 x)``."""

    def __init__(
        self,
        embed_dim: int,
        ffn_embed_dim: int,
        activation_fn: Activation = "relu",
        activation_dropout: float = 0.0,
    ):
        super().__init__()
        self.fc1 = nn.Linear(embed_dim, ffn_embed_dim)
        self.fc2 = nn.Linear(ffn_embed_dim, embed_dim)
        self.activation_fn = activation(activation_fn)
        self.activation_dropout = activation_dropout

    def network(self, x_TD: Tensor) -> Tensor:
        h_TF = self.activation_fn(self.fc1(x_TD))
        return self.fc2(F.dropout(h_TF, self.activation_dropout, self.training))


class SharedExperts(FeedForward):
    """``MoE(x) + sum_n FFN_n(x)``: experts that all tokens use (DeepSeekMoE, Dai et al. 2024).

    N of width F are computed as one of width N F.
    """

    def forward(self, x_TD: Tensor, moe: Callable[[], Tensor]) -> Tensor:
        """Adds to the experts' output, which ``moe`` returns: it may be on its way while these compute."""
        own_TD = self.network(x_TD)
        moe_TD = moe()
        return moe_TD + own_TD.to(moe_TD.dtype)


class ResidualNetwork(FeedForward):
    """``c_0 MoE(x) + c_1 FFN(x)`` with ``c = softmax(V x + b)`` (PR-MoE, Rajbhandari et al. 2022)."""

    def __init__(self, embed_dim: int, *others, **options):
        super().__init__(embed_dim, *others, **options)
        self.mix = nn.Linear(embed_dim, 2)

    def forward(self, x_TD: Tensor, moe: Callable[[], Tensor]) -> Tensor:
        """Mixes the experts' output, which ``moe`` returns, with the network's."""
        logits_T2 = self.mix(x_TD)
        logits_T2 = logits_T2.to(torch.promote_types(logits_T2.dtype, torch.float32))
        own_TD = self.network(x_TD)
        moe_TD = moe()
        moe_T1, own_T1 = logits_T2.softmax(dim=-1).to(moe_TD.dtype).split(1, dim=1)
        return moe_T1 * moe_TD + own_T1 * own_TD.to(moe_TD.dtype)
