"""The other models: language model, multilingual transformer, and the sizes of all."""

from argparse import Namespace
from collections import OrderedDict
from functools import partial

from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    FairseqLanguageModel,
    register_model,
    register_model_architecture,
)
from fairseq.models.multilingual_transformer import MultilingualTransformerModel
from fairseq.models.transformer import Embedding
from omegaconf import OmegaConf, open_dict

from smoe_fairseq.compat.replacing import replaces
from smoe_fairseq.errors import UsageError
from smoe_fairseq.models.checks import language_modeling_faults, language_pair_faults
from smoe_fairseq.models.options import (
    SMoEMultilingualTransformerConfig,
    SMoETransformerConfig,
    SMoETransformerLMConfig,
)
from smoe_fairseq.models.transformer import (
    SMoETransformerDecoder,
    SMoETransformerEncoder,
    SparseModel,
    freeze,
    with_experts,
)
from smoe_fairseq.translate.directions import task_name
from smoe_fairseq.translate.load import TrainedModel


@register_model("smoe_transformer_lm", dataclass=SMoETransformerLMConfig)
class SMoETransformerLanguageModel(SparseModel, FairseqLanguageModel):
    """fairseq's ``transformer_lm`` with MoE layers, for its task ``language_modeling``.

    The extra output contains the `RoutingStats` of all MoE layers as "moe_stats", and their names as
    "moe_layers".
    """

    config_class = SMoETransformerLMConfig
    faults = staticmethod(language_modeling_faults)

    @classmethod
    def of_config(cls, config, task):
        words = task.source_dictionary
        transformer = with_experts(config, words, words)
        embed_tokens = Embedding(len(words), transformer.decoder.embed_dim, words.pad())
        decoder = SMoETransformerDecoder(
            transformer, task.target_dictionary, embed_tokens, no_encoder_attn=True
        )
        return cls(decoder)

    @classmethod
    def from_pretrained(cls, run, checkpoint_file=None, data_name_or_path=None, **overrides):
        """Load a trained language model that continues and scores text.

        The arguments are those of `SMoETransformerModel.from_pretrained`.

        Returns:
            A `TrainedModel`, in evaluation mode, on the CPU: ``.sample(["..."], sampling=True)``,
            ``.score(["..."])``.

        Raises:
            UsageError: a file is missing, damaged, or does not fit the others.
        """

        def check(saved, *_) -> None:
            if task_name(saved.task) != "language_modeling":
                raise UsageError(
                    f"{run} is no language model: expected SMoETransformerModel.from_pretrained"
                )

        return TrainedModel.of_run(run, checkpoint_file, data_name_or_path, check, **overrides)


# Without a dataclass, since the task reads its options from the model's.
@register_model("smoe_multilingual_transformer")
class SMoEMultilingualTransformerModel(SparseModel, MultilingualTransformerModel):
    """fairseq's ``multilingual_transformer`` with MoE layers, for ``multilingual_translation``.

    ``models`` contains, for each language pair, an encoder of the source language and a decoder of the target
    language, with the layers of `SMoETransformerModel`. Flags such as ``--share-encoders`` decide what
    languages share.
    """

    config_class = SMoEMultilingualTransformerConfig
    faults = staticmethod(language_pair_faults)

    @classmethod
    def of_config(cls, config, task):
        """Let fairseq decide what is shared; it calls `_get_module_class` for the parts."""
        args = Namespace(**vars(config), config=config)
        args.encoder_embed_path = args.decoder_embed_path = None
        pairs = super(SparseModel, cls).build_model(args, task).models
        encoders, decoders = (
            OrderedDict((pair, getattr(model, side)) for pair, model in pairs.items())
            for side in config.SIDES
        )
        return freeze(cls(encoders, decoders), config.frozen)

    @classmethod
    def _get_module_class(cls, is_encoder, args, lang_dict, embed_tokens, langs):
        transformer = with_experts(args.config, lang_dict, lang_dict)
        transformer.share_decoder_input_output_embed = args.share_decoder_input_output_embed
        part = SMoETransformerEncoder if is_encoder else SMoETransformerDecoder
        return part(transformer, lang_dict, embed_tokens)

    def load_state_dict(self, state_dict, strict=True, model_cfg=None, args=None):
        """Load this model's pairs from a checkpoint that may have more, since translation needs only one."""
        pairs = tuple(f"models.{pair}." for pair in self.keys)
        own = {name: value for name, value in state_dict.items() if name.startswith(pairs)}
        return super().load_state_dict(own, strict, model_cfg, args)


# The sizes of the registered architectures.

_OPTIONS = ("embed_dim", "ffn_embed_dim", "attention_heads", "layers")
_SIZES = {
    "base": (512, 2048, 8, 6),  # the paper's M4 model
    "big": (1024, 4096, 16, 6),  # the paper's M15 and OPUS-100 model
    "tiny": (128, 256, 4, 2),  # for a laptop and for tests
}


def _set_sizes(sides: tuple[str, ...], sizes: tuple[int, ...], args: Namespace) -> None:
    """Set the sizes that no flag has set; a decoder is as wide as its encoder."""
    for side in sides:
        for option, size in zip(_OPTIONS, sizes, strict=True):
            if getattr(args, f"{side}_{option}", None) is None:
                follows = side != sides[0] and option != "layers"
                value = getattr(args, f"{sides[0]}_{option}") if follows else size
                setattr(args, f"{side}_{option}", value)


for _model, _config in {
    "smoe_transformer": SMoETransformerConfig,
    "smoe_multilingual_transformer": SMoEMultilingualTransformerConfig,
    "smoe_transformer_lm": SMoETransformerLMConfig,
}.items():
    for _name, _sizes in _SIZES.items():
        _architecture = partial(_set_sizes, _config.SIDES, _sizes)
        register_model_architecture(_model, f"{_model}_{_name}")(_architecture)
    # fairseq registers a model's own name as an architecture that sets nothing.
    ARCH_CONFIG_REGISTRY[_model] = ARCH_CONFIG_REGISTRY[f"{_model}_base"]


@replaces("fairseq_cli.hydra_train:add_defaults")  # after the first job of a --multirun
@replaces("fairseq_cli.train:add_defaults")
def set_sizes_of_architecture(add_defaults, cfg) -> None:
    """In a config of fairseq-hydra-train, which would get the sizes of the model, that is ``..._base``."""
    name = getattr(cfg.model, "_name", None)
    known = name in ARCH_CONFIG_REGISTRY and name.startswith("smoe_")
    if known and OmegaConf.is_config(cfg.model):
        with open_dict(cfg.model):
            ARCH_CONFIG_REGISTRY[name](cfg.model)
    add_defaults(cfg)
