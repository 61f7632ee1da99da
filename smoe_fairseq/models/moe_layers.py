"""The MoE layers of a model and how they are named, in logs and everywhere else."""

import re

from torch import nn

from smoe_fairseq.modules.experts import Experts
from smoe_fairseq.modules.placement import Placement
from smoe_fairseq.modules.smoe import StratifiedMoE


def moe_blocks(model: nn.Module) -> dict[str, StratifiedMoE]:
    """MoE layers by name (``encoder.layer.1``), in the order of the forward pass."""
    blocks = {}
    for name, module in model.named_modules():
        if isinstance(module, StratifiedMoE):
            side, layer = re.search(r"(encoder|decoder)\.layers\.(\d+)", name).groups()
            blocks[f"{side}.layer.{layer}"] = module
    return blocks


# Before a layer's name, in the logging output: choices of each expert, which a bias is to balance.
ASKED = "moe_asked "


def first_block(model: nn.Module) -> StratifiedMoE | None:
    """Any MoE layer, wherever it is in the model; others may have another number of experts."""
    return next((m for m in model.modules() if isinstance(m, StratifiedMoE)), None)


def placement_of(model: nn.Module) -> Placement | None:
    """Over which processes the model's experts are spread; None where each process has all of them.

    It is the first MoE layer's: others may have another number of experts.
    """
    block = first_block(model)
    return block.experts.placement if block and block.experts.placement.is_sharded else None


def experts_of(model: nn.Module) -> dict[str, Experts]:
    """The experts of each MoE layer by the name in the state dict, ``encoder.layers.1.moe``."""
    return {n: m.experts for n, m in model.named_modules() if isinstance(m, StratifiedMoE)}
