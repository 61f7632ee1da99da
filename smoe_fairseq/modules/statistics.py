"""What a pass of the block counts, and what is read from the counts.

Shapes: T tokens, K choices per token, E experts, L strata, B sentences, S positions.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smoe_fairseq.modules.balance import average_null, expected_stops
from smoe_fairseq.modules.branches import CMRStats
from smoe_fairseq.modules.routing import Capacity, Routing
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
    entropy: (
        Tensor | None
    )  # scalar, mean over the gates, without its weight; None but of top-p gates
    asked: Tensor | None  # (L, E + M): choices of each expert, where the balance counts all choices
    observed: (
        Tensor | None
    )  # (L, N): what `StratifiedMoE.end_update` takes, of gates with an `update`
    l1: Tensor | None  # scalar, mean over the gates, with its coefficient; None but of ReLU gates
    mean_probs: Tensor | None  # (L, E + M), with gradient, where the loss is taken over an update
    stops: Tensor | None  # scalar, `expected_stops` where there is a budget of them

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


@dataclass(frozen=True)
class Counting:
    """What is counted in a block's passes.

    Args:
        choices: K of the gate with most.
        observed: N of the gate that observes most; 0: none does.
        entropy, mean_probs, stops, l1: whether these are there.
    """

    strata: Strata
    choices: int
    null_experts: int = 0
    copy_experts: int = 0
    constant_experts: int = 0
    observed: int = 0
    entropy: bool = False
    mean_probs: bool = False
    stops: bool = False
    l1: bool = False

    @property
    def free_experts(self) -> int:
        """Behind those of the strata."""
        return self.constant_experts + self.copy_experts + self.null_experts

    def stats(
        self,
        routings: list[Routing],
        requested_T: Tensor,
        dropped_TK: Tensor,
        shape: torch.Size,
        cmr_stats: CMRStats | None,
    ) -> RoutingStats:
        """Of one pass over tokens of this shape, with a routing for each stratum."""
        first_choices = [routing.first_choices_E for routing in routings]
        asked = None
        if self.free_experts:
            alike = self.null_experts, self.copy_experts
            asked = [average_null(r.asked_E, *alike) for r in routings]
        of_loss = asked if self.free_experts else first_choices
        observed = (
            [F.pad(r.observed_N, (0, self.observed - len(r.observed_N))) for r in routings]
            if self.observed
            else None
        )
        losses = [r.balance_loss(asked_E) for r, asked_E in zip(routings, of_loss, strict=True)]
        return RoutingStats(
            balance_loss=torch.stack(losses).mean(),
            requested_capacity=requested_T.view(shape),
            first_choices=self._stack(first_choices),
            unused=torch.stack([(f_E == 0).sum() for f_E in first_choices]),
            chosen=torch.stack([self.on_all_choices(r.chosen_K) for r in routings]),
            dropped=torch.stack([self.on_all_choices(r.dropped_TK.sum(0)) for r in routings]),
            dropped_choices=dropped_TK.view(*shape, self.choices),
            z_loss=torch.stack([r.z_loss() for r in routings]).mean(),
            cmr_gate_sum=cmr_stats and cmr_stats.gate_sum,
            cmr_tokens=cmr_stats and cmr_stats.tokens,
            entropy=torch.stack([r.entropy() for r in routings]).mean() if self.entropy else None,
            asked=asked and self._stack(asked),
            observed=observed and torch.stack(observed),
            l1=torch.stack([r.l1 for r in routings]).mean() if self.l1 else None,
            mean_probs=self._stack([r.mean_probs_E for r in routings]) if self.mean_probs else None,
            stops=expected_stops(self.strata, routings) if self.stops else None,
        )

    def on_all_choices(self, number_K: Tensor) -> Tensor:
        """Numbers of a gate's choices ``(..., K)``, with 0 for those that only other gates have."""
        missing = self.choices - number_K.shape[-1]
        return F.pad(number_K, (0, missing)) if missing else number_K

    def _stack(self, numbers: list[Tensor]) -> Tensor:
        return torch.stack([on_all_experts(self.strata, i, n_E) for i, n_E in enumerate(numbers)])


