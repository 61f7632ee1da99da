"""The sizes of the registered architectures: what no flag gives."""

from argparse import Namespace

from fairseq.models import ARCH_CONFIG_REGISTRY, register_model_architecture

import smoe_fairseq.models.smoe_multilingual_transformer
import smoe_fairseq.models.smoe_transformer
import smoe_fairseq.models.smoe_transformer_lm  # noqa: F401  (the models have to be registered first)


def _defaults(args: Namespace, **values) -> None:
    """Fill in what no flag gave."""
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
    # Of every language's encoder and decoder.
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
