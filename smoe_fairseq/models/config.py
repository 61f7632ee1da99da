"""Options of the SMoE transformer, on the command line and in hydra configs."""

from argparse import SUPPRESS, BooleanOptionalAction, Namespace
from dataclasses import dataclass, field, fields

from fairseq import utils
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models.transformer import TransformerConfig

from smoe_fairseq.modules.balance import BALANCED_OVER, BALANCES
from smoe_fairseq.modules.capacity import DROP_ORDERS
from smoe_fairseq.modules.gates.make import GATES
from smoe_fairseq.modules.gates.top_k import GATE_NORMALIZATIONS, SECOND_EXPERT_POLICIES
from smoe_fairseq.modules.option_error import OptionError
from smoe_fairseq.modules.smoe import DROPOUTS, NORMS
from smoe_fairseq.modules.strata import Strata

HASH_TABLES = ("random", "balanced")


def option(default, help: str, **metadata):
    return field(default=default, metadata={"help": help, **metadata})


@dataclass
class SMoETransformerConfig(FairseqDataclass):
    """Flat, as fairseq's flags are; the defaults are those of ``smoe_transformer_base``."""

    # The transformer
    encoder_embed_dim: int = option(512, "encoder embedding dimension")
    encoder_ffn_embed_dim: int = option(2048, "encoder FFN (and expert) dimension")
    encoder_layers: int = option(6, "number of encoder layers")
    encoder_attention_heads: int = option(8, "number of encoder attention heads")
    encoder_normalize_before: bool = option(True, "pre-norm encoder layers")
    encoder_learned_pos: bool = option(False, "learned positional embeddings in the encoder")
    encoder_layerdrop: float = option(0.0, "LayerDrop probability of the encoder")
    decoder_embed_dim: int = option(512, "decoder embedding dimension")
    decoder_ffn_embed_dim: int = option(2048, "decoder FFN (and expert) dimension")
    decoder_layers: int = option(6, "number of decoder layers")
    decoder_attention_heads: int = option(8, "number of decoder attention heads")
    decoder_normalize_before: bool = option(True, "pre-norm decoder layers")
    decoder_learned_pos: bool = option(False, "learned positional embeddings in the decoder")
    decoder_layerdrop: float = option(0.0, "LayerDrop probability of the decoder")
    share_all_embeddings: bool = option(True, "share encoder, decoder and output embeddings")
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
    max_source_positions: int = option(1024, "maximum number of source tokens")
    max_target_positions: int = option(1024, "maximum number of target tokens")
    checkpoint_activations: bool = option(
        False, "recompute activations in the backward pass: less memory, more time"
    )
    offload_activations: bool = option(False, "checkpoint activations and keep them in CPU memory")
    min_params_to_wrap: int = option(
        int(1e8), "smallest layer to wrap with --ddp-backend fully_sharded"
    )

    # The mixture of experts
    smoe_strata: str = option(
        "4-4",
        "experts per stratum in the paper's notation: 16 is a vanilla MoE, 4-12 has two strata; one value, "
        "or one for each MoE layer of a side, separated by commas",
    )
    encoder_smoe_strata: str = option("", "--smoe-strata of the encoder; empty: as --smoe-strata")
    decoder_smoe_strata: str = option("", "--smoe-strata of the decoder; empty: as --smoe-strata")
    smoe_chain: int = option(
        1,
        "chain of experts: so many passes of every token over the experts of one stratum, each with a gate "
        "of its own",
    )
    moe_freq: int = option(2, "every N-th layer is a MoE layer; 0: a dense model")
    encoder_moe_freq: int = option(-1, "--moe-freq of the encoder; -1: as --moe-freq")
    decoder_moe_freq: int = option(-1, "--moe-freq of the decoder; -1: as --moe-freq")
    moe_gate: ChoiceEnum(GATES) = option(
        "topk",
        "who chooses: the gate its best experts (topk), as many as it is unsure of (top-p), a table by "
        "token (hash), a balanced assignment (base), or in the encoder the experts (expert-choice)",
    )
    moe_top_k: int = option(2, "experts per token and stratum, with null ones")
    moe_top_p: float = option(
        0.4, "--moe-gate top-p: probability that the experts of a token have between them, at least"
    )
    moe_hash_table: ChoiceEnum(HASH_TABLES) = option(
        "random",
        "--moe-gate hash: experts of the token types drawn, or given so that each has as many tokens by the "
        "dictionary's counts",
    )
    moe_hash_seed: int = option(1, "--moe-hash-table random: what is drawn")
    moe_null_experts: int = option(
        0, "experts without output that take part in the choice of top-k; with a larger --moe-top-k"
    )
    moe_expert_ffn_dim: int = option(
        0, "width of each expert, shared ones too; 0: the FFN dimension of its side"
    )
    moe_shared_experts: int = option(0, "experts that all tokens use, beside those of the gate")
    moe_residual: bool = option(
        False, "PR-MoE: a shared FFN beside the experts, mixed with them by a gate of its own"
    )
    moe_balance: ChoiceEnum(BALANCES) = option(
        "loss",
        "experts are kept equally busy by the balance loss, or by a bias for the selection, without a loss",
    )
    moe_bias_step: float = option(1e-3, "--moe-balance bias: how far it goes in an update")
    moe_balance_over: ChoiceEnum(BALANCED_OVER) = option(
        "batch",
        "the balance loss counts first choices of each batch by itself, or of all processes and batches of "
        "the update so far",
    )
    smoe_capacity_budget: float = option(
        0.0,
        "strata that a token is to stop at on average, from 1 to as many as there are, by a loss in training "
        "(--smoe-capacity-budget-wt of the criterion); 0: no such loss",
    )
    smoe_exit_bias: float = option(
        0.0,
        "in evaluation, added to the gates' logits of later strata: above 0 tokens stop at fewer strata, in "
        "less time; set it by --model-overrides",
    )
    moe_stacked: bool = option(
        False, "naive stacking: a chain of MoE layers without inner layer norms and residuals"
    )
    moe_capacity_factor: float = option(
        2.0, "in training an expert takes ceil(factor * tokens / experts) tokens; 0: no limit"
    )
    moe_eval_capacity_factor: float = option(
        0.0, "the same in evaluation; 0: no limit, so no translation depends on its batch"
    )
    moe_second_expert_policy: ChoiceEnum(SECOND_EXPERT_POLICIES) = option(
        "sampling", "second expert in training: drawn, the second best, or the latter at random"
    )
    moe_gate_normalization: ChoiceEnum(GATE_NORMALIZATIONS) = option(
        "after-drop", "weights of the two experts are divided by their sum after or before dropping"
    )
    moe_drop_order: ChoiceEnum(DROP_ORDERS) = option(
        "sentence",
        "tokens that keep an expert that has too many: the first ones, sentence after sentence, those of "
        "highest gate probability, or drawn ones",
    )
    smoe_norm: ChoiceEnum(NORMS) = option(
        "paper",
        "inner layer norms and residuals as the paper or as its released code has them; the same with one "
        "stratum",
        argparse_alias="--moe-norms",
    )
    moe_dropout_per: ChoiceEnum(DROPOUTS) = option(
        "stratum", "dropout of each stratum's output, or of what the whole MoE layer adds"
    )
    moe_gate_init_scale: float = option(
        1.0, "initial weights of the gates, over those of a linear layer"
    )
    moe_output_init_scale: float = option(
        1.0, "initial weights and biases of the experts' second layer, over a linear layer's"
    )
    moe_eom: float = option(
        0.0, "expert output masking: probability that a selected expert's output is left out"
    )
    moe_fom: float = option(
        0.0, "final output masking: probability that a token's mixed expert output is left out"
    )
    moe_gating_dropout: float = option(
        0.0, "probability that a MoE layer routes no token of a batch in training"
    )
    moe_cmr: bool = option(
        False, "conditional MoE routing: a gate between a shared FFN and the experts"
    )
    cmr_gate_drop: float = option(
        0.0, "CMR: probability in training that a token has the shared FFN only"
    )
    expert_parallel: bool = option(
        False, "spread the experts of every MoE layer over the processes (with legacy_ddp)"
    )

    @classmethod
    def add_args(cls, parser) -> None:
        """All options as flags, without defaults: those of the architecture apply where none is given.

        fairseq would turn ``--encoder-normalize-before`` into the switch that turns it off, since it is
        on by default; here it keeps its meaning, and ``--no-encoder-normalize-before`` turns it off.
        """
        for f in fields(cls):
            if f.default is True:
                parser.add_argument(
                    flag(f.name),
                    action=BooleanOptionalAction,
                    default=SUPPRESS,
                    help=f.metadata["help"],
                )
        gen_parser_from_dataclass(parser, cls(), delete_default=True)

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
                f"{flag(name)} {','.join(values)}: expected one value{of_each} of the {side}, which has "
                f"{layers}"
            )
        try:
            strata = [Strata.parse(value, self.moe_stacked, self.smoe_chain) for value in values]
        except OptionError as error:
            raise ValueError(error.named(self.block_flags(side))) from None
        return (strata * layers)[:layers]

    def block_flags(self, side: str) -> dict[str, str]:
        """The flags of a side's blocks, by their parameters."""
        return BLOCK_FLAGS | {"strata": flag(self.strata_option_of(side))}

    def transformer(self) -> TransformerConfig:
        """The part that fairseq's own transformer code reads, nested as it wants it."""
        dim = self.decoder_embed_dim
        return TransformerConfig.from_namespace(
            Namespace(**vars(self), decoder_input_dim=dim, decoder_output_dim=dim)
        )

    def moe_options(self, side: str) -> list[dict]:
        """Arguments of the `StratifiedMoE` of each MoE layer of a side, but the hash gate's table.

        Raises:
            ValueError: see `strata_of`.
        """
        options = {name: getattr(self, option) for name, option in BLOCK_OPTIONS.items()}
        for name in ENUMERATED:
            options[name] = str(options[name])
        if options["gate"] == "expert-choice":
            if side == "decoder":  # where a token must not see later ones
                options["gate"] = "topk"
            else:
                options["balance_over"] = "batch"  # it has no balance loss
        options["activation_fn"] = utils.get_activation_fn(str(self.activation_fn))
        return [options | {"strata": str(strata)} for strata in self.strata_of(side)]


