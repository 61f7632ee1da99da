"""A gate's decision: the routing, and which copies fit into each expert's capacity.

Shapes: T tokens, K choices per token, E experts that the gate sees, M free experts behind them.
"""

from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor, nn

from smoe_fairseq.modules.rows import Copies

DROP_ORDERS = ("sentence", "score", "random")


class Places(NamedTuple):
    """The rank of each copy among those of the same expert, and the number that each expert keeps."""

    rank_TK: Tensor  # copies of the same expert that come before
    fits_TK: Tensor | None  # within capacity; arbitrary for a copy without an expert; None: all fit
    kept_E: Tensor  # copies that each expert keeps: those of ranks 0 to this - 1

    def kept(self, valid_TK: Tensor) -> Tensor:
        """The valid choices that are within capacity."""
        return valid_TK if self.fits_TK is None else valid_TK & self.fits_TK


class Capacity(nn.Module):
    """In a pass an expert takes at most ``ceil(factor * T / E)`` copies, first choices before second ones.

    A full expert keeps, by the order: "sentence": the first rows, which a layer orders by sentence; "score":
    tokens with the highest probability of a first choice (batch-prioritised routing, Riquelme et al. 2021);
    "random": a new random order each time, in evaluation "score".

    Args:
        config: the block's `MoEConfig`.
    """

    def __init__(self, config):
        super().__init__()
        self.factor, self.eval_factor = config.capacity_factor, config.eval_capacity_factor
        self.order = config.drop_order

    @property
    def current_factor(self) -> float:
        """The factor in this mode; 0: no limit."""
        return self.factor if self.training else self.eval_factor

    def forward(self, expert_TK: Tensor, probs_TE: Tensor, active_T: Tensor) -> Places:
        """The places of copies ``(T, K)``; copies for expert E or above are not limited.

        Args:
            probs_TE: the gate's probabilities, which decide the order.
            active_T: mask of the tokens that are counted.
        """
        factor, num_experts = self.current_factor, probs_TE.shape[1]
        order_T = self.row_order(probs_TE.detach()) if factor else None
        rank_TK, copies_E = rank_within_expert(expert_TK, num_experts, order_T)
        if not factor:
            return Places(rank_TK, None, copies_E)
        most = most_copies(factor, active_T.sum(), num_experts)
        return Places(rank_TK, rank_TK < most, copies_E.minimum(most))

    def row_order(self, probs_TE: Tensor) -> Tensor | None:
        """Rows ``(T,)`` in the order in which they get capacity; None: unchanged."""
        if self.order == "sentence":
            return None
        if self.order == "random" and self.training:
            return torch.rand_like(probs_TE[:, 0]).argsort()
        return probs_TE.amax(1).argsort(descending=True, stable=True)


def most_copies(factor: float, num_tokens: Tensor, num_experts: int) -> Tensor:
    """``ceil(factor * num_tokens / num_experts)``, elementwise, in exact arithmetic on the device."""
    numerator, denominator = exact(factor, num_experts)
    denominator *= num_experts
    return (num_tokens * numerator + denominator - 1) // denominator


def exact(factor: float, num_experts: int) -> tuple[int, int]:
    """Numerator and denominator of a capacity factor, read as a decimal number.

    A factor above E would limit nothing and could overflow, so it becomes E.
    """
    if factor >= num_experts:
        return num_experts, 1
    return Fraction(str(float(factor))).limit_denominator(10**9).as_integer_ratio()


