"""The budget loss of conditional MoE routing: the mean gate is pulled to a share of the tokens."""

import torch
import torch.distributed as dist
from torch import Tensor

from smoe_fairseq.modules import RoutingStats


class CMRBudget:
    """``|mean gate - p|`` of each layer, averaged over the layers (NLLB team 2022, section 6.2).

    The mean is over the real tokens of all ranks and of all batches of an update so far
    (``--update-freq``): which way a gate is pulled depends on all of them, not on its own batch.

    Args:
        p: the budget, the share of tokens that may use the experts.
    """

    def __init__(self, p: float):
        self.p = p
        self.update = None
        self.seen_2L = None  # sums of gates and tokens of the current update, each layer's

    def loss(self, model, moe_stats: list[RoutingStats]) -> Tensor:
        """Scalar; its value is exact for the mean so far, its gradient for this batch's share of it."""
        gate_sum_L = torch.stack([stats.cmr_gate_sum for stats in moe_stats])
        tokens_L = torch.stack([stats.cmr_tokens for stats in moe_stats])
        seen_2L = torch.stack([gate_sum_L.detach(), tokens_L])
        if model.training:
            seen_2L = self._accumulate(seen_2L, getattr(model, "num_updates", None))
        excess_L = seen_2L[0] / seen_2L[1].clamp(min=1) - self.p
        mean_L = gate_sum_L / tokens_L.clamp(min=1)
        # The value of |excess|, the gradient of this batch's mean in its direction.
        return (excess_L.abs() + excess_L.sign() * (mean_L - mean_L.detach())).mean()

    def _accumulate(self, seen_2L: Tensor, update: int | None) -> Tensor:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(seen_2L)
        if update is not None and update == self.update:
            seen_2L = seen_2L + self.seen_2L
        self.update, self.seen_2L = update, seen_2L
        return seen_2L