# Parameters of the block, and the options that set them; its strata are the layer's.
BLOCK_OPTIONS = {
    "stacked": "moe_stacked",
    "chain": "smoe_chain",
    "gate": "moe_gate",
    "top_k": "moe_top_k",
    "top_p": "moe_top_p",
    "null_experts": "moe_null_experts",
    "expert_ffn_dim": "moe_expert_ffn_dim",
    "shared_experts": "moe_shared_experts",
    "residual": "moe_residual",
    "balance": "moe_balance",
    "bias_step": "moe_bias_step",
    "balance_over": "moe_balance_over",
    "capacity_budget": "smoe_capacity_budget",
    "exit_bias": "smoe_exit_bias",
    "capacity_factor": "moe_capacity_factor",
    "eval_capacity_factor": "moe_eval_capacity_factor",
    "second_expert_policy": "moe_second_expert_policy",
    "gate_normalization": "moe_gate_normalization",
    "drop_order": "moe_drop_order",
    "norms": "smoe_norm",
    "dropout_per": "moe_dropout_per",
    "gate_init_scale": "moe_gate_init_scale",
    "output_init_scale": "moe_output_init_scale",
    "activation_fn": "activation_fn",
    "dropout": "dropout",
    "activation_dropout": "activation_dropout",
    "eom": "moe_eom",
    "fom": "moe_fom",
    "gating_dropout": "moe_gating_dropout",
    "cmr": "moe_cmr",
    "cmr_gate_drop": "cmr_gate_drop",
    "expert_parallel": "expert_parallel",
}
# Those of an enumeration.
ENUMERATED = ("gate", "balance", "balance_over", "gate_normalization", "second_expert_policy")
ENUMERATED += ("drop_order", "norms", "dropout_per")
DEFAULTS = {f.name: f.default for f in fields(SMoETransformerConfig)}
FIELDS = tuple(f.name for f in fields(SMoETransformerConfig) if not f.name.startswith("_"))
# Of options in checkpoints of before.
FORMER_NAMES = {"moe_norms": "smoe_norm"}


def flag(name: str) -> str:
    """The flag of an option."""
    return f"--{name.replace('_', '-')}"


# By the block's parameters.
BLOCK_FLAGS = {name: flag(option) for name, option in BLOCK_OPTIONS.items()}
BLOCK_FLAGS |= {"strata": flag("smoe_strata"), "hash_table": flag("moe_hash_table")}
