"""``smoe import``: models of fairseq's MoE branch, of the SMoE paper's code and of transformers."""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from fairseq import options as fairseq_options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf
from torch import Tensor

from smoe_fairseq.checkpoints.model import (
    LOSS_WEIGHTS,
    NORM_OPTION,
    OURS,
    SIDES,
    check_fit,
    check_pre_norm,
    is_moe_option,
    known_options,
    plain_config,
    refuse_options,
    saved_options,
    target_model,
    with_model_options,
)
from smoe_fairseq.checkpoints.published import published_text
from smoe_fairseq.checkpoints.reading import EXPECTED, Record, open_checkpoint, record_of
from smoe_fairseq.checkpoints.sets import OPTIMIZER, UNSET, check_tensors
from smoe_fairseq.checkpoints.trained_with import DICTIONARIES
from smoe_fairseq.compat.checkpoint_names import rank_file, rank_files, rank_of, set_name
from smoe_fairseq.errors import UsageError
from smoe_fairseq.flags import values_of
from smoe_fairseq.models.options import SMoETransformerConfig
from smoe_fairseq.modules.strata import Strata

EXPERT = re.compile(r"(.+\.layers\.\d+)\.moe_layer\.experts\.(\d+)\.(fc[12]\.(?:weight|bias))")
_GATE = re.compile(r"(.+\.layers\.\d+)\.moe_layer\.gate(?:\.(\d+))?\.wg\.weight")
_FIRST_NORM = re.compile(r"(.+\.layers\.\d+)\.final_layer_norm\.(weight|bias)")
_LATER_NORM = re.compile(r"(.+\.layers\.\d+)\.hmoe_layernorms\.(\d+)\.(weight|bias)")
_PARTS = {"fc1.weight": "w1", "fc1.bias": "b1", "fc2.weight": "w2", "fc2.bias": "b2"}


