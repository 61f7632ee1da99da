"""Conditional MoE routing: a gate between a shared feed-forward network and the experts.

Shapes: T tokens, D embedding, F feed-forward.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smoe_fairseq.modules.experts import Activation, activation


class CMRStats(NamedTuple):
    """What the budget loss needs, real tokens only."""

    gate_sum: Tensor  # scalar, with gradient: sum of the tokens' gates
    tokens: Tensor  # scalar: how many


class ConditionalRouting(nn.Module):
    """``(1 - g) FFN(x) + g MoE(x)`` with ``g = sigmoid(w x)`` per token (NLLB team 2022, section 6.2).

    Args:
        gate_drop: in training, the probability that a token's gate is 0, so that it has only the
            shared network.
    """

    def __init__(
        self,
        embed_dim: int,
        ffn_embed_dim: int,
        activation_fn: Activation = "relu",
        activation_dropout: float = 0.0,
        gate_drop: float = 0.0,
    ):
        super().__init__()
        self.gate = nn.Linear(embed_dim, 1, bias=False)
        self.fc1 = nn.Linear(embed_dim, ffn_embed_dim)
        self.fc2 = nn.Linear(ffn_embed_dim, embed_dim)
        self.activation_fn = activation(activation_fn)
        self.activation_dropout = activation_dropout
        self.gate_drop = gate_drop

    def forward(
        self, x_TD: Tensor, moe: Callable[[], Tensor], active_T: Tensor | None = None
    ) -> tuple[Tensor, CMRStats]:
        """Mix the experts' output ``(T, D)`` with that of the shared network.

        Args:
            moe: returns the experts' output, which may be on its way while the shared network is computed.
        """
        gate_T1 = self.gate(x_TD).float().sigmoid()
        active_T1 = torch.ones_like(gate_T1) if active_T is None else active_T.unsqueeze(1)
        # The budget is about what the gate asks for, so it is counted before any of it is dropped.
        stats = CMRStats((gate_T1 * active_T1).sum(), active_T1.sum())
        if self.training and self.gate_drop > 0:
            gate_T1 = gate_T1 * (torch.rand_like(gate_T1) >= self.gate_drop)
        h = F.dropout(self.activation_fn(self.fc1(x_TD)), self.activation_dropout, self.training)
        shared_TD = self.fc2(h)
        moe_TD = moe()
        gate_T1 = gate_T1.to(moe_TD.dtype)
        return (1 - gate_T1) * shared_TD.to(moe_TD.dtype) + gate_T1 * moe_TD, stats
