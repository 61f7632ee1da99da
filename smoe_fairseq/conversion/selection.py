"""Which experts stay, by how much they are used.

Every gate has to see as many experts as it chooses. A gate sees its own stratum and all later ones, so it is
the last stratum that keeps so many, and all before it may be emptied. Under naive stacking, where a gate sees
its own stratum alone, each keeps so many. Strata stay as many as they are.

Shapes: E experts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from numpy import ndarray
from torch import nn

from smoe_fairseq.modules.gates.base import BaseGate
from smoe_fairseq.modules.gates.top_k import TopKGate
from smoe_fairseq.modules.smoe import StratifiedMoE
from smoe_fairseq.modules.strata import Strata

_ROUNDING = 1e-9  # 0.1 of 10 experts is one, whatever floats make of it


@dataclass(frozen=True)
class Layer:
    """What has to be known of a MoE layer: its strata, `fewest_of` its gates, and `weighs_all` of them."""

    strata: Strata
    fewest: int
    weighs_all: bool = False

    @classmethod
    def of(cls, block: StratifiedMoE) -> "Layer":
        gate = block.gates[0]  # all are of one kind
        return cls(block.strata, fewest_of(gate), weighs_all(gate))

    def required(self, score_E: ndarray) -> set[int]:
        """The experts that stay however little they are used: the best ones of the strata that need some."""
        strata = self.strata
        needy = range(len(strata.sizes)) if strata.stacked else [len(strata.sizes) - 1]
        return {
            expert
            for stratum in needy
            for expert in ranked(
                score_E, [e for e, s in enumerate(strata.stratum_of_expert) if s == stratum]
            )[: self.fewest]
        }

    def after(self, kept: set[int]) -> Strata:
        """The strata of the experts that stay."""
        strata = self.strata
        of_kept = [strata.stratum_of_expert[expert] for expert in kept]
        sizes = tuple(of_kept.count(stratum) for stratum in range(len(strata.sizes)))
        return Strata(sizes, strata.stacked, strata.chain)


def fewest_of(gate: nn.Module) -> int:
    """Experts that a gate has to see: those that it chooses, null ones aside, and one at least."""
    return max(1, gate.top_k - gate.null_experts) if isinstance(gate, TopKGate) else 1


def weighs_all(gate: nn.Module) -> bool:
    """Whether experts that a gate does not choose have a part in its decisions, by the softmax over all.

    They have none where the weights of the chosen ones are divided by their sum.
    """
    if isinstance(gate, TopKGate):
        return gate.normalization == "none" or gate.bias is not None
    return not isinstance(gate, BaseGate)


def ranked(score_E: ndarray, experts: list[int]) -> list[int]:
    """These experts, the best first; of equals that of the lower number."""
    return sorted(experts, key=lambda expert: (-score_E[expert], expert))


def keep_share(
    layers: Mapping[str, Layer], importance: Mapping[str, ndarray], share: float, over_all: bool
) -> dict[str, set[int]]:
    """The most important experts, ``ceil(share E)`` of them and at least those that gates need.

    Args:
        importance: ``(E,)`` of each layer.
        over_all: E is that of all layers together, and so is the ranking; else of each layer by itself.
    """
    if not over_all:
        return {
            name: keep_share({name: layer}, {name: importance[name]}, share, True)[name]
            for name, layer in layers.items()
        }
    kept = {name: layer.required(importance[name]) for name, layer in layers.items()}
    others = [
        (-importance[name][expert], place, expert, name)
        for place, (name, layer) in enumerate(layers.items())
        for expert in range(layer.strata.num_experts)
        if expert not in kept[name]
    ]
    total = sum(layer.strata.num_experts for layer in layers.values())
    room = math.ceil(share * total - _ROUNDING) - sum(map(len, kept.values()))
    for *_, expert, name in sorted(others)[: max(room, 0)]:
        kept[name].add(expert)
    return kept


def keep_loaded(
    layers: Mapping[str, Layer], loads: Mapping[str, ndarray], min_load: float
) -> dict[str, set[int]]:
    """Experts with a load above ``min_load``, and those that gates need.

    Args:
        loads: ``(E,)`` of each layer, see `Use.load`.
    """
    return {
        name: layer.required(loads[name])
        | {expert for expert, load in enumerate(loads[name].tolist()) if load > min_load}
        for name, layer in layers.items()
    }
