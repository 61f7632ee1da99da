"""The building blocks: strata, gate, dispatcher, experts, and the block that composes them."""

from smoe_fairseq.modules.smoe import RoutingStats, StratifiedMoE
from smoe_fairseq.modules.strata import Strata

__all__ = ["RoutingStats", "StratifiedMoE", "Strata"]

# Loading fairseq registers our models, which import from here: so it comes when all is in place.
# isort: split
import fairseq  # noqa: E402, F401
