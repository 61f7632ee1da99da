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
        self.asked: Tensor | None = None  # (layers, L, E + M)

    def begin(self) -> None:
        """A new update."""
        self.asked = None

    def losses(
        self, blocks: list[StratifiedMoE], ran: list[RoutingStats | None], counts: bool
    ) -> list[Tensor]:
        """The balance loss of each layer that ran, with f over all that has been counted so far.

        Every process has to ask at the same time, whatever its layers and tokens.

        Args:
            blocks: all that learn by the loss; they are alike.
            ran: what each did, None where LayerDrop left it out.
            counts: no for a batch that is there to keep processes in step.
        """
        strata, null = blocks[0].strata, blocks[0].counting.null_experts
        nothing = blocks[0].stratum_of_expert.new_zeros(len(strata), strata.num_experts + null)
        asked = torch.stack(
            [_asked(stats, nothing) if counts else nothing for stats in ran]
        ).double()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(asked)
        self.asked = asked if self.asked is None else self.asked + asked
        visible = blocks[0].visible_of_gate + null
        return [
            balance_loss(asked_LE, stats.mean_probs, visible)
            for asked_LE, stats in zip(self.asked, ran, strict=True)
            if stats is not None
        ]


def _asked(stats: RoutingStats | None, nothing: Tensor) -> Tensor:
    if stats is None:
        return nothing
    return stats.first_choices if stats.asked is None else stats.asked
