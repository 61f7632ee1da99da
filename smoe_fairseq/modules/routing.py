"""What a gate decides: the copies that each expert's capacity admits, and the routing itself.

Shapes: T tokens, K choices per token, E experts that the gate sees, M free experts behind them.
"""

from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor, nn

DROP_ORDERS = ("sentence", "score", "random")


class Places(NamedTuple):
    """The place of each copy among those that ask for its expert, and how many the experts keep."""

    rank_TK: Tensor  # copies of the same expert that come before it
    fits_TK: Tensor | None  # whether it fits in; any for a copy without an expert; None: all do
    kept_E: Tensor  # copies that each expert keeps: those of ranks 0 to this - 1

    @classmethod
    def without_limit(cls, expert_TK: Tensor, num_experts: int) -> "Places":
        """Each expert keeps all its copies; E is no expert."""
        rank_TK, kept_E = rank_within_expert(expert_TK, num_experts)
        return cls(rank_TK, None, kept_E)

    @classmethod
    def of_columns(cls, taken_TE: Tensor) -> "Places":
        """Where choice e is expert e's: those that it takes."""
        return cls(taken_TE.cumsum(0) - 1, None, taken_TE.sum(0))

    def kept(self, taken_TK: Tensor) -> Tensor:
        """Those of some choices that fit in."""
        return taken_TK if self.fits_TK is None else taken_TK & self.fits_TK


class Capacity(nn.Module):
    """In a pass an expert takes at most ``ceil(factor * T / E)`` copies, first choices before second ones.

    Args:
        factor: in training; 0: no limit.
        eval_factor: the same in evaluation.
        order: whose copies are kept where an expert has too many. "sentence" keeps the first rows, which
            a layer lays sentence after sentence; "score" those of the tokens with the highest first
            probability (batch-prioritised routing, Riquelme et al. 2021); "random" draws an order each
            time in training, and in evaluation, which draws nothing, is "score".
    """

    @classmethod
    def of_config(cls, config) -> "Capacity":
        """Of a block's `MoEConfig`."""
        return cls(config.capacity_factor, config.eval_capacity_factor, config.drop_order)

    def __init__(self, factor: float = 2.0, eval_factor: float = 0.0, order: str = "sentence"):
        super().__init__()
        self.factor = factor
        self.eval_factor = eval_factor
        self.order = order

    @property
    def factor_in_force(self) -> float:
        """The factor of this mode; 0: no limit."""
        return self.factor if self.training else self.eval_factor

    def forward(self, expert_TK: Tensor, probs_TE: Tensor, active_T: Tensor) -> Places:
        """Which copies fit in ``(T, K)``; a copy for expert E or above needs no room.

        Args:
            probs_TE: the gate's probabilities, for `order`.
            active_T: marks the tokens that count.
        """
        num_experts = probs_TE.shape[1]
        if not self.factor_in_force:
            return Places.without_limit(expert_TK, num_experts)
        order_T = self.row_order(probs_TE.detach())
        rank_TK, asked_E = rank_within_expert(expert_TK, num_experts, order_T)
        most = most_copies(self.factor_in_force, active_T.sum(), num_experts)
        return Places(rank_TK, rank_TK < most, asked_E.minimum(most))

    def row_order(self, probs_TE: Tensor) -> Tensor | None:
        """Rows ``(T,)`` in the order in which capacity is given to them; None: as they come."""
        if self.order == "sentence":
            return None
        if self.order == "random" and self.training:
            return torch.rand_like(probs_TE[:, 0]).argsort()
        return probs_TE.amax(1).argsort(descending=True, stable=True)


def most_copies(factor: float, num_tokens: Tensor, num_experts: int) -> Tensor:
    """``ceil(factor * num_tokens / num_experts)`` of any number of counts, in exact arithmetic.

    The factor is the decimal number that it is written as. The counts stay on the device, so that routing
    does not wait for it.
    """
    # An expert has at most all tokens: a factor above E limits nothing, and could overflow.
    share = Fraction(str(float(factor))).limit_denominator(10**9)
    share = min(share, Fraction(num_experts)) / num_experts
    return (num_tokens * share.numerator + share.denominator - 1) // share.denominator


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


