"""The model that a conversion aims at, without memory for its weights: its names and shapes."""

from argparse import Namespace
from dataclasses import fields
from pathlib import Path

import torch
from fairseq.data import Dictionary

from smoe_fairseq.models.config import SMoETransformerConfig
from smoe_fairseq.models.smoe_transformer import SMoETransformerModel
from smoe_fairseq.system.errors import UsageError


def target_model(path: Path, options: dict, weights: dict) -> SMoETransformerModel:
    """``smoe_transformer`` of these options on the meta device, with the vocabularies of ``weights``.

    Raises:
        UsageError: the options make no model, or the weights of ``path`` lack their embeddings.
    """

    class Task:
        source_dictionary = _vocabulary(path, weights, "encoder")
        target_dictionary = _vocabulary(path, weights, "decoder")

    with torch.device("meta"):
        return SMoETransformerModel.build_model(Namespace(**options), Task)


def plain_config(options: dict) -> dict:
    """All options of ``smoe_transformer`` as plain data, for the ``cfg`` of a checkpoint."""
    config = SMoETransformerConfig(**options)
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    plain = {n: v if isinstance(v, bool | int | float) else str(v) for n, v in values.items()}
    return plain | {"_name": "smoe_transformer"}


def _vocabulary(path: Path, weights: dict, side: str) -> Dictionary:
    name = f"{side}.embed_tokens.weight"
    if name not in weights or weights[name].dim() != 2:
        raise UsageError(f"{path} lacks {name}: expected a transformer of fairseq")
    dictionary = Dictionary()
    for i in range(len(weights[name]) - len(dictionary)):
        dictionary.add_symbol(str(i))
    return dictionary
