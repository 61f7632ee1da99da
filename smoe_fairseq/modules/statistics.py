"""Counts of a pass of the block, and the losses and metrics computed from them.

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
    """What one pass through a block did; real tokens only, padding counts nowhere.

    Flat, tensors or None, so that activation checkpointing carries them, gradient of the loss included.
    """

    balance_loss: Tensor  # scalar, mean over the gates, without alpha
    requested_capacity: Tensor  # x.shape[:-1], strata that the token stopped at, 0 at padding
    first_choices: Tensor  # (L, E): tokens of stratum i whose first choice is expert e
    unused: Tensor  # (L,): experts seen by gate i that are no token's first choice
    chosen: Tensor  # (L, K): copies chosen at stratum i
    dropped: Tensor  # (L, K): of those, copies beyond their expert's capacity
    dropped_choices: Tensor  # x.shape[:-1] + (K,): the same of each token, over all strata
    z_loss: Tensor  # scalar, mean over the gates, without its weight
    cmr_gate_sum: Tensor | None  # scalar: sum of the CMR gate over the tokens; None without CMR
    cmr_tokens: Tensor | None  # scalar: tokens that it counts
    entropy: Tensor | None  # scalar, mean over the gates, without its weight; of top-p gates
    asked: Tensor | None  # (L, E + M): choices of each expert, where the balance counts all choices
    observed: Tensor | None  # (L, N): what `StratifiedMoE.end_update` takes
    l1: Tensor | None  # scalar, mean over the gates, with its coefficient; of ReLU gates
    mean_probs: Tensor | None  # (L, E + M), with gradient, where the loss is taken over an update
    stops: Tensor | None  # scalar, `expected_stops` where there is a budget of them
    gate_logits: Tensor | None  # x.shape[:-1] + (E + M,), of the first gate, for the next MoE layer

    def __repr__(self) -> str:
        """One line of means; the tensors are the attributes."""
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
    """What a gate's losses are made of, counted once; tokens are the active ones."""

    def __init__(self, routing: Routing):
        self.routing = routing
        self.first_choices_E = routing.first_choices_E
        self.num_tokens = self.first_choices_E.sum().clamp(min=1)  # as a divisor
        self.mean_probs_E = self.mean(routing.probs_TE)  # (E + M,): p (paper, eq. 10)

    def mean(self, x_T: Tensor) -> Tensor:
        """Over the tokens."""
        active_T = self.routing.active_T.view(-1, *[1] * (x_T.dim() - 1))
        return (x_T * active_T).sum(0) / self.num_tokens

    @property
    def mean_true_probs_E(self) -> Tensor:
        """``(E,)``: of the first choice, which is never a free expert."""
        routing, num_experts = self.routing, self.routing.num_experts
        if routing.probs_TE.shape[1] == num_experts:
            return self.mean_probs_E
        return self.mean(routing.logits_TE[:, :num_experts].softmax(dim=-1))

    def balance_loss(self, asked_E: Tensor) -> Tensor:
        """``E * sum_e f_e p_e``: 1 when balanced, up to E when not, 0 without tokens (paper, eq. 8).

        Args:
            asked_E: what f are the fractions of: first choices ``(E,)`` or all choices ``(E + M,)``.
        """
        each_once = asked_E is self.first_choices_E
        asked_E = asked_E.to(self.mean_probs_E.dtype)
        # f (eq. 9)
        fraction_E = asked_E / (self.num_tokens if each_once else asked_E.sum().clamp(min=1))
        return len(self.mean_probs_E) * (fraction_E * self.mean_probs_E).sum()

    def entropy(self) -> Tensor:
        """Mean of ``-sum_e p_e log p_e`` over tokens: small where few experts share a token."""
        # By the logits, since the gradient of p log p is not finite where p is 0.
        logits_TE, probs_TE = self.routing.logits_TE, self.routing.probs_TE
        return self.mean(logits_TE.logsumexp(1) - (probs_TE * logits_TE).sum(1))

    def z_loss(self) -> Tensor:
        """Mean of ``logsumexp(logits)^2`` over tokens, small when logits are (Zoph et al. 2022, eq. 5)."""
        if self.routing.logits_TE is None:
            return self.mean_probs_E.new_zeros(())
        return self.mean(self.routing.logits_TE.logsumexp(dim=-1).square())


