"""The balance loss over all processes and batches of an update (``--moe-balance-over update``).

What experts are asked for is counted here and not in the block: a criterion sees each batch once, also where
activations are recomputed, and all layers of it at once.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from smoe_fairseq.modules import RoutingStats, StratifiedMoE
from smoe_fairseq.modules.balance import balance_loss


class UpdateBalance:
    """Counts what the experts of all layers are asked for, from `begin` on."""

    def __init__(self):
        self.asked: Tensor | None = None  # (L, E + M) of every layer, one after the other

    def begin(self) -> None:
        """A new update."""
        self.asked = None

    def losses(
        self, blocks: list[StratifiedMoE], ran: list[RoutingStats | None], counts: bool
    ) -> list[Tensor]:
        """The balance loss of each layer that ran, with f over all that has been counted so far.

        Every process has to ask at the same time, whatever its layers and tokens.

        Args:
            blocks: all that learn by the loss.
            ran: what each did, None where LayerDrop left it out.
            counts: no for a batch that is there to keep processes in step.
        """
        layers = [
            _asked(block, stats if counts else None)
            for block, stats in zip(blocks, ran, strict=True)
        ]
        asked = torch.cat([asked_LE.flatten() for asked_LE in layers]).double()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(asked)
        self.asked = asked if self.asked is None else self.asked + asked
        so_far = self.asked.split([asked_LE.numel() for asked_LE in layers])
        return [
            balance_loss(
                asked.view(len(block.strata), -1),
                stats.mean_probs,
                block.visible_of_gate + block.counting.null_experts,
            )
            for block, asked, stats in zip(blocks, so_far, ran, strict=True)
            if stats is not None
        ]


def _asked(block: StratifiedMoE, stats: RoutingStats | None) -> Tensor:
    """``(L, E + M)``: what a layer's gates were asked for; nothing where it did not run."""
    if stats is None:
        experts = block.strata.num_experts + block.counting.null_experts
        return block.stratum_of_expert.new_zeros(len(block.strata), experts)
    return stats.first_choices if stats.asked is None else stats.asked
