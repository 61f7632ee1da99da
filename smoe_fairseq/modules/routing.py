"""What a gate decides, whatever its kind, with the counts and losses that follow from it.

Shapes: T tokens, E experts that the gate sees, K choices per token.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """What a gate decided for T tokens: all that a block needs of it.

    ``expert_TK`` numbers the experts that the gate sees, best first; ``E`` stands for "no expert": the
    copy was dropped, not sampled, or its token is not active. ``weight_TK`` is 0 there.
    """

    expert_TK: Tensor
    weight_TK: Tensor
    rank_TK: Tensor  # how many copies that the same expert keeps come before
    kept_E: Tensor  # copies that each expert keeps
    first_choice_T: Tensor  # before dropping: it decides where the token stands next
    active_T: Tensor
    logits_TE: Tensor
    probs_TE: Tensor
    chosen_TK: Tensor  # copies chosen
    kept_TK: Tensor  # of those, copies within their expert's capacity

    @property
    def chosen_K(self) -> Tensor:
        return self.chosen_TK.sum(0)

    @property
    def dropped_TK(self) -> Tensor:
        """Copies beyond their expert's capacity."""
        return self.chosen_TK & ~self.kept_TK

    @property
    def first_choices_E(self) -> Tensor:
        """Active tokens per first choice."""
        num_experts = self.probs_TE.shape[1]
        return count(self.first_choice_T.masked_fill(~self.active_T, num_experts), num_experts)

    def balance_loss(self, first_choices_E: Tensor) -> Tensor:
        """``E * sum_e f_e p_e``: 1 when balanced, up to E when not, 0 without tokens (paper, equation 3)."""
        num_tokens = self.active_T.sum().clamp(min=1)
        fraction_E = first_choices_E.to(self.probs_TE.dtype) / num_tokens
        mean_probs_E = (self.probs_TE * self.active_T.unsqueeze(1)).sum(0) / num_tokens
        return self.probs_TE.shape[1] * (fraction_E * mean_probs_E).sum()

    def z_loss(self) -> Tensor:
        """Mean of ``logsumexp(logits)^2`` over tokens, small when logits are (Zoph et al. 2022, eq. 5)."""
        squared_T = self.logits_TE.logsumexp(dim=-1).square()
        return (squared_T * self.active_T).sum() / self.active_T.sum().clamp(min=1)


def count(index_N: Tensor, size: int) -> Tensor:
    """How often each of ``0..size-1`` occurs, without waiting for the device as ``bincount`` does."""
    counts = index_N.new_zeros(size + 1)
    return counts.scatter_add_(0, index_N, torch.ones_like(index_N))[:size]
