"""Options of the SMoE transformers, on the command line and in hydra configs."""

from argparse import SUPPRESS, Action, BooleanOptionalAction, Namespace
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Optional

from fairseq import utils
from fairseq.dataclass import ChoiceEnum
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models.transformer import TransformerConfig
from omegaconf import II, OmegaConf

from smoe_fairseq.models.moe_options import MoEOptions, flag, option

POSITIONS = 1024  # fairseq's default
FORMER_NAMES = {"moe_norms": "smoe_norm"}  # of options, in checkpoints of before
NO_ENCODER = "{}: a language model has no encoder; leave it out"


class _OfEncoder(Action):
    def __call__(self, parser, namespace, values, option_string=None):
        parser.exit(1, f"error: {NO_ENCODER.format(option_string)}\n")


@dataclass
class DecoderOptions(MoEOptions):
    """What all models have. Flat, as fairseq's flags are; the defaults are those of ``..._base``."""

    decoder_embed_dim: int = option(512, "decoder embedding dimension")
    decoder_ffn_embed_dim: int = option(2048, "decoder FFN (and expert) dimension")
    decoder_layers: int = option(6, "number of decoder layers")
    decoder_attention_heads: int = option(8, "number of decoder attention heads")
    decoder_normalize_before: bool = option(True, "pre-norm decoder layers")
    decoder_learned_pos: bool = option(False, "learned positional embeddings in the decoder")
    decoder_layerdrop: float = option(0.0, "LayerDrop probability of the decoder")
    share_decoder_input_output_embed: bool = option(
        False, "share decoder input and output embeddings"
    )
    activation_fn: ChoiceEnum(utils.get_available_activation_fns()) = option(
        "relu", "activation function of FFN and experts"
    )
    dropout: float = option(0.1, "dropout probability")
    attention_dropout: float = option(0.0, "dropout probability for attention weights")
    activation_dropout: float = option(
        0.0,
        "dropout probability after the activation in FFN and experts",
        argparse_alias="--relu-dropout",
    )
    layernorm_embedding: bool = option(False, "add layer norm to embeddings")
    no_scale_embedding: bool = option(False, "do not scale embeddings")
    no_token_positional_embeddings: bool = option(False, "no positional embeddings")
    checkpoint_activations: bool = option(
        False, "recompute activations in the backward pass: less memory, more time"
    )
    offload_activations: bool = option(False, "checkpoint activations and keep them in CPU memory")
    min_params_to_wrap: int = option(
        int(1e8), "smallest layer to wrap with --ddp-backend fully_sharded"
    )

    @classmethod
    def add_args(cls, parser) -> None:
        """All options as flags, without defaults: those of the architecture apply where none is given.

        fairseq would turn ``--decoder-normalize-before`` into the switch that turns it off, since it is
        on by default; here it keeps its meaning, and ``--no-decoder-normalize-before`` turns it off.
        """
        for f in fields(cls):
            if f.default is True or f.name.startswith("share_"):
                parser.add_argument(
                    flag(f.name),
                    action=BooleanOptionalAction,
                    default=SUPPRESS,
                    help=f.metadata["help"],
                )
        gen_parser_from_dataclass(parser, cls(), delete_default=True)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Of all options."""
        return tuple(f.name for f in fields(cls) if not f.name.startswith("_"))

    @classmethod
    def of(cls, cfg) -> "DecoderOptions":
        """Of fairseq's config, in which other parts' options may be; those that are missing by default."""
        values = (
            OmegaConf.to_container(cfg, resolve=True) if OmegaConf.is_config(cfg) else vars(cfg)
        )
        return cls(**cls.among(values))

    @classmethod
    def among(cls, values: Mapping) -> dict:
        """Those of ``values`` that are options, also under their former names."""
        values = {FORMER_NAMES.get(name, name): value for name, value in values.items()}
        return {name: values[name] for name in cls.names() if name in values}

    @staticmethod
    def positions_option_of(side: str) -> str:
        """The option that says how long a sequence may be."""
        return f"max_{'source' if side == 'encoder' else 'target'}_positions"

    def transformer(self) -> TransformerConfig:
        """The part that fairseq's own transformer code reads, nested as it wants it."""
        dim = self.decoder_embed_dim
        return TransformerConfig.from_namespace(
            Namespace(**vars(self), decoder_input_dim=dim, decoder_output_dim=dim)
        )