def rank_within_expert(
    expert_TK: Tensor, num_experts: int, order_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The number of earlier copies for the same expert ``(T, K)``, and of all copies per expert ``(E,)``.

    All first choices come before all second ones (as in GShard), each in the order of rows ``order_T``.
    """
    if order_T is not None:
        rank_TK, count_E = rank_within_expert(expert_TK.index_select(0, order_T), num_experts)
        return torch.empty_like(rank_TK).index_copy_(0, order_T, rank_TK), count_E
    expert_KT = expert_TK.t()
    sorted_N, order_N = expert_KT.flatten().sort(stable=True)
    bounds_E1 = torch.arange(num_experts + 1, device=sorted_N.device)
    start_E1 = torch.searchsorted(sorted_N, bounds_E1)  # expert E: copies without an expert
    rank_N = torch.arange(sorted_N.shape[0], device=sorted_N.device)
    rank_N = rank_N - start_E1.index_select(0, sorted_N)
    rank_KT = torch.empty_like(rank_N).scatter_(0, order_N, rank_N).view_as(expert_KT)
    return rank_KT.t(), start_E1.diff()


class Routing(NamedTuple):
    """A gate's decision for T tokens, built by `of`."""

    choice_TK: Tensor  # the experts that each token chose, best first; E and above: free experts
    weight_TK: Tensor  # of each copy; 0 for other choices
    valid_TK: Tensor  # choices of active tokens, unless sampling left them out
    kept_TK: Tensor  # valid choices of an expert within its capacity: copies
    rank_TK: Tensor  # number of earlier copies that the same expert keeps
    kept_E: Tensor  # copies that each expert keeps
    first_choice_T: Tensor  # before dropping; it decides the token's next stratum
    active_T: Tensor  # mask of the tokens that are routed
    probs_TE: Tensor  # (T, E + M), as are the logits
    logits_TE: Tensor | None  # None: the gate has no scores
    simple_TS: Tensor | None = None  # weights of the simple experts of a `TopKGate`
    observed_N: Tensor | None = None  # argument of the gate's `update`; None: it has none
    own_logits_TE: Tensor | None = None  # logits of a `TopKGate` without the exit bias
    most: int | None = None  # number of copies at most; None: unknown
    own_loss: Tensor | None = None  # scalar, with gradient: the gate's `Gate.own_loss`

    @classmethod
    def of(
        cls,
        choice_TK: Tensor,
        weight_TK: Tensor,
        valid_TK: Tensor,
        places: Places,
        active_T: Tensor,
        probs_TE: Tensor,
        logits_TE: Tensor | None = None,
        first_choice_T: Tensor | None = None,
        **optional: Tensor | None,
    ) -> "Routing":
        """The routing of these choices.

        Args:
            weight_TK: arbitrary for choices that are not kept.
            first_choice_T: default: column 0 of the choices.
            optional: fields that only some gates set.
        """
        kept_TK = places.kept(valid_TK)
        if probs_TE.shape[1] > len(places.kept_E):
            kept_TK = kept_TK & (choice_TK < len(places.kept_E))
        weight_TK = weight_TK.masked_fill(~kept_TK, 0)
        first_choice_T = choice_TK[:, 0] if first_choice_T is None else first_choice_T
        copies = choice_TK, weight_TK, valid_TK, kept_TK, places.rank_TK, places.kept_E
        return cls(*copies, first_choice_T, active_T, probs_TE, logits_TE, **optional)

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.kept_E)

    @property
    def expert_TK(self) -> Tensor:
        """The expert of each copy; E for choices that are no copies."""
        return self.choice_TK.masked_fill(~self.kept_TK, self.num_experts)

    def copies(self, weight_TK: Tensor, own: range, few: bool) -> Copies:
        """The copies, for the experts.

        Args:
            weight_TK: of each copy.
            own: experts that no later gate sees, as the block numbers them.
            few: whether their number is to be read, if the gate knows no bound.
        """
        places = self.expert_TK, weight_TK, self.rank_TK, self.kept_E, own
        return Copies(*places, most=self.most or (0 if few else None))

    @property
    def chosen_TK(self) -> Tensor:
        """Valid choices of experts, not of free experts."""
        if self.probs_TE.shape[1] == self.num_experts:
            return self.valid_TK
        return self.valid_TK & (self.choice_TK < self.num_experts)

    @property
    def dropped_TK(self) -> Tensor:
        """Choices beyond their expert's capacity."""
        return self.chosen_TK & ~self.kept_TK

    @property
    def first_choices_E(self) -> Tensor:
        """Number of active tokens by first choice."""
        num_experts = self.num_experts
        return count(self.first_choice_T.masked_fill(~self.active_T, num_experts), num_experts)

    @property
    def all_choices_E(self) -> Tensor:
        """Number of valid choices per expert, before dropping, ``(E + M,)``."""
        size = self.probs_TE.shape[1]
        return count(self.choice_TK.masked_fill(~self.valid_TK, size).flatten(), size)


def count(index_N: Tensor, size: int) -> Tensor:
    """The number of occurrences of ``0..size-1``; unlike ``bincount``, it does not wait for the device."""
    counts = index_N.new_zeros(size + 1)
    return counts.scatter_add_(0, index_N, torch.ones_like(index_N))[:size]
