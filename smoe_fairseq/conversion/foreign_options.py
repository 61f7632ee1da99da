"""Options of another code's MoE model as ours, so that both compute the same."""

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from smoe_fairseq.conversion.foreign_names import gate_sizes, is_of_paper
from smoe_fairseq.conversion.model_settings import NORM_OPTION, SIDES, of_experts, saved_options
from smoe_fairseq.models.config import SMoETransformerConfig, flag
from smoe_fairseq.modules.strata import Strata
from smoe_fairseq.system.errors import UsageError

_SAME_NAME = ("moe_eom", "moe_fom", "moe_second_expert_policy")
# With another forward pass, which ours has not got.
_WITHOUT_PLACE = ("moe_cmr", "alternate_ffn_embed_dim", "alternate_decoder_ffn_embed_dim")


def foreign_options(path: Path, state: Mapping, weights: Mapping[str, Tensor]) -> dict:
    """Options of `SMoETransformerConfig`.

    What the other code does to an expert that too many want is not taken over in evaluation, where nothing
    is dropped here.

    Raises:
        UsageError: the model has options that ours has not got, or MoE layers at no even distance.
    """
    values = saved_options(path, state)
    for name in _WITHOUT_PLACE:
        if values.get(name):
            raise UsageError(
                f"{path} was trained with {flag(name)} {values[name]}, which is not taken over; expected a "
                "model without it"
            )
    known = SMoETransformerConfig.among(values)
    options = {name: value for name, value in known.items() if not of_experts(name)}
    options |= {name: values[name] for name in _SAME_NAME if values.get(name) is not None}
    top_1, before = (
        values.get(name) for name in ("moe_top1_expert", "moe_normalize_gate_prob_before_dropping")
    )
    options |= {
        "moe_top_k": 1 if top_1 else 2,
        "moe_gate_normalization": "before-drop" if before else "after-drop",
        "moe_drop_order": "score" if values.get("moe_batch_prioritized_routing") else "sentence",
    }
    if is_of_paper(weights):
        options[NORM_OPTION] = "released"
    layers = gate_sizes(weights)
    if not layers:
        raise UsageError(
            f"{path} has no gate (encoder.layers.N.moe_layer.gate.wg.weight): expected a checkpoint of "
            "fairseq's MoE branch or of the SMoE paper's code"
        )
    for side in SIDES:
        options |= _places(path, side, layers)
    return options


def _places(path: Path, side: str, layers: Mapping[str, list[int]]) -> dict:
    """Which layers of a side have experts, and how many in which stratum."""
    found = {}
    for layer, visible in layers.items():
        if match := re.fullmatch(rf"{side}\.layers\.(\d+)", layer):
            sizes = [here - later for here, later in zip(visible, [*visible[1:], 0], strict=True)]
            found[int(match[1])] = str(Strata(tuple(sizes)))
    numbers = sorted(found)
    freq = numbers[0] + 1 if numbers else 0
    if numbers != [freq * (i + 1) - 1 for i in range(len(numbers))]:
        raise UsageError(
            f"{path}: the {side}'s MoE layers are {', '.join(map(str, numbers))}, counted from 0; expected "
            "every N-th layer"
        )
    if not numbers:
        return {f"{side}_moe_freq": 0}
    strata = [found[number] for number in numbers]
    shown = strata[0] if len(set(strata)) == 1 else ",".join(strata)
    return {f"{side}_moe_freq": freq, f"{side}_smoe_strata": shown}
