"""How many copies of tokens an expert takes, and which ones where there are more.

Shapes: T tokens, K choices per token, N copies, E experts that the gate sees.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

DROP_ORDERS = ("sentence", "score", "random")


class Places(NamedTuple):
    """The place of each copy among those that ask for its expert, and how many the experts keep."""

    rank_TK: Tensor  # copies of the same expert that come before it
    kept_TK: Tensor  # whether it fits in; yes for a copy without an expert
    kept_E: Tensor  # copies that each expert keeps: those of ranks 0 to this - 1


class Capacity(nn.Module):
    """In a pass an expert takes at most ``ceil(factor * T / E)`` copies, first choices before second ones.

    Args:
        factor: in training; 0: no limit.
        eval_factor: the same in evaluation.
        order: whose copies are kept where an expert has too many. "sentence" keeps the first rows, which
            a layer lays sentence after sentence; "score" those of the tokens with the highest first
            probability (batch-prioritised routing, Riquelme et al. 2021); "random" draws an order each
            time.
    """

    def __init__(self, factor: float = 2.0, eval_factor: float = 0.0, order: str = "sentence"):
        super().__init__()
        self.factor = factor
        self.eval_factor = eval_factor
        self.order = order

    @property
    def factor_in_force(self) -> float:
        """The factor of this mode; 0: no limit."""
        return self.factor if self.training else self.eval_factor

    def forward(self, expert_TK: Tensor, probs_TE: Tensor, num_tokens: Tensor) -> Places:
        """Which copies fit in ``(T, K)``; a copy for expert E or above needs no room.

        Args:
            probs_TE: the gate's probabilities, for `order`.
            num_tokens: scalar, of tokens that count.
        """
        num_experts = probs_TE.shape[1]
        order_T = self.row_order(probs_TE.detach()) if self.factor_in_force else None
        rank_TK, asked_E = rank_within_expert(expert_TK, num_experts, order_T)
        if not self.factor_in_force:
            return Places(rank_TK, torch.ones_like(expert_TK, dtype=torch.bool), asked_E)
        # The number of tokens stays on the device, so that routing waits for nothing.
        most = torch.ceil(self.factor_in_force * num_tokens.double() / num_experts)
        return Places(rank_TK, rank_TK < most, asked_E.minimum(most.long()))

    def row_order(self, probs_TE: Tensor) -> Tensor | None:
        """Rows ``(T,)`` in the order in which capacity is given to them; None: as they come."""
        if self.order == "score":
            return probs_TE.amax(1).argsort(descending=True, stable=True)
        if self.order == "random":
            return torch.rand_like(probs_TE[:, 0]).argsort()
        return None


def rank_within_expert(
    expert_TK: Tensor, num_experts: int, order_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """For each copy, how many copies before it have the same expert ``(T, K)``; and all of each ``(E,)``.

    All first choices come before all second ones (as in GShard), and of each the rows in ``order_T``.
    """
    if order_T is not None:
        rank_TK, count_E = rank_within_expert(expert_TK.index_select(0, order_T), num_experts)
        return torch.empty_like(rank_TK).index_copy_(0, order_T, rank_TK), count_E
    expert_KT = expert_TK.t()
    sorted_N, order_N = expert_KT.flatten().sort(stable=True)
    bounds_E1 = torch.arange(num_experts + 1, device=sorted_N.device)
    start_E1 = torch.searchsorted(sorted_N, bounds_E1)  # of expert E: copies without an expert
    rank_N = torch.arange(len(sorted_N), device=sorted_N.device) - start_E1.index_select(
        0, sorted_N
    )
    rank_KT = torch.empty_like(rank_N).scatter_(0, order_N, rank_N).view_as(expert_KT)
    return rank_KT.t(), start_E1.diff()