Visit = tuple[Tensor, IndexedTokens | MaskedTokens, Routing]  # the first marks a stratum's tokens


class StatsBuilder:
    """What is counted in a block's passes."""

    def __init__(self, config: MoEConfig, gates: Sequence[nn.Module]):
        self.config, self.strata = config, config.layout
        self.choices = max(gate.top_k for gate in gates)  # K of the gate with most
        # Behind those of the strata.
        self.free_experts = config.constant_experts + config.copy_experts + config.null_experts
        self.observed = max(gate.observes for gate in gates)  # N of the gate that observes most
        self.entropy = config.gate == "top-p"
        self.l1 = config.gate == "relu"
        self.hands_on_logits = config.gate_residual == "layers"

    def stats(self, visits: list[Visit], shape: torch.Size, cmr: CMROutput | None) -> RoutingStats:
        """Of one pass over tokens of this shape, with a visit for each stratum."""
        routings = [routing for _, _, routing in visits]
        requested_T = torch.zeros_like(visits[0][0], dtype=torch.long)
        dropped_TK = requested_T.unsqueeze(1).repeat(1, self.choices)
        for here_T, tokens, routing in visits:
            requested_T = requested_T + here_T
            dropped_TK = tokens.add(dropped_TK, self.on_all_choices(routing.dropped_TK))
        counts = [Counts(routing) for routing in routings]
        counted = first_choices = [each.first_choices_E for each in counts]
        asked = mean_probs = observed = None
        if self.free_experts:
            alike = self.config.null_experts, self.config.copy_experts
            counted = [average_null(routing.asked_E, *alike) for routing in routings]
            asked = self._stack(counted)
        if self.config.balance_over == "update":
            mean_probs = self._stack([each.mean_probs_E for each in counts])
        if self.observed:
            numbers = [routing.observed_N for routing in routings]
            observed = torch.stack([F.pad(n, (0, self.observed - len(n))) for n in numbers])
        losses = [each.balance_loss(n_E) for each, n_E in zip(counts, counted, strict=True)]
        return RoutingStats(
            balance_loss=_mean(losses),
            requested_capacity=requested_T.view(shape),
            first_choices=self._stack(first_choices),
            unused=torch.stack([(f_E == 0).sum() for f_E in first_choices]),
            chosen=torch.stack([self.on_all_choices(r.chosen_TK.sum(0)) for r in routings]),
            dropped=torch.stack([self.on_all_choices(r.dropped_TK.sum(0)) for r in routings]),
            dropped_choices=dropped_TK.view(*shape, self.choices),
            z_loss=_mean([each.z_loss() for each in counts]),
            cmr_gate_sum=cmr and cmr.gate_sum,
            cmr_tokens=cmr and cmr.tokens,
            entropy=_mean([each.entropy() for each in counts]) if self.entropy else None,
            asked=asked,
            observed=observed,
            l1=_mean([routing.l1 for routing in routings]) if self.l1 else None,
            mean_probs=mean_probs,
            stops=expected_stops(self.strata, counts) if self.config.capacity_budget else None,
            gate_logits=self._gate_logits(visits[0], shape) if self.hands_on_logits else None,
        )

    def _gate_logits(self, first: Visit, shape: torch.Size) -> Tensor:
        """What `StratifiedMoE.forward` of the next layer takes: 0 at padding."""
        _, tokens, routing = first
        logits_TE = routing.own_logits_TE
        every_TE = logits_TE.new_zeros(shape.numel(), logits_TE.shape[1])
        return tokens.replace(every_TE, logits_TE).view(*shape, -1)

    def on_all_choices(self, number_K: Tensor) -> Tensor:
        """Numbers of a gate's choices ``(..., K)``, with 0 for those that only other gates have."""
        missing = self.choices - number_K.shape[-1]
        return F.pad(number_K, (0, missing)) if missing else number_K

    def _stack(self, numbers: list[Tensor]) -> Tensor:
        return torch.stack([pad_to_block(self.strata, i, n_E) for i, n_E in enumerate(numbers)])


