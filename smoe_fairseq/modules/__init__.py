"""The block: strata, gates, experts, and the layer that composes them.

It needs only torch, so that it can be a layer of any PyTorch model.
"""

from smoe_fairseq.modules.layer import RoutingStats, StratifiedMoE
from smoe_fairseq.modules.strata import OptionError, Strata

__all__ = ["OptionError", "RoutingStats", "Strata", "StratifiedMoE"]