def on_all_experts(strata: Strata, i: int, number_E: Tensor) -> Tensor:
    """Numbers of the experts that gate ``i`` sees, with 0 for those that it does not see; then null ones."""
    first, visible = strata.first_experts[i], strata.visible[i]
    padding = (first, strata.num_experts - first - visible)
    if len(number_E) == visible:
        return F.pad(number_E, padding)
    return torch.cat([F.pad(number_E[:visible], padding), number_E[visible:]])


# Dropped choices by position, and evaluation with training's limit.
#
# Shapes: B sentences, S positions.


FIFTHS = 5


def by_position(stats: RoutingStats) -> Tensor:
    """``(2, FIFTHS)``: first choices by fifth of the sentence, and of these the dropped ones.

    The statistics are of a pass over ``(B, S, D)``. Token t of n (from 0) is in fifth ``5 t // n``; a
    sentence of fewer than five tokens leaves some fifths out.
    """
    chosen_BS = stats.requested_capacity  # a token has one first choice wherever it stops
    real_BS = (chosen_BS > 0).long()
    length_B1 = real_BS.sum(1, keepdim=True).clamp(min=1)
    fifth_BS = FIFTHS * (real_BS.cumsum(1) - 1).clamp(min=0) // length_B1
    counts_BS2 = torch.stack([chosen_BS, stats.dropped_choices[..., 0]], dim=-1)
    sums_52 = counts_BS2.new_zeros(FIFTHS, 2)
    sums_52.index_add_(0, fifth_BS.flatten(), counts_BS2.view(-1, 2))
    return sums_52.t().contiguous()  # fairseq flattens it for the other processes


def percent_dropped(table_25):
    """``(FIFTHS,)`` of `by_position`'s table or a sum of such, a tensor or an array."""
    chosen, dropped = table_25
    return 100 * dropped / chosen.clip(min=1)


def capacities_of(model: nn.Module) -> list[Capacity]:
    return [module for module in model.modules() if isinstance(module, Capacity)]


def is_limited(module: nn.Module) -> bool:
    """Whether experts of it are limited in the mode that it is in."""
    return any(capacity.factor_in_force for capacity in capacities_of(module))


def is_limited_in_training(model: nn.Module) -> bool:
    """Whether training drops what evaluation does not; no for a dense model."""
    return any(each.factor not in (0, each.eval_factor) for each in capacities_of(model))


@contextmanager
def training_capacity(model: nn.Module) -> Iterator[None]:
    """Within it, evaluation limits the experts as training does; nothing else changes."""
    before = [(capacity, capacity.eval_factor) for capacity in capacities_of(model)]
    for capacity, _ in before:
        capacity.eval_factor = capacity.factor
    try:
        yield
    finally:
        for capacity, factor in before:
            capacity.eval_factor = factor


def on_host(logs: list[Mapping]) -> list[dict]:
    """Dictionaries in which numbers and numpy arrays stand in the place of tensors, in one transfer.

    Integers stay exact up to 2^53; other values are as they were.
    """
    tensors = [value for log in logs for value in log.values() if torch.is_tensor(value)]
    if not tensors:
        return [dict(log) for log in logs]
    # One copy for each type there is, and one to the host.
    types = {tensor.dtype: None for tensor in tensors}
    of_type = {t: [each for each in tensors if each.dtype == t] for t in types}
    parts = [torch.cat([each.detach().flatten() for each in of_type[t]]).double() for t in types]
    flat = torch.cat(parts).cpu().numpy()
    start, values = 0, {}
    for dtype, group in of_type.items():
        for each in group:
            value = flat[start : start + each.numel()].reshape(tuple(each.shape))
            start += each.numel()
            if not dtype.is_floating_point:
                value = value.astype("int64")
            values[id(each)] = value if each.dim() else value.item()
    return [{key: values.get(id(value), value) for key, value in log.items()} for log in logs]
