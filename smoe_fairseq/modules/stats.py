"""What one pass through a block did, counted.

Shapes: T tokens, E experts, M null experts, K choices per token, L strata.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from smoe_fairseq.modules.balance import average_null
from smoe_fairseq.modules.cmr import CMRStats
from smoe_fairseq.modules.expected_stops import expected_stops
from smoe_fairseq.modules.routing import Routing
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
    mean_probs: Tensor | None  # (L, E + M), with gradient, where the loss is taken over an update
    stops: Tensor | None  # scalar, `expected_stops` where there is a budget of them


@dataclass(frozen=True)
class Counting:
    """What is counted in a block's passes.

    Args:
        choices: K of the gate with most.
        asked, entropy, mean_probs, stops: whether these are there.
    """

    strata: Strata
    choices: int
    null_experts: int = 0
    asked: bool = False
    entropy: bool = False
    mean_probs: bool = False
    stops: bool = False

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
        if self.asked or self.null_experts:
            asked = [average_null(r.asked_E, self.null_experts) for r in routings]
        of_loss = asked if self.null_experts else first_choices
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
