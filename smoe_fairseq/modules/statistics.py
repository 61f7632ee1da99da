"""Statistics of a pass of the block: counts, losses and metrics.

Shapes: T tokens, K choices per token, E experts, L strata, B sentences, S positions.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smoe_fairseq.modules.branches import CMROutput
from smoe_fairseq.modules.config import MoEConfig
from smoe_fairseq.modules.routing import Routing
from smoe_fairseq.modules.rows import IndexedTokens, MaskedTokens
from smoe_fairseq.modules.strata import Strata


class RoutingStats(NamedTuple):
    """Statistics of one pass through a block, without padding.

    A flat tuple of tensors or None, which activation checkpointing can pass on with gradients
    (torch's only with ``use_reentrant=False``).
    """

    balance_loss: Tensor  # scalar, mean over the gates, without alpha
    requested_capacity: Tensor  # x.shape[:-1], gates that routed the token; 0 at padding
    first_choices: Tensor  # (L, E): tokens of stratum i whose first choice is expert e
    unused: Tensor  # (L,): experts seen by gate i that are no token's first choice
    chosen: Tensor  # (L, K): copies chosen at stratum i
    dropped: Tensor  # (L, K): of these, copies beyond their expert's capacity
    dropped_choices: Tensor  # x.shape[:-1] + (K,): dropped copies of each token over all strata
    z_loss: Tensor  # scalar, mean over the gates, without its weight
    # What only some blocks have:
    cmr_gate_sum: Tensor | None = None  # scalar: sum of the CMR gate over the tokens
    cmr_tokens: Tensor | None = None  # scalar: tokens in this sum
    entropy: Tensor | None = None  # scalar, mean over the gates, without its weight
    asked: Tensor | None = None  # (L, E + M): choices per expert, if the loss counts all choices
    observed: Tensor | None = None  # (L, N): argument of `StratifiedMoE.end_update`
    own_loss: Tensor | None = None  # scalar, mean of `Gate.own_loss` with its coefficient
    mean_probs: Tensor | None = None  # (L, E + M), with gradient, if balanced over an update
    stops: Tensor | None = None  # scalar, `expected_stops`, if there is a capacity budget
    gate_logits: Tensor | None = None  # x.shape[:-1] + (E + M,): those of the first gate

    def __repr__(self) -> str:
        """One line of means."""
        strata, shape = len(self.chosen), tuple(self.requested_capacity.shape)
        if self.chosen.is_meta:
            return f"RoutingStats(strata={strata}, shape={shape})"
        tokens = int((self.requested_capacity > 0).sum())
        requested = self.requested_capacity.sum().item() / max(tokens, 1)
        dropped = 100 * self.dropped.sum().item() / max(self.chosen.sum().item(), 1)
        return (
            f"RoutingStats(strata={strata}, tokens={tokens}, requested_capacity={requested:.2f}, "
            f"dropped={dropped:.1f}%, balance_loss={self.balance_loss.item():.3f})"
        )


class Counts:
    """Counts and means over a gate's active tokens, from which its losses are computed."""

    def __init__(self, routing: Routing):
        self.routing = routing
        self.first_choices_E = routing.first_choices_E
        self.num_tokens = self.first_choices_E.sum().clamp(min=1)  # a divisor
        self.mean_probs_E = self.mean(routing.probs_TE)  # (E + M,): p (paper, eq. 10)

    def mean(self, x_T: Tensor) -> Tensor:
        """The mean over the tokens."""
        active_T = self.routing.active_T.view(-1, *[1] * (x_T.dim() - 1))
        return (x_T * active_T).sum(0) / self.num_tokens

    @property
    def mean_true_probs_E(self) -> Tensor:
        """``(E,)``: for the first choice, which is never a free expert."""
        routing, num_experts = self.routing, self.routing.num_experts
        if routing.probs_TE.shape[1] == num_experts:
            return self.mean_probs_E
        return self.mean(routing.logits_TE[:, :num_experts].softmax(dim=-1))

    def entropy(self) -> Tensor:
        """Mean of ``-sum_e p_e log p_e`` over tokens: small if few experts share a token."""
        # Computed from the logits, since the gradient of p log p is not finite at 0.
        logits_TE, probs_TE = self.routing.logits_TE, self.routing.probs_TE
        return self.mean(logits_TE.logsumexp(1) - (probs_TE * logits_TE).sum(1))

    def z_loss(self) -> Tensor:
        """Mean of ``logsumexp(logits)^2`` over tokens (Zoph et al. 2022, eq. 5)."""
        if self.routing.logits_TE is None:
            return self.mean_probs_E.new_zeros(())
        return self.mean(self.routing.logits_TE.logsumexp(dim=-1).square())


def balance_loss(choices_E: Tensor, mean_probs_E: Tensor, experts: int | Tensor) -> Tensor:
    """``E sum_e f_e p_e`` of each gate: 1 when balanced, up to E when not, 0 without tokens (paper, eq. 8).

    Args:
        choices_E: counts of first choices or of all choices, ``(..., E)``; f are their fractions (eq. 9).
        mean_probs_E: p (eq. 10); f may count more batches.
        experts: E; less than the columns if others are padding.
    """
    choices_E = choices_E.to(mean_probs_E.dtype)
    fraction_E = choices_E / choices_E.sum(-1, keepdim=True).clamp(min=1)
    return experts * (fraction_E * mean_probs_E).sum(-1)


# A stratum's tokens as a mask and as rows, and their routing.
Visit = tuple[Tensor, IndexedTokens | MaskedTokens, Routing]


class StatsBuilder:
    """Builds the `RoutingStats` of a block's passes."""

    def __init__(self, config: MoEConfig, gates: Sequence[nn.Module]):
        self.config, self.strata, self.kind = config, config.layout, type(gates[0])
        self.choices = max(gate.top_k for gate in gates)  # K, the largest
        self.free_experts = config.free_experts
        self.num_observed = max(gate.num_observed for gate in gates)  # N, the largest
        self.returns_gate_logits = config.gate_residual == "layers"

    def stats(self, visits: list[Visit], shape: torch.Size, cmr: CMROutput | None) -> RoutingStats:
        """The statistics of one pass over tokens of this shape, with one visit per stratum."""
        routings = [routing for _, _, routing in visits]
        requested_T = torch.zeros_like(visits[0][0], dtype=torch.long)
        dropped_TK = requested_T.unsqueeze(1).repeat(1, self.choices)
        for here_T, tokens, routing in visits:
            requested_T = requested_T + here_T
            dropped_TK = tokens.add(dropped_TK, self.pad_choices(routing.dropped_TK))
        counts = [Counts(routing) for routing in routings]
        balanced = first_choices = [each.first_choices_E for each in counts]
        probs = [each.mean_probs_E for each in counts]
        asked = mean_probs = observed = None
        if self.free_experts:
            equal = self.config.null_experts, self.config.copy_experts
            balanced = [average_null(routing.all_choices_E, *equal) for routing in routings]
            asked = self._stack(balanced)
        if self.config.balance_over == "update":
            mean_probs = self._stack(probs)
        if self.num_observed:
            numbers = [routing.observed_N for routing in routings]
            observed = torch.stack([F.pad(n, (0, self.num_observed - len(n))) for n in numbers])
        losses = [balance_loss(*each, len(each[0])) for each in zip(balanced, probs, strict=True)]
        return RoutingStats(
            balance_loss=_mean(losses),
            requested_capacity=requested_T.view(shape),
            first_choices=self._stack(first_choices),
            unused=torch.stack([(f_E == 0).sum() for f_E in first_choices]),
            chosen=torch.stack([self.pad_choices(r.chosen_TK.sum(0)) for r in routings]),
            dropped=torch.stack([self.pad_choices(r.dropped_TK.sum(0)) for r in routings]),
            dropped_choices=dropped_TK.view(*shape, self.choices),
            z_loss=_mean([each.z_loss() for each in counts]),
            cmr_gate_sum=cmr and cmr.gate_sum,
            cmr_tokens=cmr and cmr.tokens,
            entropy=_mean([each.entropy() for each in counts])
            if self.kind.has_entropy_loss
            else None,
            asked=asked,
            observed=observed,
            own_loss=_mean([r.own_loss for r in routings]) if self.kind.own_loss else None,
            mean_probs=mean_probs,
            stops=expected_stops(self.strata, counts) if self.config.capacity_budget else None,
            gate_logits=self._gate_logits(visits[0], shape) if self.returns_gate_logits else None,
        )

    def _gate_logits(self, first: Visit, shape: torch.Size) -> Tensor:
        """``gate_logits`` for `StratifiedMoE.forward` of the next layer: 0 at padding."""
        _, tokens, routing = first
        logits_TE = routing.own_logits_TE
        every_TE = logits_TE.new_zeros(shape.numel(), logits_TE.shape[1])
        return tokens.replace(every_TE, logits_TE).view(*shape, every_TE.shape[1])

    def pad_choices(self, number_K: Tensor) -> Tensor:
        """Pad the counts of a gate's choices to ``(..., K)`` with 0."""
        missing = self.choices - number_K.shape[-1]
        return F.pad(number_K, (0, missing)) if missing else number_K

    def _stack(self, numbers: list[Tensor]) -> Tensor:
        return torch.stack([pad_to_block(self.strata, i, n_E) for i, n_E in enumerate(numbers)])


def _mean(losses: list[Tensor]) -> Tensor:
    return torch.stack(losses).mean()


def pad_to_block(strata: Strata, i: int, number_E: Tensor) -> Tensor:
    """Pad the counts of the experts that gate ``i`` sees to all experts with 0; free experts stay last."""
    first, visible = strata.first_experts[i], strata.visible[i]
    padding = (first, strata.num_experts - first - visible)
    if len(number_E) == visible:
        return F.pad(number_E, padding)
    return torch.cat([F.pad(number_E[:visible], padding), number_E[visible:]])


def average_null(count_E: Tensor, null_experts: int, copy_experts: int = 0) -> Tensor:
    """Averages the counts of the null experts (the last ones), and of the copy experts before them.

    All experts of such a kind are the same, so they need no balance among themselves.
    """
    if not null_experts + copy_experts:
        return count_E
    exact = torch.float32 if count_E.device.type == "mps" else torch.float64  # MPS has no float64
    others = count_E.shape[-1] - copy_experts - null_experts
    true_E, *equal = count_E.to(exact).split([others, copy_experts, null_experts], -1)
    equal = [x_M.mean(-1, keepdim=True).expand_as(x_M) for x_M in equal if x_M.shape[-1]]
    return torch.cat([true_E, *equal], -1)


def expected_stops(strata: Strata, counts: list[Counts]) -> Tensor:
    """The mean requested capacity of a pass, a scalar with a straight-through gradient.

    It is ``N_1`` of the recursion ``N_L = 1``, ``N_i = 1 + sum_{j=i..L-1} s_ij N_{j+1}``, where ``s_ij`` is
    the share of the tokens at stratum i whose first choice is in stratum j. These counts have no gradient,
    so ``s_ij`` gets the gradient of the mean probability that gate i gives to the experts of stratum j, as in
    the balance loss f is counted and p learns. The gradient is biased in two ways: the first choice is
    the most likely expert, not a sample; and a token that moves to another stratum is assumed to continue
    like the tokens of that stratum.

    A stratum without tokens counts as under uniform routing, and has no gradient.

    Args:
        counts: of each stratum's gate.
    """
    stops = [counts[-1].mean_probs_E.new_ones(())]  # N of the strata after stratum i
    for i in reversed(range(len(strata) - 1)):
        rest = Strata(strata.sizes[i:])
        share_L = _shares(counts[i], rest.sizes)
        here = 1 + (share_L[:-1] * torch.stack(stops)).sum()  # no stratum follows the last one
        has_tokens = counts[i].first_choices_E.any()
        stops.insert(0, torch.where(has_tokens, here, rest.expected_requested_capacity()))
    return stops[0]


def _shares(counts: Counts, sizes: tuple[int, ...]) -> Tensor:
    """The share of tokens whose first choice is in each of the strata that a gate sees, of these sizes."""
    probs_E = counts.mean_true_probs_E
    counted_E = counts.first_choices_E.to(probs_E.dtype) / counts.num_tokens
    counted_L, probs_L = (
        torch.stack([part.sum() for part in number_E.split(sizes)])
        for number_E in (counted_E, probs_E)
    )
    return counted_L + probs_L - probs_L.detach()
