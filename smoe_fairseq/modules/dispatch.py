"""Bring the copies of tokens to their experts and the outputs back.

Shapes: T tokens, K choices per token, N = copies on their way to an expert, D embedding, E experts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DispatchPlan:
    """What `dispatch` learnt and `combine` needs: which copy stands in which row."""

    copy_N: Tensor  # row n holds copy t * K + k
    token_N: Tensor  # of token t


class LocalDispatcher:
    """All experts are in this process.

    Args:
        num_experts: E; a copy for expert E or above is not dispatched.
    """

    def __init__(self, num_experts: int):
        self.num_experts = num_experts

    def dispatch(
        self, x_TD: Tensor, expert_TK: Tensor, static_shapes: bool = False
    ) -> tuple[Tensor, Tensor, DispatchPlan]:
        """Sort the copies by expert.

        Returns:
            the copies ``x_ND``, where each expert's rows end ``(E,)``, and the plan. With
            ``static_shapes`` N is T * K: rows past the last end belong to no expert, and nothing
            waits for the device. Otherwise N counts just the dispatched copies.
        """
        sorted_N, copy_N = expert_TK.flatten().sort(stable=True)
        experts_E = torch.arange(self.num_experts, device=x_TD.device)
        ends_E = torch.searchsorted(sorted_N, experts_E, right=True)
        if not static_shapes:
            copy_N = copy_N[: int(ends_E[-1])]
        token_N = copy_N // expert_TK.shape[1]
        return x_TD.index_select(0, token_N), ends_E, DispatchPlan(copy_N, token_N)

    def combine(self, y_ND: Tensor, weight_TK: Tensor, plan: DispatchPlan) -> Tensor:
        """Weighted sum of each token's expert outputs ``(T, D)``; 0 for a token without any."""
        weight_N1 = weight_TK.flatten().index_select(0, plan.copy_N).unsqueeze(1)
        y_TD = y_ND.new_zeros(weight_TK.shape[0], y_ND.shape[1])
        # At most two terms fall on a row, so the order of atomic additions cannot change the sum.
        return y_TD.index_add(0, plan.token_N, y_ND * weight_N1.to(y_ND.dtype))
