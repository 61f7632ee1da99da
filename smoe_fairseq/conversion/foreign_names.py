"""Names of an MoE layer in fairseq's branch for mixtures of experts and in the SMoE paper's code, and ours.

Of layer N on either side:

    theirs                                         ours, moe.
    final_layer_norm                               layer_norms.0
    moe_layer.gate.wg.weight                       gates.0.weight
    moe_layer.gate.I.wg.weight (paper's code)      gates.I.weight
    hmoe_layernorms.I (paper's code)               layer_norms.(I + 1)
    moe_layer.experts.E.fc1.weight, .bias          experts.w1[E], b1[E]
    moe_layer.experts.E.fc2.weight, .bias          experts.w2[E], b2[E]
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from smoe_fairseq.system.errors import UsageError

EXPERT = re.compile(r"(.+\.layers\.\d+)\.moe_layer\.experts\.(\d+)\.(fc[12]\.(?:weight|bias))")
_GATE = re.compile(r"(.+\.layers\.\d+)\.moe_layer\.gate(?:\.(\d+))?\.wg\.weight")
_FIRST_NORM = re.compile(r"(.+\.layers\.\d+)\.final_layer_norm\.(weight|bias)")
_LATER_NORM = re.compile(r"(.+\.layers\.\d+)\.hmoe_layernorms\.(\d+)\.(weight|bias)")
_PARTS = {"fc1.weight": "w1", "fc1.bias": "b1", "fc2.weight": "w2", "fc2.bias": "b2"}


def gate_sizes(weights: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """How many experts each gate sees, by its layer (``encoder.layers.1``)."""
    found = {}
    for name, tensor in weights.items():
        if match := _GATE.fullmatch(name):
            found.setdefault(match[1], {})[int(match[2] or 0)] = len(tensor)
    return {layer: [sizes[i] for i in sorted(sizes)] for layer, sizes in found.items()}


def is_of_paper(weights: Mapping[str, Tensor]) -> bool:
    """Whether the paper's code has written it: a gate for each stratum."""
    return any(match and match[2] for match in map(_GATE.fullmatch, weights))


def renamed(path: Path, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same under our names, the experts of each layer together.

    Raises:
        UsageError: a layer lacks experts that its gate sees.
    """
    layers = gate_sizes(weights)
    made, experts = {}, {}
    for name, tensor in weights.items():
        if match := EXPERT.fullmatch(name):
            experts.setdefault(f"{match[1]}.moe.experts.{_PARTS[match[3]]}", {})[int(match[2])] = (
                tensor
            )
        elif match := _GATE.fullmatch(name):
            made[f"{match[1]}.moe.gates.{match[2] or 0}.weight"] = tensor
        elif (match := _FIRST_NORM.fullmatch(name)) and match[1] in layers:
            made[f"{match[1]}.moe.layer_norms.0.{match[2]}"] = tensor
        elif match := _LATER_NORM.fullmatch(name):
            made[f"{match[1]}.moe.layer_norms.{int(match[2]) + 1}.{match[3]}"] = tensor
        else:
            made[name] = tensor
    for name, each in experts.items():
        layer = name.partition(".moe.")[0]
        expected = layers.get(layer, [0])[0]
        if sorted(each) != list(range(expected)):
            raise UsageError(
                f"{path}: the gate of {layer} sees {expected} experts, and the files have {len(each)}; "
                "expected all -rank-N files of the set"
            )
        if len({tensor.shape for tensor in each.values()}) > 1:
            raise UsageError(f"{path}: the experts of {layer} are of several sizes; expected one")
        made[name] = torch.stack([each[e] for e in range(expected)])
    return made
