"""Configs of the models for Hugging Face."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from smoe_fairseq.forms import Number
from smoe_fairseq.modules.activation import GATED
from smoe_fairseq.modules.config import MoEConfig

SIDES = ("encoder", "decoder")
# fairseq's activations by name.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "gelu": lambda x: F.gelu(x.float()).type_as(x),
    "gelu_accurate": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "linear": lambda x: x,
    **GATED,
}


class SMoEConfig(PretrainedConfig):
    """Options of ``smoe_transformer`` under their own names, such as ``encoder_layers``; see docs/flags.md.

    Args:
        vocab_size: V, entries of the target dictionary.
        source_vocab_size: entries of the source dictionary; None: V.
        moe_blocks: arguments of the `StratifiedMoE` of each MoE layer by its name
            (``encoder.layers.1.moe``), such as ``{"strata": "4-4"}``; empty: a dense model.
        router_aux_loss_coef, router_z_loss_coef, router_entropy_loss_coef: weights of the gates' balance
            loss, z-loss, and (gate top-p) entropy in ``loss``.
        moe_losses: weights of other terms of ``loss``, by the names of ``@register_loss``.
        plugins: the modules to import before, by parts such as "gate sinkhorn".
        output_router_logits: whether outputs contain the gates' logits.
        label_smoothing: of the cross entropy in ``loss``. The Trainer's ``label_smoothing_factor`` is
            not supported with experts, since the model then gets no labels.
        options: the other options of the model.
    """

    model_type = "smoe_transformer"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "hidden_size": "decoder_embed_dim",
        "d_model": "decoder_embed_dim",
        "num_hidden_layers": "decoder_layers",
        "num_attention_heads": "decoder_attention_heads",
    }

    def __init__(
        self,
        vocab_size: int = 1000,
        source_vocab_size: int | None = None,
        moe_blocks: dict[str, dict] | None = None,
        moe_losses: dict[str, float] | None = None,
        plugins: dict[str, str] | None = None,
        use_cache: bool = True,
        **options,
    ):
        self.vocab_size = vocab_size
        self.source_vocab_size = source_vocab_size or vocab_size
        self.moe_blocks = moe_blocks or {}
        self.moe_losses, self.plugins = moe_losses or {}, plugins or {}
        for side in SIDES:
            for name, default in _SIDE_DEFAULTS.items():
                setattr(self, f"{side}_{name}", options.pop(f"{side}_{name}", default))
        for name, default in _DEFAULTS.items():
            setattr(self, name, options.pop(name, default))
        ids = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
        flags = {"is_encoder_decoder": True, "tie_word_embeddings": True}
        super().__init__(**{**ids, **flags, **options})
        self.use_cache = use_cache

    @classmethod
    def from_dict(cls, config_dict: dict, **given):
        """As of the base class; options of experts that are ``given`` change all of ``moe_blocks``, too."""
        flags = MoEConfig.flags() | {name: name for name in _OF_LAYERS}
        if changed := {name: given[flag] for name, flag in flags.items() if flag in given}:
            blocks = (config_dict.get("moe_blocks") or {}).items()
            of_blocks = {layer: {**options, **changed} for layer, options in blocks}
            config_dict = {**config_dict, "moe_blocks": of_blocks}
        return super().from_dict(config_dict, **given)

    def of(self, side: str, name: str):
        """The option of a side, such as ``encoder_layers``."""
        return getattr(self, f"{side}_{name}")


# Options of all layers, with experts or not.
_OF_LAYERS = ("activation_fn", "dropout", "activation_dropout")
_SIDE_DEFAULTS = {
    "embed_dim": 512,
    "ffn_embed_dim": 2048,
    "layers": 6,
    "attention_heads": 8,
    "normalize_before": True,
    "learned_pos": False,
    "layerdrop": 0.0,
}
_DEFAULTS = {
    "activation_fn": "relu",
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "layernorm_embedding": False,
    "no_scale_embedding": False,
    "no_token_positional_embeddings": False,
    "share_all_embeddings": True,
    "share_decoder_input_output_embed": False,
    "max_source_positions": 1024,
    "max_target_positions": 1024,
    "router_aux_loss_coef": 0.01,
    "router_z_loss_coef": 0.0,
    "router_entropy_loss_coef": 1e-4,
    "output_router_logits": False,
    "label_smoothing": 0.0,
}
FORM = {
    **{name: type(default) for name, default in _DEFAULTS.items()},
    **{f"{side}_{n}": type(value) for side in SIDES for n, value in _SIDE_DEFAULTS.items()},
    **{f"{side}_attention_heads": Number(1, whole=True) for side in SIDES},
    "activation_fn": set(ACTIVATIONS),
    "moe_blocks": {str: {"activation_fn?": set(ACTIVATIONS)}},
    "moe_losses": {str: Number(0)},
    "plugins": {str: str},
}
