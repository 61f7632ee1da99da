"""Requested capacity of a trained model, measured with the references as decoder input."""

from torch import nn

from smoe_fairseq.analysis import inputs
from smoe_fairseq.analysis.collect import collect
from smoe_fairseq.analysis.counts import Counts
from smoe_fairseq.models.moe_layers import moe_blocks


def requested_capacity(model: nn.Module, task, subset: str = "valid") -> dict[str, float]:
    """Strata that a token stops at, mean over all real tokens of a subset, per MoE layer.

    Layers are named as `moe_blocks` names them; special tokens count like the others.
    Empty for a dense model.
    """
    if not moe_blocks(model):
        return {}
    totals: dict[str, Counts] = {}
    for direction in collect(model, task, inputs.directions(task), subset, progress=False):
        for counts in direction.blocks:
            both = counts.total(special=False) + counts.total(special=True)
            name = counts.block.name
            totals[name] = totals[name] + both if name in totals else both
    return {name: counts.requested_capacity for name, counts in totals.items()}
