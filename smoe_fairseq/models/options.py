"""Options of the models: the mixture of experts, and the whole transformer."""

from argparse import SUPPRESS, Action, BooleanOptionalAction, Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Optional

from fairseq import utils
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models.transformer import TransformerConfig
from omegaconf import II, OmegaConf

from smoe_fairseq.modules.config import MoEConfig
from smoe_fairseq.modules.strata import OptionError, Strata

HASH_TABLES = ("random", "balanced")


def option(default, help: str, **metadata):
    return field(default=default, metadata={"help": help, **metadata})


def flag(name: str) -> str:
    """The flag of an option."""
    return f"--{name.replace('_', '-')}"


def _of_block() -> type:
    """fairseq's options that set the block's, made from `MoEConfig`."""
    made = []
    flags = MoEConfig.flags()
    for each in (each for each in fields(MoEConfig) if each.name in flags):
        choices, alias = each.metadata["choices"], each.metadata["alias"]
        alias = {"argparse_alias": alias} if alias else {}
        kind = ChoiceEnum(choices) if choices else each.type
        made.append((flags[each.name], kind, option(each.default, each.metadata["help"], **alias)))
    return make_dataclass(
        "BlockOptions", made, bases=(FairseqDataclass,), namespace={"__module__": __name__}
    )


BlockOptions = _of_block()


@dataclass
class MoEOptions(BlockOptions):
    """What a model's config inherits; it says in `SIDES` of which parts the model is made.

    Options of a side begin with its name; all models have a decoder.
    """

    SIDES = ("decoder",)  # without a type, which would make it an option

    smoe_strata: str = option("4-4", MoEConfig.help_of("strata"))
    decoder_smoe_strata: str = option("", "--smoe-strata of the decoder; empty: as --smoe-strata")
    moe_freq: int = option(2, "every N-th layer is an MoE layer; 0: a dense model")
    decoder_moe_freq: int = option(-1, "--moe-freq of the decoder; -1: as --moe-freq")
    moe_hash_table: ChoiceEnum(HASH_TABLES) = option(
        "random",
        "--moe-gate hash, hash-topk: how the table assigns token types to experts: at random, or so that "
        "each expert gets equally many tokens, by the dictionary's counts",
    )
    moe_hash_seed: int = option(1, "--moe-hash-table random: the random seed")

    def moe_freq_of(self, side: str) -> int:
        """``side`` is "encoder" or "decoder"."""
        freq = getattr(self, f"{side}_moe_freq")
        return self.moe_freq if freq == -1 else freq

    def moe_layers_of(self, side: str) -> int:
        """How many MoE layers a side has."""
        freq = self.moe_freq_of(side)
        return getattr(self, f"{side}_layers") // freq if freq else 0

    def strata_option_of(self, side: str) -> str:
        """The option that says the strata of a side."""
        own = f"{side}_smoe_strata"
        return own if getattr(self, own) else "smoe_strata"

    def strata_of(self, side: str) -> list[Strata]:
        """Of each MoE layer of a side, in the order of the layers.

        Raises:
            ValueError: as many values as the side has MoE layers were expected, or one of them is none; one
                sentence that names the flag.
        """
        layers, name = self.moe_layers_of(side), self.strata_option_of(side)
        values = str(getattr(self, name)).split(",")
        if layers and len(values) not in (1, layers):
            of_each = f", or {layers} separated by commas, one for each MoE layer" * (layers > 1)
            raise ValueError(
                f"{flag(name)} {','.join(values)}: expected one value{of_each} of the {side}"
            )
        try:
            strata = [Strata.parse(value, self.moe_stacked, self.smoe_chain) for value in values]
        except OptionError as error:
            raise ValueError(error.named(self.block_flags(side))) from None
        return (strata * layers)[:layers]

    def block_flags(self, side: str) -> dict[str, str]:
        """The flags of a side's blocks, by their parameters."""
        return BLOCK_FLAGS | {"strata": flag(self.strata_option_of(side))}

    def moe_options(self, side: str) -> list[dict]:
        """Arguments of the `StratifiedMoE` of each MoE layer of a side, but the hash gate's table.

        Raises:
            ValueError: see `strata_of`.
        """
        options = {name: getattr(self, option) for name, option in BLOCK_OPTIONS.items()}
        for each in fields(MoEConfig):
            if each.metadata["choices"] and each.name in options:
                options[each.name] = str(options[each.name])
        if options["gate"] == "expert-choice":
            if side == "decoder":  # where a token must not see later ones
                options["gate"] = "topk"
            else:
                options["balance_over"] = "batch"  # it has no balance loss
        options["activation_fn"] = utils.get_activation_fn(str(self.activation_fn))
        return [options | {"strata": str(strata)} for strata in self.strata_of(side)]


# The block's options, and the models' that set them; of these three the transformer's own.
BLOCK_OPTIONS = MoEConfig.flags() | {
    name: name for name in ("activation_fn", "dropout", "activation_dropout")
}
BLOCK_FLAGS = {name: flag(option) for name, option in BLOCK_OPTIONS.items()}
BLOCK_FLAGS |= {"hash_table": flag("moe_hash_table")}


# Options of the SMoE transformers, on the command line and in hydra configs.

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
    share_decoder_input_output_embed: bool = option(False, "share input and output embeddings")
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
        is_config = OmegaConf.is_config(cfg)
        values = OmegaConf.to_container(cfg, resolve=True) if is_config else vars(cfg)
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

    share_decoder_input_output_embed: bool = option(True, "share input and output embeddings")
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
