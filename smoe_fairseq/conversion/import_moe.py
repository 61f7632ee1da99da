"""MoE checkpoints of other codes as ours: of fairseq's MoE branch (NLLB-200) and of the SMoE paper's."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from smoe_fairseq.checkpoint.average import OPTIMIZER
from smoe_fairseq.conversion.foreign_names import renamed
from smoe_fairseq.conversion.foreign_options import foreign_options
from smoe_fairseq.conversion.foreign_set import read_set
from smoe_fairseq.conversion.model_settings import check_pre_norm
from smoe_fairseq.conversion.target_model import plain_config, target_model
from smoe_fairseq.conversion.written import with_model_options
from smoe_fairseq.models.config import SMoETransformerConfig
from smoe_fairseq.models.transformer_layer import STOCK_LAYER_COPIES
from smoe_fairseq.system.errors import UsageError

_CRITERION = "smoe_label_smoothed_cross_entropy"
# What fairseq reads in any checkpoint, and files for others to use may have left out.
_EXPECTED = {
    "optimizer_history": [{"num_updates": 0, "lr_scheduler_state": {}}],
    "extra_state": {"train_iterator": {"epoch": 1}},
}
# Buffers without meaning, which some versions of fairseq have and some have not.
_BUFFERS = {".version": 3.0, ".embed_positions._float_tensor": 0.0}


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
    target = target_model(path, options, weights).state_dict()
    state["model"] = _fitted(path, weights, target)
    state.pop(OPTIMIZER, None)
    for part, value in _EXPECTED.items():
        state[part] = state.get(part) or value
    state = with_model_options(state, plain_config(options))
    if isinstance(criterion := (state.get("cfg") or {}).get("criterion"), Mapping):
        smoothing = criterion.get("label_smoothing", 0.0)
        state["cfg"]["criterion"] = {"_name": _CRITERION, "label_smoothing": smoothing}
    return state


def _fitted(
    path: Path, weights: dict[str, Tensor], target: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The weights under exactly the names of ``target``."""
    tied = "decoder.output_projection.weight"
    if tied not in weights:  # fairseq fills it in, too
        weights[tied] = weights["decoder.embed_tokens.weight"]
    for name in weights:
        useless = name.endswith((*_BUFFERS, *STOCK_LAYER_COPIES))
        if name not in target and not useless:
            raise UsageError(f"{path} has {name}, for which smoe_transformer has no place")
    made = {}
    for name, like in target.items():
        value = next((value for end, value in _BUFFERS.items() if name.endswith(end)), None)
        if name not in weights and value is None:
            raise UsageError(f"{path} lacks what would be {name} here")
        made[name] = weights[name] if name in weights else torch.full((1,), value)
        if made[name].shape != like.shape:
            raise UsageError(
                f"{path}: what would be {name} here is {tuple(made[name].shape)}, and its options make it "
                f"{tuple(like.shape)}"
            )
    return made
