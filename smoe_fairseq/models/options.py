"""Options of the models: the mixture of experts, and the whole transformer."""

from argparse import SUPPRESS, ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Optional

from fairseq import utils
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models.transformer import TransformerConfig
from omegaconf import II, OmegaConf

from smoe_fairseq.flags import flag_of
from smoe_fairseq.modules.activation import GATED
from smoe_fairseq.modules.config import MoEConfig, gates_that_read, without_effect
from smoe_fairseq.modules.gates import GATES
from smoe_fairseq.modules.strata import OptionError, Strata

HASH_TABLES = ("random", "balanced")


def activation_of(name: str):
    """The function of a name, fairseq's or a gated one."""
    return GATED.get(str(name)) or utils.get_activation_fn(str(name))


def option(default, help: str, **metadata):
    return field(default=default, metadata={"help": help, **metadata})


def _block_options() -> type:
    """A fairseq dataclass with the options of `MoEConfig`."""
    options = []
    for name, flag_name in MoEConfig.flags().items():
        each = MoEConfig.__dataclass_fields__[name]
        choices, alias = each.metadata["choices"], each.metadata["alias"]
        alias = {"argparse_alias": alias} if alias else {}
        # Plugins add gates later.
        kind = ChoiceEnum(choices) if choices and choices is not GATES else each.type
        options.append((flag_name, kind, option(each.default, each.metadata["help"], **alias)))
    return make_dataclass(
        "BlockOptions", options, bases=(FairseqDataclass,), namespace={"__module__": __name__}
    )


BlockOptions = _block_options()


def offer_gates(parser) -> None:
    """Give the flag of the gate its choices, those of plugins included."""

    def known(name: str) -> str:
        if name not in GATES:
            plugins = "that of a plugin, which --user-dir or SMOE_PLUGINS names"
            raise ArgumentTypeError(f"{name}: expected {', '.join(GATES)}, or {plugins}")
        return name

    for action in parser._actions:
        if action.dest == "moe_gate":
            action.choices, action.type = tuple(GATES), known


@dataclass
class MoEOptions(BlockOptions):
    """Options of the mixture of experts, the base of all model configs.

    `SIDES` lists the parts of the model; options of a side begin with its name.
    """

    SIDES = ("decoder",)  # with a type annotation it would be an option

    smoe_strata: str = option("4-4", MoEConfig.__dataclass_fields__["strata"].metadata["help"])
    decoder_smoe_strata: str = option("", "--smoe-strata of the decoder; empty: as --smoe-strata")
    moe_freq: int = option(2, "every N-th layer is an MoE layer; 0: a dense model")
    decoder_moe_freq: int = option(-1, "--moe-freq of the decoder; -1: as --moe-freq")
    moe_hash_table: ChoiceEnum(HASH_TABLES) = option(
        "random",
        f"--moe-gate {', '.join(gates_that_read('hash_table'))}: how the table assigns token types to "
        "experts: at random, or so that "
        "each expert gets equally many tokens, by the dictionary's counts",
    )
    moe_hash_seed: int = option(1, "--moe-hash-table random: the random seed")

    def moe_freq_of(self, side: str) -> int:
        """The ``--moe-freq`` of a side, "encoder" or "decoder"."""
        freq = getattr(self, f"{side}_moe_freq")
        return self.moe_freq if freq == -1 else freq

    def strata_option_of(self, side: str) -> str:
        """The option that sets the strata of a side."""
        name = f"{side}_smoe_strata"
        return name if getattr(self, name) else "smoe_strata"

    def strata_of(self, side: str) -> list[Strata]:
        """The strata of each MoE layer of a side, in the order of the layers.

        Raises:
            ValueError: the number of values is neither 1 nor that of the MoE layers, or a value is invalid;
                one sentence that names the flag.
        """
        freq, name = self.moe_freq_of(side), self.strata_option_of(side)
        layers = getattr(self, f"{side}_layers") // freq if freq else 0
        values = str(getattr(self, name)).split(",")
        if layers and len(values) not in (1, layers):
            several = f", or {layers} separated by commas, one for each MoE layer" * (layers > 1)
            raise ValueError(
                f"{flag_of(name)} {','.join(values)}: expected one value{several} of the {side}"
            )
        try:
            strata = [Strata.parse(value, self.moe_stacked, self.smoe_chain) for value in values]
        except OptionError as error:
            raise ValueError(error.named(self.block_flags(side))) from None
        return (strata * layers)[:layers]

    def block_flags(self, side: str) -> dict[str, str]:
        """Maps the parameters of a side's blocks to flags."""
        return BLOCK_FLAGS | {"strata": flag_of(self.strata_option_of(side))}

    def moe_options(self, side: str) -> list[dict]:
        """Arguments of the `StratifiedMoE` of each MoE layer of a side, except for the hash gate's table.

        Raises:
            ValueError: see `strata_of`.
        """
        options = {name: getattr(self, option) for name, option in BLOCK_OPTIONS.items()}
        for each in fields(MoEConfig):
            if each.metadata["choices"] and each.name in options:
                options[each.name] = str(options[each.name])
        kind = GATES[options["gate"]]
        if kind.in_decoder and side == "decoder":  # where tokens must not depend on later ones
            options["gate"] = kind.in_decoder
        elif kind.in_decoder and not kind.has_balance_loss:
            options["balance_over"] = "batch"
        # Checkpoints may have options without effect.
        options |= {name: getattr(MoEConfig, name) for name in without_effect(options)}
        options["activation_fn"] = activation_of(self.activation_fn)
        return [options | {"strata": str(strata)} for strata in self.strata_of(side)]


