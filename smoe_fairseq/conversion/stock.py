"""A dense model of ours as fairseq's own ``transformer``, which fairseq runs alone and other tools know."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from fairseq.models import ARCH_CONFIG_REGISTRY

from smoe_fairseq.checkpoint.average import check_plain, weights_of
from smoe_fairseq.conversion.model_settings import STOCK, model_values, transformer_options
from smoe_fairseq.system.errors import UsageError

_CRITERION = "label_smoothed_cross_entropy"


def as_stock(path: Path) -> dict:
    """The content of a checkpoint of ``transformer``, without optimizer state.

    Args:
        path: a checkpoint of a dense ``smoe_transformer``, pre-norm or post-norm.

    Raises:
        UsageError: it is another model, has experts, or cannot be read.
    """
    state = weights_of(path)
    check_plain(path, state["model"])
    if model_values(path, state)[0] == STOCK:
        raise UsageError(f"{path} holds fairseq's transformer already; expected a smoe_transformer")
    if not state.get("cfg"):
        raise UsageError(
            f"{path} has no cfg, in which fairseq 0.12.2 keeps all options; expected one"
        )
    if any(".moe." in name for name in state["model"]):
        raise UsageError(
            f"{path} has experts, for which fairseq's transformer has no place; expected a dense model "
            "(--moe-freq 0), or --to safetensors"
        )
    model = Namespace(**transformer_options(path, state), arch=STOCK, _name=STOCK)
    ARCH_CONFIG_REGISTRY[STOCK](model)
    state["cfg"] = _plain_config(state, model)
    state["args"] = None
    for entry in state.get("optimizer_history", []):
        entry["criterion_name"] = LabelSmoothedCrossEntropyCriterion.__name__
    return state


def _plain_config(state: Mapping, model: Namespace) -> dict:
    """All parts of the config; nothing in them asks for the plugin."""
    cfg = {name: _without_plugin(part) for name, part in state["cfg"].items()}
    known = {f.name for f in fields(LabelSmoothedCrossEntropyCriterionConfig)}
    criterion = cfg.get("criterion") or {}
    values = criterion if isinstance(criterion, Mapping) else vars(criterion)
    criterion = {name: value for name, value in values.items() if name in known}
    return {**cfg, "model": model, "criterion": {**criterion, "_name": _CRITERION}}


def _without_plugin(part):
    """A task of before hydra has the whole command line in it."""
    values = vars(part) if isinstance(part, Namespace) else part
    if not isinstance(values, Mapping):
        return part
    named = {"user_dir": None, "arch": STOCK, "criterion": _CRITERION}
    values = {
        name: named.get(name, value)
        for name, value in values.items()
        if not name.startswith(("moe_", "smoe_", "cmr_", "encoder_moe", "decoder_moe"))
    }
    return Namespace(**values) if isinstance(part, Namespace) else values
