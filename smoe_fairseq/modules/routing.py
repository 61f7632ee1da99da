"""A gate's decision: the routing, and which copies fit into each expert's capacity.

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
        self.factor, self.eval_factor, self.order = factor, eval_factor, order

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
        factor, num_experts = self.factor_in_force, probs_TE.shape[1]
        order_T = self.row_order(probs_TE.detach()) if factor else None
        rank_TK, asked_E = rank_within_expert(expert_TK, num_experts, order_T)
        if not factor:
            return Places(rank_TK, None, asked_E)
        most = most_copies(factor, active_T.sum(), num_experts)
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
    numerator, denominator = exact(factor, num_experts)
    denominator *= num_experts
    return (num_tokens * numerator + denominator - 1) // denominator


def exact(factor: float, num_experts: int) -> tuple[int, int]:
    """A capacity factor as the decimal number that it is written as: numerator and denominator.

    An expert has at most all tokens: a factor above E limits nothing, and could overflow.
    """
    if factor >= num_experts:
        return num_experts, 1
    return Fraction(str(float(factor))).limit_denominator(10**9).as_integer_ratio()


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
    rank_N = torch.arange(len(sorted_N), device=sorted_N.device)
    rank_N = rank_N - start_E1.index_select(0, sorted_N)
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
        weight_TK = weight_TK.masked_fill(~kept_TK, 0)
        first_choice_T = choice_TK[:, 0] if first_choice_T is None else first_choice_T
        copies = choice_TK, weight_TK, taken_TK, kept_TK, places.rank_TK, places.kept_E
        return cls(*copies, first_choice_T, active_T, probs_TE, logits_TE, **of_gate)

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


def count(index_N: Tensor, size: int) -> Tensor:
    """How often each of ``0..size-1`` occurs, without waiting for the device as ``bincount`` does."""
    counts = index_N.new_zeros(size + 1)
    return counts.scatter_add_(0, index_N, torch.ones_like(index_N))[:size]
