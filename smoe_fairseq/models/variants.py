"""The other models: language model, multilingual transformer, and the sizes of all."""

from argparse import Namespace
from collections import OrderedDict

from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    FairseqLanguageModel,
    register_model,
    register_model_architecture,
)
from fairseq.models.multilingual_transformer import MultilingualTransformerModel
from fairseq.models.transformer import Embedding

from smoe_fairseq.models.checks import check_language_modeling, check_language_pairs
from smoe_fairseq.models.hub import TrainedModel
from smoe_fairseq.models.options import (
    SMoEMultilingualTransformerConfig,
    SMoETransformerLMConfig,
)
from smoe_fairseq.models.transformer import (
    SMoETransformerDecoder,
    SMoETransformerEncoder,
    SparseModel,
    with_experts,
)


@register_model("smoe_transformer_lm", dataclass=SMoETransformerLMConfig)
class SMoETransformerLanguageModel(SparseModel, FairseqLanguageModel):
    """fairseq's ``transformer_lm`` with MoE layers, for its task ``language_modeling``.

    The extra output has the `RoutingStats` of all MoE layers under "moe_stats", and their names under
    "moe_layers".
    """

    config_class = SMoETransformerLMConfig

    @classmethod
    def build_model(cls, cfg, task):
        return cls.built(cfg, task, cls._of_decoder, check_language_modeling)

    @classmethod
    def _of_decoder(cls, config, task):
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
        return TrainedModel.of_run(run, checkpoint_file, data_name_or_path, **overrides)


# Without a dataclass, since the task reads its own options from the model's.
@register_model("smoe_multilingual_transformer")
class SMoEMultilingualTransformerModel(SparseModel, MultilingualTransformerModel):
    """fairseq's ``multilingual_transformer`` with MoE layers, for ``multilingual_translation``.

    ``models`` has, for each language pair, an encoder of the source language and a decoder of the target
    language, with the layers of `SMoETransformerModel`. Flags such as ``--share-encoders`` say what
    languages share.
    """

    config_class = SMoEMultilingualTransformerConfig

    @classmethod
    def build_model(cls, cfg, task):
        return cls.built(cfg, task, cls._of_pairs, check_language_pairs)

    @classmethod
    def _of_pairs(cls, config, task):
        """Let fairseq decide what is shared; it calls `_get_module_class` for the parts."""
        args = Namespace(**vars(config), config=config)
        args.encoder_embed_path = args.decoder_embed_path = None
        pairs = super().build_model(args, task).models
        encoders, decoders = (
            OrderedDict((pair, getattr(model, side)) for pair, model in pairs.items())
            for side in config.SIDES
        )
        return cls(encoders, decoders)

    @classmethod
    def _get_module_class(cls, is_encoder, args, lang_dict, embed_tokens, langs):
        transformer = with_experts(args.config, lang_dict, lang_dict)
        transformer.share_decoder_input_output_embed = args.share_decoder_input_output_embed
        part = SMoETransformerEncoder if is_encoder else SMoETransformerDecoder
        return part(transformer, lang_dict, embed_tokens)

    def load_state_dict(self, state_dict, strict=True, model_cfg=None, args=None):
        """Load this model's pairs from a checkpoint that may have more; to translate, one is enough."""
        pairs = tuple(f"models.{pair}." for pair in self.keys)
        own = {name: value for name, value in state_dict.items() if name.startswith(pairs)}
        return super().load_state_dict(own, strict, model_cfg, args)


# The sizes of the registered architectures.


def _defaults(args: Namespace, **values) -> None:
    """Set options that no flag has set."""
    for name, value in values.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)


@register_model_architecture("smoe_transformer", "smoe_transformer_base")
def smoe_transformer_base(args):
    """512/2048/8 heads, 6 + 6 layers: the paper's M4 model."""
    _defaults(
        args,
        encoder_embed_dim=512,
        encoder_ffn_embed_dim=2048,
        encoder_attention_heads=8,
        encoder_layers=6,
        decoder_layers=6,
    )
    _defaults(
        args,
        decoder_embed_dim=args.encoder_embed_dim,
        decoder_ffn_embed_dim=args.encoder_ffn_embed_dim,
        decoder_attention_heads=args.encoder_attention_heads,
    )


@register_model_architecture("smoe_transformer", "smoe_transformer_big")
def smoe_transformer_big(args):
    """1024/4096/16 heads, 6 + 6 layers: the paper's M15 and OPUS-100 model."""
    _defaults(args, encoder_embed_dim=1024, encoder_ffn_embed_dim=4096, encoder_attention_heads=16)
    smoe_transformer_base(args)


@register_model_architecture("smoe_transformer", "smoe_transformer_tiny")
def smoe_transformer_tiny(args):
    """128/256/4 heads, 2 + 2 layers: for a laptop and for tests."""
    _defaults(
        args,
        encoder_embed_dim=128,
        encoder_ffn_embed_dim=256,
        encoder_attention_heads=4,
        encoder_layers=2,
        decoder_layers=2,
    )
    smoe_transformer_base(args)


for name, sizes in {
    "base": smoe_transformer_base,
    "big": smoe_transformer_big,
    "tiny": smoe_transformer_tiny,
}.items():
    model = "smoe_multilingual_transformer"
    register_model_architecture(model, f"{model}_{name}")(sizes)


def _decoder(args, dim: int, ffn: int, heads: int, layers: int) -> None:
    _defaults(args, decoder_embed_dim=dim, decoder_ffn_embed_dim=ffn)
    _defaults(args, decoder_attention_heads=heads, decoder_layers=layers)


@register_model_architecture("smoe_transformer_lm", "smoe_transformer_lm_base")
def smoe_transformer_lm_base(args):
    """512/2048/8 heads, 6 layers: the decoder of ``smoe_transformer_base``."""
    _decoder(args, 512, 2048, heads=8, layers=6)


@register_model_architecture("smoe_transformer_lm", "smoe_transformer_lm_big")
def smoe_transformer_lm_big(args):
    """1024/4096/16 heads, 6 layers."""
    _decoder(args, 1024, 4096, heads=16, layers=6)


@register_model_architecture("smoe_transformer_lm", "smoe_transformer_lm_tiny")
def smoe_transformer_lm_tiny(args):
    """128/256/4 heads, 2 layers: for a laptop and for tests."""
    _decoder(args, 128, 256, heads=4, layers=2)


# fairseq registers a model's own name as an architecture that sets nothing.
ARCH_CONFIG_REGISTRY["smoe_transformer"] = smoe_transformer_base
ARCH_CONFIG_REGISTRY["smoe_multilingual_transformer"] = smoe_transformer_base
ARCH_CONFIG_REGISTRY["smoe_transformer_lm"] = smoe_transformer_lm_base
