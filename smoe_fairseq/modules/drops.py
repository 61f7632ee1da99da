"""Who loses for want of capacity: dropped choices by position, and evaluation with training's limit.

Shapes: B sentences, S positions.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from smoe_fairseq.modules.capacity import Capacity
from smoe_fairseq.modules.smoe import RoutingStats

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