def _mean(losses: list[Tensor]) -> Tensor:
    return torch.stack(losses).mean()


def pad_to_block(strata: Strata, i: int, number_E: Tensor) -> Tensor:
    """Numbers of the experts that gate ``i`` sees, with 0 for those that it does not see; then null ones."""
    first, visible = strata.first_experts[i], strata.visible[i]
    padding = (first, strata.num_experts - first - visible)
    if len(number_E) == visible:
        return F.pad(number_E, padding)
    return torch.cat([F.pad(number_E[:visible], padding), number_E[visible:]])


def average_null(asked_E: Tensor, null_experts: int, copy_experts: int = 0) -> Tensor:
    """Averages the counts of the last ``null_experts`` of each row, which are all alike.

    Likewise those of the ``copy_experts`` before them.
    """
    if not null_experts + copy_experts:
        return asked_E
    exact = torch.float32 if asked_E.device.type == "mps" else torch.float64  # MPS has no float64
    others = asked_E.shape[-1] - copy_experts - null_experts
    true_E, *alike = asked_E.to(exact).split([others, copy_experts, null_experts], -1)
    alike = [x_M.mean(-1, keepdim=True).expand_as(x_M) for x_M in alike if x_M.shape[-1]]
    return torch.cat([true_E, *alike], -1)


def expected_stops(strata: Strata, counts: list[Counts]) -> Tensor:
    """Mean requested capacity of a pass, a scalar, with the gradient of the expected one.

    The recursion ``N_L = 1``, ``N_i = 1 + sum_{j=i..L-1} s_ij N_{j+1}``, where
    ``s_ij`` is the share of the tokens at stratum i that go on behind stratum j. With the counted first
    choices it is the mean requested capacity exactly. They have no gradient; ``s_ij`` gets that of the mean
    probability which gate i gives to the experts of stratum j (straight through, as in the balance loss f is
    counted and p learns). So a probability is moved by ``N_{j+1}``, the stops that tokens behind j really
    make on average, and by the tokens that are there to move. The estimate is biased in two ways: a first
    choice is the most likely expert and not a drawn one, and a token that would go elsewhere is taken to go
    on like those that are there already.

    A stratum where no token stops counts as under uniform routing, and has no gradient.

    Args:
        counts: of each stratum's gate; gates see later strata.
    """
    last = counts[-1].mean_probs_E.new_ones(())
    stops = [last]  # N of the strata behind the one at hand
    for i in reversed(range(len(strata) - 1)):
        rest = Strata(strata.sizes[i:])
        share_L = _shares(counts[i], rest.sizes)
        here = 1 + (share_L[:-1] * torch.stack(stops)).sum()  # behind the last one there are none
        some = counts[i].first_choices_E.any()
        stops.insert(0, torch.where(some, here, rest.expected_requested_capacity()))
    return stops[0]


def _shares(counts: Counts, sizes: tuple[int, ...]) -> Tensor:
    """By the strata that a gate sees, of these sizes: the tokens that choose it first, out of all."""
    probs_E = counts.mean_true_probs_E
    counted_E = counts.first_choices_E.to(probs_E.dtype) / counts.num_tokens
    counted_L, probs_L = (
        torch.stack([part.sum() for part in number_E.split(sizes)])
        for number_E in (counted_E, probs_E)
    )
    return counted_L + probs_L - probs_L.detach()