@dataclass
class SMoETransformerConfig(DecoderOptions):
    """Of translation."""

    SIDES = ("encoder", "decoder")

    encoder_embed_dim: int = option(512, "encoder embedding dimension")
    encoder_ffn_embed_dim: int = option(2048, "encoder FFN (and expert) dimension")
    encoder_layers: int = option(6, "number of encoder layers")
    encoder_attention_heads: int = option(8, "number of encoder attention heads")
    encoder_normalize_before: bool = option(True, "pre-norm encoder layers")
    encoder_learned_pos: bool = option(False, "learned positional embeddings in the encoder")
    encoder_layerdrop: float = option(0.0, "LayerDrop probability of the encoder")
    encoder_smoe_strata: str = option("", "--smoe-strata of the encoder; empty: as --smoe-strata")
    encoder_moe_freq: int = option(-1, "--moe-freq of the encoder; -1: as --moe-freq")
    share_all_embeddings: bool = option(True, "share encoder, decoder and output embeddings")
    max_source_positions: int = option(POSITIONS, "maximum number of source tokens")
    max_target_positions: int = option(POSITIONS, "maximum number of target tokens")


@dataclass
class SMoEMultilingualTransformerConfig(SMoETransformerConfig):
    """Of a model per language pair."""

    share_encoder_embeddings: bool = option(False, "share encoder embeddings across languages")
    share_decoder_embeddings: bool = option(False, "share decoder embeddings across languages")
    share_encoders: bool = option(False, "share encoders across languages")
    share_decoders: bool = option(False, "share decoders across languages")


@dataclass
class SMoETransformerLMConfig(DecoderOptions):
    """Of language models: a decoder alone. How long a sequence may be is the task's to say."""

    share_decoder_input_output_embed: bool = option(
        True, "share decoder input and output embeddings"
    )
    add_bos_token: bool = II("task.add_bos_token")
    tokens_per_sample: int = II("task.tokens_per_sample")
    # Not `int | None`, which fairseq does not read.
    max_target_positions: Optional[int] = II("task.max_target_positions")  # noqa: UP045

    @classmethod
    def add_args(cls, parser) -> None:
        """Beside its own, hidden, those of an encoder, which end with a sentence."""
        super().add_args(parser)
        for name in cls.of_translation():
            flags = (flag(name), flag(f"no_{name}"))
            kwargs = {"action": _OfEncoder, "default": SUPPRESS, "help": SUPPRESS}
            parser.add_argument(*flags, nargs="?", **kwargs)

    @classmethod
    def of_translation(cls) -> list[str]:
        """Options that only a model of translation has."""
        return [name for name in SMoETransformerConfig.names() if name not in cls.names()]

    @classmethod
    def of(cls, cfg) -> "SMoETransformerLMConfig":
        """As `DecoderOptions.of`.

        Raises:
            ValueError: there are options of an encoder among them; one sentence.
        """
        for name in cls.of_translation():
            if name in cfg:
                raise ValueError(NO_ENCODER.format(flag(name)))
        config = super().of(cfg)
        for name, default in {"add_bos_token": False, "tokens_per_sample": POSITIONS}.items():
            if isinstance(getattr(config, name), str):  # without a task, as in `smoe cost`
                setattr(config, name, default)
        if not isinstance(config.max_target_positions, int):
            config.max_target_positions = config.tokens_per_sample + config.add_bos_token
        return config
