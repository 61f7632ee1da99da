"""What a gate decides, whatever its kind, with the counts and losses that follow from it.

Shapes: T tokens, E experts that the gate sees, M null experts behind them, K choices per token.
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
    logits_TE: Tensor | None  # (T, E + M), as the next; None of a gate without scores
    probs_TE: Tensor
    asked_TK: Tensor  # the expert of each choice before dropping; E + M for none
    chosen_TK: Tensor  # choices that are copies for an expert, not for a null one
    kept_TK: Tensor  # of those, copies within their expert's capacity

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.kept_E)

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
        num_experts = self.num_experts
        return count(self.first_choice_T.masked_fill(~self.active_T, num_experts), num_experts)

    @property
    def asked_E(self) -> Tensor:
        """Choices per expert, before dropping, ``(E + M,)``."""
        return count(self.asked_TK.flatten(), self.probs_TE.shape[1])

    @property
    def num_tokens(self) -> Tensor:
        """Active ones, as a divisor."""
        return self.active_T.sum().clamp(min=1)

    @property
    def mean_probs_E(self) -> Tensor:
        """``(E + M,)``, over the active tokens."""
        return self._sum_probs_E() / self.num_tokens

    @property
    def mean_true_probs_E(self) -> Tensor:
        """``(E,)``, over the active tokens: of the first choice, which is never a null expert."""
        probs_TE = self.probs_TE
        if probs_TE.shape[1] > self.num_experts:
            probs_TE = self.logits_TE[:, : self.num_experts].softmax(dim=-1)
        return (probs_TE * self.active_T.unsqueeze(1)).sum(0) / self.num_tokens

    def _sum_probs_E(self) -> Tensor:
        return (self.probs_TE * self.active_T.unsqueeze(1)).sum(0)

    def balance_loss(self, asked_E: Tensor) -> Tensor:
        """``E * sum_e f_e p_e``: 1 when balanced, up to E when not, 0 without tokens (paper, equation 3).

        Args:
            asked_E: what f are the fractions of: first choices ``(E,)`` or all choices ``(E + M,)``.
        """
        num_tokens = self.num_tokens
        each_once = len(asked_E) == self.num_experts
        asked_E = asked_E.to(self.probs_TE.dtype)
        fraction_E = asked_E / (num_tokens if each_once else asked_E.sum().clamp(min=1))
        mean_probs_E = self._sum_probs_E() / num_tokens
        return self.probs_TE.shape[1] * (fraction_E * mean_probs_E).sum()

    def entropy(self) -> Tensor:
        """Mean of ``-sum_e p_e log p_e`` over tokens: small where few experts share a token."""
        # By the logits, since the gradient of p log p is not finite where p is 0.
        entropy_T = self.logits_TE.logsumexp(1) - (self.probs_TE * self.logits_TE).sum(1)
        return (entropy_T * self.active_T).sum() / self.active_T.sum().clamp(min=1)

    def z_loss(self) -> Tensor:
        """Mean of ``logsumexp(logits)^2`` over tokens, small when logits are (Zoph et al. 2022, eq. 5)."""
        if self.logits_TE is None:
            return self.probs_TE.new_zeros(())
        squared_T = self.logits_TE.logsumexp(dim=-1).square()
        return (squared_T * self.active_T).sum() / self.active_T.sum().clamp(min=1)


def count(index_N: Tensor, size: int) -> Tensor:
    """How often each of ``0..size-1`` occurs, without waiting for the device as ``bincount`` does."""
    counts = index_N.new_zeros(size + 1)
    return counts.scatter_add_(0, index_N, torch.ones_like(index_N))[:size]