class Routing(NamedTuple):
    """What a gate decided for T tokens: all that a block needs of it. Made by `of`."""

    choice_TK: Tensor  # the experts of each token's choices, best first; E and above for a free one
    weight_TK: Tensor  # of each copy; 0 of a choice that is no copy
    taken_TK: Tensor  # choices that count: neither of an inactive token nor left out by a draw
    kept_TK: Tensor  # of these, copies for an expert and within its capacity
    rank_TK: Tensor  # how many copies that the same expert keeps come before
    kept_E: Tensor  # copies that each expert keeps
    first_choice_T: Tensor  # before dropping: it decides where the token stands next
    active_T: Tensor
    probs_TE: Tensor  # (T, E + M), as the next
    logits_TE: Tensor | None  # None of a gate without scores
    simple_TS: Tensor | None = None  # weights of the simple experts of a `TopKGate`
    observed_N: Tensor | None = None  # what the gate's `update` takes, None where it takes nothing
    own_logits_TE: Tensor | None = None  # of a `TopKGate`, without an exit bias
    l1: Tensor | None = None  # scalar, with gradient: the loss of a ReLU gate, see `ReLUGate`

    @classmethod
    def of(
        cls,
        choice_TK: Tensor,
        weight_TK: Tensor,
        taken_TK: Tensor,
        places: Places,
        active_T: Tensor,
        probs_TE: Tensor,
        logits_TE: Tensor | None = None,
        first_choice_T: Tensor | None = None,
        **of_gate: Tensor | None,
    ) -> "Routing":
        """The routing, from choices, their weights, those that count, and those that are kept.

        Args:
            weight_TK: anything for choices that are not kept.
            first_choice_T: None: the first of the choices.
            of_gate: what only some gates have.
        """
        kept_TK = places.kept(taken_TK)
        if probs_TE.shape[1] > len(places.kept_E):
            kept_TK = kept_TK & (choice_TK < len(places.kept_E))
        return cls(
            choice_TK,
            weight_TK.masked_fill(~kept_TK, 0),
            taken_TK,
            kept_TK,
            places.rank_TK,
            places.kept_E,
            choice_TK[:, 0] if first_choice_T is None else first_choice_T,
            active_T,
            probs_TE,
            logits_TE,
            **of_gate,
        )

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.kept_E)

    @property
    def expert_TK(self) -> Tensor:
        """The expert of each copy; E for none."""
        return self.choice_TK.masked_fill(~self.kept_TK, self.num_experts)

    @property
    def chosen_TK(self) -> Tensor:
        """Choices that are copies for an expert, not for a free one."""
        if self.probs_TE.shape[1] == self.num_experts:
            return self.taken_TK
        return self.taken_TK & (self.choice_TK < self.num_experts)

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
        size = self.probs_TE.shape[1]
        return count(self.choice_TK.masked_fill(~self.taken_TK, size).flatten(), size)

    @property
    def num_tokens(self) -> Tensor:
        """Active ones, as a divisor."""
        return self.active_T.sum().clamp(min=1)

    @property
    def mean_probs_E(self) -> Tensor:
        """``(E + M,)``, over the active tokens."""
        return (self.probs_TE * self.active_T.unsqueeze(1)).sum(0) / self.num_tokens

    @property
    def mean_true_probs_E(self) -> Tensor:
        """``(E,)``, over the active tokens: of the first choice, which is never a null expert."""
        probs_TE = self.probs_TE
        if probs_TE.shape[1] > self.num_experts:
            probs_TE = self.logits_TE[:, : self.num_experts].softmax(dim=-1)
        return (probs_TE * self.active_T.unsqueeze(1)).sum(0) / self.num_tokens

    def balance_loss(self, asked_E: Tensor) -> Tensor:
        """``E * sum_e f_e p_e``: 1 when balanced, up to E when not, 0 without tokens (paper, eq. 8).

        Args:
            asked_E: what f are the fractions of: first choices ``(E,)`` or all choices ``(E + M,)``.
        """
        num_tokens = self.num_tokens
        each_once = len(asked_E) == self.num_experts
        asked_E = asked_E.to(self.probs_TE.dtype)
        # f (eq. 9) and p (eq. 10)
        fraction_E = asked_E / (num_tokens if each_once else asked_E.sum().clamp(min=1))
        return self.probs_TE.shape[1] * (fraction_E * self.mean_probs_E).sum()

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