def gate_sizes(weights: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """How many experts each gate sees, by its layer (``encoder.layers.1``)."""
    layers = {}
    for name, tensor in weights.items():
        if match := _GATE.fullmatch(name):
            layers.setdefault(match[1], {})[int(match[2] or 0)] = len(tensor)
    return {layer: [sizes[i] for i in sorted(sizes)] for layer, sizes in layers.items()}


def with_our_names(path: Path, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights under our names, with the experts of each layer stacked.

    Raises:
        UsageError: a layer lacks experts that its gate sees.
    """
    layers = gate_sizes(weights)
    result, experts = {}, {}
    for name, tensor in weights.items():
        if match := EXPERT.fullmatch(name):
            our_name = f"{match[1]}.moe.experts.{_PARTS[match[3]]}"
            experts.setdefault(our_name, {})[int(match[2])] = tensor
        elif match := _GATE.fullmatch(name):
            result[f"{match[1]}.moe.gates.{match[2] or 0}.weight"] = tensor
        elif (match := _FIRST_NORM.fullmatch(name)) and match[1] in layers:
            result[f"{match[1]}.moe.layer_norms.0.{match[2]}"] = tensor
        elif match := _LATER_NORM.fullmatch(name):
            result[f"{match[1]}.moe.layer_norms.{int(match[2]) + 1}.{match[3]}"] = tensor
        else:
            result[name] = tensor
    for name, tensors in experts.items():
        layer = name.partition(".moe.")[0]
        expected = layers.get(layer, [0])[0]
        if sorted(tensors) != list(range(expected)):
            raise UsageError(
                f"{path}: {layer} has {expected} experts, and the files {len(tensors)}; expected all of the "
                "set"
            )
        if len({tensor.shape for tensor in tensors.values()}) > 1:
            raise UsageError(f"{path}: the experts of {layer} have several sizes; expected one")
        result[name] = torch.stack([tensors[e] for e in range(expected)])
    return result


# Options of another codebase's MoE model as ours, so that both compute the same.

_SAME_NAME = ("moe_eom", "moe_fom", "moe_second_expert_policy")
# These change the forward pass in ways that our model does not support.
_UNSUPPORTED = ("moe_cmr", "alternate_ffn_embed_dim", "alternate_decoder_ffn_embed_dim")


def foreign_options(path: Path, state: Mapping, weights: Mapping[str, Tensor]) -> dict:
    """Options of `SMoETransformerConfig`, without capacity limits in evaluation.

    Raises:
        UsageError: the model has unsupported options, or its MoE layers are not every N-th layer.
    """
    values = saved_options(path, state)
    refuse_options(path, values, _UNSUPPORTED)
    known = SMoETransformerConfig.select(values)
    options = {name: value for name, value in known.items() if not is_moe_option(name)}
    options |= {name: values[name] for name in _SAME_NAME if values.get(name) is not None}
    top_1, before = (
        values.get(name) for name in ("moe_top1_expert", "moe_normalize_gate_prob_before_dropping")
    )
    options |= {
        "moe_top_k": 1 if top_1 else 2,
        "moe_gate_normalization": "before-drop" if before else "after-drop",
        "moe_drop_order": "score" if values.get("moe_batch_prioritized_routing") else "sentence",
    }
    if any(map(_LATER_NORM.fullmatch, weights)):  # the paper's code normalises after each stratum
        options[NORM_OPTION] = "released"
    layers = gate_sizes(weights)
    if not layers:
        raise UsageError(
            f"{path} has no moe_layer.gate: expected one of fairseq's MoE branch or the SMoE paper's code, "
            "or a dense M2M-100 or NLLB-200 beside its dictionary"
        )
    for side in SIDES:
        options |= _strata_options(path, side, layers)
    return options


def _strata_options(path: Path, side: str, layers: Mapping[str, list[int]]) -> dict:
    """The options for which layers of a side have experts, and how many in which stratum."""
    by_layer = {}
    for layer, visible in layers.items():
        if match := re.fullmatch(rf"{side}\.layers\.(\d+)", layer):
            sizes = [seen - later for seen, later in zip(visible, [*visible[1:], 0], strict=True)]
            by_layer[int(match[1])] = str(Strata(tuple(sizes)))
    numbers = sorted(by_layer)
    freq = numbers[0] + 1 if numbers else 0
    if numbers != [freq * (i + 1) - 1 for i in range(len(numbers))]:
        raise UsageError(
            f"{path}: the {side}'s MoE layers are {numbers}, from 0; expected every N-th layer"
        )
    if not numbers:
        return {f"{side}_moe_freq": 0}
    strata = [by_layer[number] for number in numbers]
    shown = strata[0] if len(set(strata)) == 1 else ",".join(strata)
    return {f"{side}_moe_freq": freq, f"{side}_smoe_strata": shown}


# Files of fairseq's MoE branch: ``checkpoint_last-shared.pt`` has the weights that all ranks share,
# ``checkpoint_last-rank-N.pt`` the experts of rank N, numbered from 0 in each file.

_SHARED = "-shared"
_OURS = "a checkpoint of this package already"


def files_of(path: Path) -> list[Path]:
    """The shared file and those of the ranks, in order; or the single file if it is not a set.

    Args:
        path: any file of the set, or its name without ``-shared`` and ``-rank-N``.

    Raises:
        UsageError: a file of the set is missing, or it is a set of ours.
    """
    name = set_name(path)
    if name.stem.endswith(_SHARED):
        name = name.with_name(name.stem.removesuffix(_SHARED) + name.suffix)
    shared = name.with_name(f"{name.stem}{_SHARED}{name.suffix}")
    ranks = rank_files(name)
    if not shared.exists() and not ranks:
        return [path]
    if not shared.exists() and record_of(first := next(iter(ranks.values()))):
        raise UsageError(f"{first} is {_OURS}: smoe consolidate joins its set")
    for file in (shared, *(rank_file(name, rank) for rank in range(len(ranks) or 1))):
        if not file.exists():
            raise UsageError(f"{file} is missing: expected {shared.name} and all -rank-N files")
    return [shared, *ranks.values()]


def read_set(path: Path) -> dict:
    """The content of the shared file, with the experts of all files in its model, numbered consecutively.

    Raises:
        UsageError: a file is missing or damaged, or contains other tensors, or it is a checkpoint of ours.
    """
    shared, *ranks = files_of(path)
    state = {**open_checkpoint(shared)}
    if Record.of(state, shared):
        raise UsageError(f"{shared} is {_OURS}: it needs no conversion")
    check_tensors(shared, state["model"])
    weights = dict(state["model"])
    for file in ranks:
        model = open_checkpoint(file)["model"]
        check_tensors(file, model)
        weights |= _renumbered(file, model, weights)
    state["model"] = weights
    return state


def _renumbered(file: Path, model: dict[str, Tensor], shared: dict) -> dict[str, Tensor]:
    """The experts of a file with their numbers in the set; copies of shared weights are left out."""
    experts = []
    for name, tensor in model.items():
        if match := EXPERT.fullmatch(name):
            experts.append((int(match[2]), match[1], match[3], tensor))
        elif name not in shared:
            raise UsageError(f"{file} has {name}, which is no expert's and not in the shared file")
    local = 1 + max((number for number, *_ in experts), default=-1)
    first = rank_of(file) * local
    return {
        f"{layer}.moe_layer.experts.{first + number}.{part}": tensor
        for number, layer, part, tensor in experts
    }


# MoE checkpoints of fairseq's MoE branch (NLLB-200) and of the SMoE paper's code as ours.

CRITERION = "smoe_label_smoothed_cross_entropy"


def import_checkpoint(path: Path) -> tuple[dict, dict[str, bytes]]:
    """The content of a checkpoint of ``smoe_transformer``, without optimizer state, and text files.

    The files, by name, are those of a published model that lie beside it; see `published_text`.

    Args:
        path: a single file, or any file of a set, see `files_of`.

    Raises:
        UsageError: a file is missing or damaged, or the model is not supported.
    """
    state = read_set(path)
    text = published_text(path, state, state["model"])
    if text is not None and not gate_sizes(state["model"]):
        options, weights = known_options(path, state), state["model"]
    else:
        options = foreign_options(path, state, state["model"])
        weights = with_our_names(path, state["model"])
    check_pre_norm(path, SMoETransformerConfig(**options))
    criterion = values_of((state.get("cfg") or {}).get("criterion"))
    smoothing = criterion.get("label_smoothing", 0.0)
    if text is not None:
        files, task, checksums = text
        state = new_checkpoint(path, options, {"label_smoothing": smoothing}, weights, task)
        return state | {DICTIONARIES: checksums}, files
    state["model"] = complete(path, options, weights)
    state.pop(OPTIMIZER, None)
    for part, value in EXPECTED.items():
        state[part] = state.get(part) or value
    state = with_model_options(state, options)
    if criterion:
        state["cfg"]["criterion"] = {"_name": CRITERION, "label_smoothing": smoothing}
    return state, {}


def new_checkpoint(
    path: Path, options: dict, config: Mapping, weights: dict[str, Tensor], task: list[str]
) -> dict:
    """The content of a checkpoint, with the settings that ``fairseq-train`` would save.

    Args:
        options: of `SMoETransformerConfig`.
        config: settings of the criterion, as in a config for transformers.
        task: flags.
    """
    if options.get("share_all_embeddings") and "encoder.embed_tokens.weight" in weights:
        weights.setdefault("decoder.embed_tokens.weight", weights["encoder.embed_tokens.weight"])
    flags = ["", *task, "--arch", OURS, "--criterion", CRITERION]
    flags += ["--label-smoothing", str(config.get("label_smoothing") or 0.0)]
    for theirs, ours in LOSS_WEIGHTS.items():
        if (value := config.get(f"router_{theirs}_loss_coef")) is not None:
            flags += [f"--moe-{ours}-loss-wt", str(value)]
    parser = fairseq_options.get_training_parser()
    cfg = convert_namespace_to_omegaconf(fairseq_options.parse_args_and_arch(parser, flags))
    cfg = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    return {
        **EXPECTED,
        "args": None,
        "cfg": {**cfg, "model": plain_config(options)},
        "model": complete(path, options, weights),
    }


def complete(path: Path, options: dict, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a model of these options, from its weights; checks names and shapes."""
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
