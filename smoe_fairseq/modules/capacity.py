"""How many copies of tokens an expert takes, and which ones where there are more.

Shapes: T tokens, K choices per token, N copies, E experts that the gate sees.
"""

import torch
from torch import Tensor, nn

DROP_ORDERS = ("sentence", "score", "random")


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

    def forward(self, expert_TK: Tensor, probs_TE: Tensor, num_tokens: Tensor) -> Tensor:
        """Which copies fit in ``(T, K)``; a copy for expert E or above needs no room.

        Args:
            probs_TE: the gate's probabilities, for `order`.
            num_tokens: scalar, of tokens that count.
        """
        factor = self.factor_in_force
        if factor == 0:
            return torch.ones_like(expert_TK, dtype=torch.bool)
        rank_TK = rank_within_expert(expert_TK, self.row_order(probs_TE.detach()))
        # The number of tokens stays on the device, so that routing waits for nothing.
        return rank_TK < torch.ceil(factor * num_tokens.double() / probs_TE.shape[1])

    def row_order(self, probs_TE: Tensor) -> Tensor | None:
        """Rows ``(T,)`` in the order in which capacity is given to them; None: as they come."""
        if self.order == "score":
            return probs_TE.amax(1).argsort(descending=True, stable=True)
        if self.order == "random":
            return torch.rand_like(probs_TE[:, 0]).argsort()
        return None


def rank_within_expert(expert_TK: Tensor, order_T: Tensor | None = None) -> Tensor:
    """For each copy, how many copies before it have the same expert.

    All first choices come before all second ones (as in GShard), and of each the rows in ``order_T``.
    """
    if order_T is None:
        return rank(expert_TK.t().flatten()).view_as(expert_TK.t()).t()
    ranks_TK = rank_within_expert(expert_TK.index_select(0, order_T))
    return torch.empty_like(ranks_TK).index_copy_(0, order_T, ranks_TK)


def rank(expert_N: Tensor) -> Tensor:
    """For each copy, how many earlier copies have the same expert."""
    sorted_N, order_N = expert_N.sort(stable=True)
    rank_N = torch.arange(len(sorted_N), device=sorted_N.device)
    rank_N = rank_N - torch.searchsorted(sorted_N, sorted_N)
    return torch.empty_like(rank_N).scatter_(0, order_N, rank_N)
