"""The loss of a capacity budget: the mean requested capacity is pulled to a number of strata."""

import torch
from torch import Tensor

from smoe_fairseq.modules import RoutingStats


def capacity_budget_loss(moe_stats: list[RoutingStats], budget: float) -> Tensor:
    """``|mean requested capacity - budget|`` over the real tokens of all layers of a batch; a scalar.

    The mean is the one that is logged, so that layers may share the budget unevenly. Its gradient is that of
    `expected_stops`. As CMR's budget it is of each batch and process by itself.

    Args:
        budget: strata per token and layer.
    """
    stops_L = torch.stack([stats.stops for stats in moe_stats])
    tokens_L = torch.stack([stats.first_choices[0].sum() for stats in moe_stats])
    tokens = tokens_L.sum()
    distance = ((stops_L * tokens_L).sum() / tokens.clamp(min=1) - budget).abs()
    return torch.where(tokens > 0, distance, 0)
