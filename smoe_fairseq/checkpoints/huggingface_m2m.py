"""``smoe import`` of transformers' M2M-100, NLLB-200 (the same class) and NLLB-MoE: options and weights.

These are pre-norm transformers with sinusoidal positions, which fairseq trained.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from fairseq.utils import get_available_activation_fns
from torch import Tensor

from smoe_fairseq.checkpoints.foreign import with_our_names
from smoe_fairseq.checkpoints.huggingface_m2m_text import text  # noqa: F401
from smoe_fairseq.checkpoints.model import SIDES
from smoe_fairseq.errors import UsageError
from smoe_fairseq.forms import Number

DENSE, SPARSE = KINDS = ("m2m_100", "nllb-moe")
_RATE, _COUNT = Number(0, 1), Number(0, 1_000_000, whole=True)
_CONFIG = {
    **{name: _COUNT for name in ("d_model", "max_position_embeddings")},
    **{f"{s}_{n}": _COUNT for s in SIDES for n in ("ffn_dim", "layers", "attention_heads")},
    **{f"{name}?": _RATE for name in ("dropout", "attention_dropout", "activation_dropout")},
    **{f"{side}_layerdrop?": _RATE for side in SIDES},
    **{f"{name}?": bool for name in ("tie_word_embeddings", "scale_embedding")},
    "activation_function?": {*get_available_activation_fns()},
    "decoder_start_token_id?": (None, Number(2, 2, whole=True)),  # as of fairseq
}
FORM = {
    DENSE: _CONFIG,
    SPARSE: _CONFIG
    | {"num_experts": _COUNT, **{f"{side}_sparse_step": _COUNT for side in SIDES}}
    | {"moe_token_dropout?": _RATE, "second_expert_policy?": str, "router_bias?": (None, bool)},
}
OF_SIDE = {  # our options by theirs
    "embed_dim": "d_model",
    "ffn_embed_dim": "{side}_ffn_dim",
    "layers": "{side}_layers",
    "attention_heads": "{side}_attention_heads",
}
_NAMES = (
    (r"^model\.", ""),
    (r"\.cross_attention(?=[._])", ".encoder_attn"),
    (r"\.ff_layer_norm\.", ".final_layer_norm."),
    (r"\.ffn\.(fc[12])\.", r".\1."),
    (r"(.+)\.ffn\.router\.classifier\.weight", r"\1.moe_layer.gate.wg.weight"),
    (r"\.ffn\.experts\.expert_(\d+)\.", r".moe_layer.experts.\1."),
)
_POSITIONS = "embed_positions.weights"  # sinusoids, which old files contain


def model(
    folder: Path, config: Mapping, weights: Mapping[str, Tensor]
) -> tuple[dict, dict[str, Tensor]]:
    """Our options, and the weights under our names.

    A capacity limit in evaluation (``moe_eval_capacity_token_fraction`` below 1) is not converted.

    Raises:
        UsageError: the model has an option that ours lacks, or lacks experts.
    """
    if config.get("router_bias"):
        raise UsageError(f"{folder / 'config.json'}: router_bias is not supported; expected false")
    named = {}
    for name, tensor in weights.items():
        for pattern, ours in _NAMES:
            name = re.sub(pattern, ours, name)
        if not name.endswith(_POSITIONS):
            named[name] = tensor
    shared, projection = named.pop("shared.weight", None), named.pop("lm_head.weight", None)
    tied = config.get("tie_word_embeddings", True)
    if shared is not None:
        names = [f"{side}.embed_tokens.weight" for side in SIDES]
        copies = {"lm_head.weight": projection, **{name: named.get(name) for name in names}}
        for name, copy in copies.items() if tied else ():
            if copy is not None and not torch.equal(copy, shared):
                expected = "expected the same, or tie_word_embeddings false"
                raise UsageError(f"{folder}: {name} differs from shared.weight; {expected}")
        for name in names:
            named.setdefault(name, shared)
    embedding = named.get("decoder.embed_tokens.weight")
    projection = embedding if tied or projection is None else projection
    named["decoder.output_projection.weight"] = projection
    options = _options(config) | (_moe_options(config) if "num_experts" in config else {})
    return options, with_our_names(folder, named)


def _options(config: Mapping) -> dict:
    options = {
        f"max_{end}_positions": config["max_position_embeddings"] for end in ("source", "target")
    }
    for side in SIDES:
        options |= {
            f"{side}_{ours}": config[theirs.format(side=side)] for ours, theirs in OF_SIDE.items()
        }
        options |= {f"{side}_normalize_before": True, f"{side}_moe_freq": 0}
        options[f"{side}_layerdrop"] = config.get(f"{side}_layerdrop", 0.0)
    return options | {
        "moe_freq": 0,
        "activation_fn": config.get("activation_function", "relu"),
        "dropout": config.get("dropout", 0.1),
        "attention_dropout": config.get("attention_dropout", 0.1),
        "activation_dropout": config.get("activation_dropout", 0.0),
        "no_scale_embedding": not config.get("scale_embedding", True),
        "share_all_embeddings": bool(config.get("tie_word_embeddings", True)),
    }


def _moe_options(config: Mapping) -> dict:
    before = config.get("normalize_router_prob_before_dropping", False)
    return {
        **{f"{side}_moe_freq": config[f"{side}_sparse_step"] for side in SIDES},
        "smoe_strata": str(config["num_experts"]),
        "moe_top_k": 2,
        "moe_gate_normalization": "before-drop" if before else "after-drop",
        "moe_drop_order": "score" if config.get("batch_prioritized_routing") else "sentence",
        "moe_second_expert_policy": config.get("second_expert_policy", "all"),
        "moe_eom": config.get("moe_token_dropout", 0.2),
    }