# Maps the block's options to the models' options; the last three are the transformer's.
BLOCK_OPTIONS = MoEConfig.flags() | {
    name: name for name in ("activation_fn", "dropout", "activation_dropout")
}
BLOCK_FLAGS = {name: flag_of(option) for name, option in BLOCK_OPTIONS.items()}
BLOCK_FLAGS |= {"hash_table": flag_of("moe_hash_table")}


POSITIONS = 1024  # fairseq's default


@dataclass
class DecoderOptions(MoEOptions):
    """Options of all models, with the sizes of ``..._base`` as defaults."""

    decoder_embed_dim: int = option(512, "decoder embedding dimension")
    decoder_ffn_embed_dim: int = option(2048, "decoder FFN (and expert) dimension")
    decoder_layers: int = option(6, "number of decoder layers")
    decoder_attention_heads: int = option(8, "number of decoder attention heads")
    decoder_normalize_before: bool = option(True, "pre-norm decoder layers")
    decoder_learned_pos: bool = option(False, "learned positional embeddings in the decoder")
    decoder_layerdrop: float = option(0.0, "LayerDrop probability of the decoder")
    share_decoder_input_output_embed: bool = option(False, "share input and output embeddings")
    activation_fn: ChoiceEnum([*utils.get_available_activation_fns(), *GATED]) = option(
        "relu",
        "activation function of FFN and experts; swiglu, geglu, reglu: gated, with half more weights",
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
        """Add all options as flags, without defaults, which the architecture sets.

        fairseq would make ``--decoder-normalize-before`` turn the option off, since it is on by default;
        here it turns it on, and ``--no-decoder-normalize-before`` turns it off.
        """
        for f in fields(cls):
            if f.default is True or f.name.startswith("share_"):
                parser.add_argument(
                    flag_of(f.name),
                    action=BooleanOptionalAction,
                    default=SUPPRESS,
                    help=f.metadata["help"],
                )
        gen_parser_from_dataclass(parser, cls(), delete_default=True)
        offer_gates(parser)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all options."""
        return tuple(f.name for f in fields(cls) if not f.name.startswith("_"))

    @classmethod
    def of(cls, cfg) -> "DecoderOptions":
        """From fairseq's config, which may contain other options; missing ones get their defaults."""
        is_config = OmegaConf.is_config(cfg)
        values = OmegaConf.to_container(cfg, resolve=True) if is_config else vars(cfg)
        config = cls(**cls.select(values))
        # As fairseq does for its translation models alone.
        config.checkpoint_activations |= config.offload_activations
        return config

    @classmethod
    def select(cls, values: Mapping) -> dict:
        """The items of ``values`` that are options."""
        return {name: values[name] for name in cls.names() if name in values}

    def transformer(self) -> TransformerConfig:
        """The nested config that fairseq's transformer code reads."""
        dim = self.decoder_embed_dim
        return TransformerConfig.from_namespace(
            Namespace(**vars(self), decoder_input_dim=dim, decoder_output_dim=dim)
        )


@dataclass
class SMoETransformerConfig(DecoderOptions):
    """Options of a translation model."""

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
    freeze: str = option(
        "", "parts not to train: embeddings, encoder, decoder (without embeddings), by commas"
    )

    @property
    def frozen(self) -> frozenset[str]:
        """The parts of ``--freeze``."""
        return frozenset(filter(None, self.freeze.split(",")))


@dataclass
class SMoEMultilingualTransformerConfig(SMoETransformerConfig):
    """Options of a model per language pair."""

    share_encoder_embeddings: bool = option(False, "share encoder embeddings across languages")
    share_decoder_embeddings: bool = option(False, "share decoder embeddings across languages")
    share_encoders: bool = option(False, "share encoders across languages")
    share_decoders: bool = option(False, "share decoders across languages")


@dataclass
class SMoETransformerLMConfig(DecoderOptions):
    """Options of a language model, which has only a decoder. The task sets the length of a sequence."""

    share_decoder_input_output_embed: bool = option(True, "share input and output embeddings")
    add_bos_token: bool = II("task.add_bos_token")
    tokens_per_sample: int = II("task.tokens_per_sample")
    # fairseq does not support `int | None`.
    max_target_positions: Optional[int] = II("task.max_target_positions")  # noqa: UP045

    @classmethod
    def of_translation(cls) -> list[str]:
        """Options that only a translation model has."""
        return [name for name in SMoETransformerConfig.names() if name not in cls.names()]

    @classmethod
    def of(cls, cfg) -> "SMoETransformerLMConfig":
        """As `DecoderOptions.of`.

        Raises:
            ValueError: ``cfg`` contains options of an encoder; one sentence.
        """
        for name in cls.of_translation():
            if name in cfg:
                raise ValueError(f"{flag_of(name)}: a language model has no encoder; leave it out")
        config = super().of(cfg)
        for name, default in {"add_bos_token": False, "tokens_per_sample": POSITIONS}.items():
            if isinstance(getattr(config, name), str):  # without a task, as in `smoe cost`
                setattr(config, name, default)
        if not isinstance(config.max_target_positions, int):
            config.max_target_positions = config.tokens_per_sample + config.add_bos_token
        return config
