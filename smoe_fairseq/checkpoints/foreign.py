"""``smoe import``: models of fairseq's MoE branch, of the SMoE paper's code and of transformers."""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from smoe_fairseq.checkpoints.io import open_checkpoint, rank_file, rank_files, rank_of, set_name
from smoe_fairseq.checkpoints.model import (
    NORM_OPTION,
    SIDES,
    check_fit,
    check_pre_norm,
    of_experts,
    saved_options,
    target_model,
    with_model_options,
)
from smoe_fairseq.checkpoints.sets import OPTIMIZER, UNSET, check_tensors
from smoe_fairseq.errors import UsageError
from smoe_fairseq.models.options import SMoETransformerConfig, flag
from smoe_fairseq.modules.strata import Strata

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


def renamed(path: Path, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same under our names, the experts of each layer together.

    Raises:
        UsageError: a layer lacks experts that its gate sees.
    """
    layers = gate_sizes(weights)
    made, experts = {}, {}
    for name, tensor in weights.items():
        if match := EXPERT.fullmatch(name):
            own = f"{match[1]}.moe.experts.{_PARTS[match[3]]}"
            experts.setdefault(own, {})[int(match[2])] = tensor
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
                f"{path}: {layer} has {expected} experts, and the files {len(each)}; expected all of the set"
            )
        if len({tensor.shape for tensor in each.values()}) > 1:
            raise UsageError(f"{path}: the experts of {layer} are of several sizes; expected one")
        made[name] = torch.stack([each[e] for e in range(expected)])
    return made


# Options of another code's MoE model as ours, so that both compute the same.

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
                f"{path} was trained with {flag(name)} {values[name]}; expected a model without it"
            )
    known = SMoETransformerConfig.select(values)
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
    if any(
        map(_LATER_NORM.fullmatch, weights)
    ):  # of the paper's code, which normalises after each stratum
        options[NORM_OPTION] = "released"
    layers = gate_sizes(weights)
    if not layers:
        raise UsageError(
            f"{path} has no moe_layer.gate: expected one of fairseq's MoE branch or the SMoE paper's code"
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
            f"{path}: the {side}'s MoE layers are {numbers}, from 0; expected every N-th layer"
        )
    if not numbers:
        return {f"{side}_moe_freq": 0}
    strata = [found[number] for number in numbers]
    shown = strata[0] if len(set(strata)) == 1 else ",".join(strata)
    return {f"{side}_moe_freq": freq, f"{side}_smoe_strata": shown}


# Files of fairseq's branch for mixtures of experts: what is shared in one, experts in one per
# process.
#
# ``checkpoint_last-shared.pt`` has the weights that all processes have, ``checkpoint_last-
# rank-N.pt`` the experts of process N, which each file counts from 0.

_SHARED = "-shared"


def files_of(path: Path) -> list[Path]:
    """The shared file and those of the ranks, in order; a single file where it is no set.

    Args:
        path: any file of the set, or its name without ``-shared`` and ``-rank-N``.

    Raises:
        UsageError: a file of the set is missing.
    """
    name = set_name(path)
    if name.stem.endswith(_SHARED):
        name = name.with_name(name.stem.removesuffix(_SHARED) + name.suffix)
    shared = name.with_name(f"{name.stem}{_SHARED}{name.suffix}")
    ranks = rank_files(name)
    if not shared.exists() and not ranks:
        return [path]
    for file in (shared, *(rank_file(name, rank) for rank in range(len(ranks) or 1))):
        if not file.exists():
            raise UsageError(f"{file} is missing: expected {shared.name} and all -rank-N files")
    return [shared, *ranks.values()]


def read_set(path: Path) -> dict:
    """The content of the shared file, with all experts in its model, numbered over all files.

    Raises:
        UsageError: a file is missing or damaged, or holds something else.
    """
    shared, *ranks = files_of(path)
    state = {**open_checkpoint(shared)}
    check_tensors(shared, state["model"])
    weights = dict(state["model"])
    for file in ranks:
        own = open_checkpoint(file)["model"]
        check_tensors(file, own)
        weights |= _numbered(file, own, weights)
    state["model"] = weights
    return state


def _numbered(file: Path, own: dict[str, Tensor], shared: dict) -> dict[str, Tensor]:
    """The experts of a file by their numbers in the whole; of what is shared it may have a copy."""
    found = {}
    for name, tensor in own.items():
        if match := EXPERT.fullmatch(name):
            found[name] = int(match[2]), match[1], match[3], tensor
        elif name not in shared:
            raise UsageError(f"{file} has {name}, which is no expert's and not in the shared file")
    local = 1 + max((number for number, *_ in found.values()), default=-1)
    first = rank_of(file) * local
    return {
        f"{layer}.moe_layer.experts.{first + number}.{part}": tensor
        for number, layer, part, tensor in found.values()
    }


# MoE checkpoints of other codes as ours: of fairseq's MoE branch (NLLB-200) and of the SMoE
# paper's.

_CRITERION = "smoe_label_smoothed_cross_entropy"
# What fairseq reads in any checkpoint, and files for others to use may have left out.
EXPECTED = {
    "optimizer_history": [{"num_updates": 0, "lr_scheduler_state": {}}],
    "extra_state": {"train_iterator": {"epoch": 1}},
}


def import_moe(path: Path) -> dict:
    """The content of a checkpoint of ``smoe_transformer``, without optimizer state.

    Args:
        path: a single file, or any file of a set, see `files_of`.

    Raises:
        UsageError: a file is missing or damaged, or the model is none of ours.
    """
    state = read_set(path)
    options = foreign_options(path, state, state["model"])
    weights = renamed(path, state["model"])
    check_pre_norm(path, SMoETransformerConfig(**options))
    state["model"] = fitted(path, options, weights)
    state.pop(OPTIMIZER, None)
    for part, value in EXPECTED.items():
        state[part] = state.get(part) or value
    state = with_model_options(state, options)
    if isinstance(criterion := (state.get("cfg") or {}).get("criterion"), Mapping):
        smoothing = criterion.get("label_smoothing", 0.0)
        state["cfg"]["criterion"] = {"_name": _CRITERION, "label_smoothing": smoothing}
    return state


def fitted(path: Path, options: dict, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights under exactly the names that a model of these options has."""
    model = target_model(path, options, weights)
    weights = {f"{side}.version": torch.full((1,), 3.0) for side in SIDES} | weights
    weights.setdefault("decoder.output_projection.weight", weights["decoder.embed_tokens.weight"])
    model.upgrade_state_dict(weights)
    target = model.state_dict()
    for name in target:
        if name.endswith(UNSET):
            weights[name] = torch.zeros(1)
    check_fit(path, weights, target)
    return {name: weights[name] for name in target}
