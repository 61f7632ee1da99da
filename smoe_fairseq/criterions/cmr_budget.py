"""The budget loss of conditional MoE routing: the mean gate is pulled to a share of the tokens."""

import torch
from torch import Tensor

from smoe_fairseq.modules import RoutingStats


def cmr_budget_loss(moe_stats: list[RoutingStats], p: float) -> Tensor:
    """``|mean gate - p|`` over the real tokens of a batch, averaged over the layers; a scalar.

    Of each batch and process by itself, as it is defined (NLLB team 2022, section 6.2): a process asks
    no other one in the forward pass, so that one that leaves a batch out holds up nobody.

    Args:
        p: the budget, the share of tokens that may use the experts.
    """
    gate_sum_L = torch.stack([stats.cmr_gate_sum for stats in moe_stats])
    tokens_L = torch.stack([stats.cmr_tokens for stats in moe_stats])
    distance_L = (gate_sum_L / tokens_L.clamp(min=1) - p).abs()
    return torch.where(tokens_L > 0, distance_L, 0).mean()
