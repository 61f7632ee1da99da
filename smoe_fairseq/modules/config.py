"""Every option of the block, declared once: name, type, default, flag, help, choices and bounds.

The block's arguments, fairseq's flags (models/options.py) and the checks are made from `MoEConfig`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Optional

from torch import Tensor

from smoe_fairseq.modules.activation import Activation
from smoe_fairseq.modules.experts import EXECUTIONS
from smoe_fairseq.modules.gates import GATES
from smoe_fairseq.modules.gates.top_k import GATE_NORMALIZATIONS, SCORES, SECOND_EXPERT_POLICIES
from smoe_fairseq.modules.routing import DROP_ORDERS
from smoe_fairseq.modules.strata import OptionError, Strata

BALANCES = ("loss", "bias")
BALANCED_OVER = ("batch", "update")
NORMS = ("paper", "released")
DROPOUTS = ("stratum", "layer")
GATE_RESIDUALS = ("none", "strata", "layers")
_RANKED = ("topk", "hash-topk", "expert-choice")  # the last with top-k in the decoder
FREE_EXPERTS = ("null_experts", "copy_experts", "constant_experts")


def option(
    default,
    help: str,
    flag: str = "",
    choices: tuple[str, ...] = (),
    check: Callable | None = None,
    alias: str = "",
    of: tuple[str, ...] = (),
    harmless: tuple = (),
):
    """A field of `MoEConfig`.

    Args:
        flag: the model's option that sets it, such as ``moe_top_k``; empty: no flag of its own.
        choices: the values it may have.
        check: called with name and value, raises OptionError.
        alias: another flag for the same.
        of: another option, and the values without which this one has no effect.
        harmless: values that may be given then, too: what is done anyway.
    """
    metadata = {"help": help, "flag": flag, "choices": choices, "check": check, "alias": alias}
    return field(default=default, metadata={**metadata, "of": of, "harmless": harmless})


def _refuse(name: str, value, expected: str) -> None:
    raise OptionError(f"{{{name}}} {{given}}: {{expected}}", given=value, expected=expected)


def number(name: str, value: int) -> None:
    if value < 0:
        _refuse(name, value, "expected a whole number of at least 0")


def factor(name: str, value: float) -> None:
    if not (value >= 0 and math.isfinite(value)):
        _refuse(name, value, "expected 0 (no limit) or a positive number")


def probability(name: str, value: float) -> None:
    if not 0 <= value < 1:
        _refuse(name, value, "expected a probability from 0 to below 1")


def share(name: str, value: float) -> None:
    if not 0 < value <= 1:
        _refuse(name, value, "expected a number above 0, up to 1")


def scale(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        _refuse(name, value, "expected a positive number")


@dataclass(frozen=True, eq=False)
class MoEConfig:
    """Options of `StratifiedMoE`; ``--flags`` in the help texts are those of the models.

    Raises:
        OptionError: a ValueError, for a value that the block cannot take; it names the option.
    """

    strata: str = option(
        "2-2-2-2",
        "experts per stratum, in the paper's notation: 16 is a vanilla MoE, 4-12 has two strata; "
        "give one value for all MoE layers, or one per MoE layer of a side, separated by commas",
        "smoe_strata",
    )
    chain: int = option(
        1,
        "chain of experts: how many times every token passes through the experts; each pass has a "
        "gate of its own",
        "smoe_chain",
    )
    gate: str = option(
        "topk",
        "how experts are chosen. topk: each token takes its k best-scored experts; top-p: as many "
        "as reach --moe-top-p; hash: one, by a table of token ids; hash-topk: the first by that "
        "table, the others by score; base: one, so that a batch is balanced; expert-choice: each "
        "expert takes its best tokens (encoder only); relu: all with a logit above 0; threshold: "
        "all above a running threshold; depths: Mixture-of-Depths, where experts take some of a "
        "sentence's tokens",
        "moe_gate",
        choices=tuple(GATES),
    )
    top_k: int = option(
        2,
        "experts per token and stratum, null experts included; for --moe-gate relu and threshold "
        "the mean to aim at",
        "moe_top_k",
        of=("gate", *_RANKED, "relu", "threshold"),
        harmless=(1,),
    )
    top_p: float = option(
        0.4,
        "--moe-gate top-p: a token takes its best experts until their probabilities add up to this",
        "moe_top_p",
        of=("gate", "top-p"),
    )
    threshold_step: float = option(
        0.05,
        "--moe-gate threshold, depths: weight of the newest update in the running mean that sets "
        "the thresholds",
        "moe_threshold_step",
        check=share,
        of=("gate", "threshold", "depths"),
    )
    scores: str = option(
        "softmax",
        "--moe-gate topk: function that turns logits into scores",
        "moe_scores",
        choices=SCORES,
    )
    gate_residual: str = option(
        "none",
        "MoE++: add a learnt linear map of an earlier gate's logits. strata: of the last stratum "
        "at which the token stopped; layers: of the previous MoE layer as well",
        "moe_gate_residual",
        choices=GATE_RESIDUALS,
        of=("gate", "topk"),
    )
    null_experts: int = option(
        0,
        "number of experts without output; a token that chooses one saves a real expert; needs a "
        "larger --moe-top-k",
        "moe_null_experts",
        check=number,
    )
    copy_experts: int = option(
        0,
        "number of experts that return their input; chosen like null experts",
        "moe_copy_experts",
        check=number,
    )
    constant_experts: int = option(
        0,
        "number of experts that mix their input with a learnt vector; chosen like null experts",
        "moe_constant_experts",
        check=number,
    )
    expert_ffn_dim: int = option(
        0,
        "inner width of each expert, shared experts included; 0: the FFN dimension of the side",
        "moe_expert_ffn_dim",
        check=number,
    )
    shared_experts: int = option(
        0,
        "number of experts that every token uses, besides those it chooses",
        "moe_shared_experts",
        check=number,
    )
    residual: bool = option(
        False,
        "PR-MoE: add a shared FFN, mixed with the experts by a gate of its own",
        "moe_residual",
    )
    balance: str = option(
        "loss",
        "what keeps experts equally busy: a balance loss, or a bias that changes the choice and "
        "not the weights",
        "moe_balance",
        choices=BALANCES,
    )
    bias_step: float = option(
        1e-3,
        "--moe-balance bias: change of the bias per update",
        "moe_bias_step",
        check=scale,
        of=("balance", "bias"),
    )
    balance_over: str = option(
        "batch",
        "tokens over which the balance loss counts first choices: those of a batch, or all of the "
        "update so far, on all processes",
        "moe_balance_over",
        choices=BALANCED_OVER,
    )
    capacity_budget: float = option(
        0.0,
        "mean number of strata at which a token should stop, from 1 to the number of strata; "
        "trained by a loss (--smoe-capacity-budget-wt); 0: no such loss",
        "smoe_capacity_budget",
    )
    exit_bias: float = option(
        0.0,
        "evaluation only: above 0, tokens stop at fewer strata and translation is faster; below "
        "0, at more; set it with --model-overrides",
        "smoe_exit_bias",
    )
    stacked: bool = option(
        False,
        "naive stacking: each stratum is a MoE layer of its own, without layer norm or residual "
        "between them",
        "moe_stacked",
    )
    capacity_factor: Optional[float] = option(  # noqa: UP045 (fairseq reads no other form)
        None,
        "in training an expert takes at most ceil(factor * tokens / experts) tokens; 0: no limit; "
        "default: 2.0, for --moe-gate depths 0.5, for top-p, relu and threshold 0",
        "moe_capacity_factor",
        check=factor,
        of=("gate", *_RANKED, "top-p", "relu", "threshold", "depths"),
        harmless=(2.0, 0.0),
    )
    eval_capacity_factor: float = option(
        0.0,
        "the same in evaluation; with 0, no limit, a translation does not depend on its batch",
        "moe_eval_capacity_factor",
        check=factor,
        of=("gate", *_RANKED, "top-p", "relu", "threshold"),
    )
    second_expert_policy: str = option(
        "sampling",
        "second and further experts in training. sampling: drawn by their scores; all: the best; "
        "random: the best, kept with probability min(1, 2 * weight)",
        "moe_second_expert_policy",
        choices=SECOND_EXPERT_POLICIES,
        of=("gate", *_RANKED),
        harmless=("all",),
    )
    gate_normalization: str = option(
        "after-drop",
        "when the weights of a token's experts are divided by their sum: after dropping, before "
        "it, or never",
        "moe_gate_normalization",
        choices=GATE_NORMALIZATIONS,
        of=("gate", *_RANKED),
        harmless=("none",),
    )
    drop_order: str = option(
        "sentence",
        "which tokens keep an expert that is full. sentence: the first in the batch; score: those "
        "of highest gate probability; random: a random choice",
        "moe_drop_order",
        choices=DROP_ORDERS,
        of=("gate", *_RANKED, "top-p", "relu", "threshold"),
    )
    norms: str = option(
        "paper",
        "inner layer norms and residuals. paper: as in the paper; released: as in its released "
        "code, which also normalises the output of a MoE layer",
        "smoe_norm",
        choices=NORMS,
        alias="--moe-norms",
    )
    dropout_per: str = option(
        "stratum",
        "apply dropout to the output of each stratum, or once to the output of the MoE layer",
        "moe_dropout_per",
        choices=DROPOUTS,
    )
    gate_init_scale: float = option(
        1.0,
        "scale of the gates' initial weights, relative to a linear layer",
        "moe_gate_init_scale",
        check=scale,
    )
    output_init_scale: float = option(
        1.0,
        "scale of the initial weights and biases of the experts' second layer, relative to a "
        "linear layer",
        "moe_output_init_scale",
        check=scale,
    )
    eom: float = option(
        0.0,
        "expert output masking: probability of dropping the output of a chosen expert",
        "moe_eom",
        check=probability,
    )
    fom: float = option(
        0.0,
        "final output masking: probability of dropping the output of all experts for a token",
        "moe_fom",
        check=probability,
    )
    gating_dropout: float = option(
        0.0,
        "probability that a MoE layer routes none of a batch's tokens in training",
        "moe_gating_dropout",
        check=probability,
    )
    cmr: bool = option(
        False,
        "conditional MoE routing: a gate chooses between a shared FFN and the experts",
        "moe_cmr",
    )
    cmr_gate_drop: float = option(
        0.0,
        "CMR: probability in training that a token uses the shared FFN only",
        "cmr_gate_drop",
        check=probability,
    )
    expert_parallel: bool = option(
        False,
        "spread the experts of every MoE layer over the processes; needs --ddp-backend legacy_ddp",
        "expert_parallel",
    )
    # Set by other parts of a model: the transformer's flags of these names, its dictionary, and nothing.
    activation_fn: Activation = option(
        "relu", "the experts' activation: a function, or the name of one in torch.nn.functional"
    )
    dropout: float = option(
        0.0, "dropout of the block's output before its residual; see dropout_per"
    )
    activation_dropout: float = option(0.0, "dropout after the activation in the experts")
    hash_table: Tensor | None = option(
        None, "gate hash or hash-topk: the expert of each token id, of shape (V,)"
    )
    execution: str = option(
        "auto",
        "how experts are computed. per-expert: a product for each; grouped: one for all; fused: the "
        "same, with all that is around it in a few kernels (a top-k gate on a GPU, with Triton; else "
        "as auto); auto: what is known to be fastest",
        "moe_execution",
        choices=EXECUTIONS,
    )

    def __post_init__(self):
        if self.capacity_factor is None and self.gate in GATES:
            object.__setattr__(self, "capacity_factor", GATES[self.gate].default_capacity)
        for each in fields(self):
            value, choices = getattr(self, each.name), each.metadata["choices"]
            if choices and value not in choices:
                _refuse(each.name, repr(value), f"expected one of {', '.join(choices)}")
            if each.metadata["check"]:
                each.metadata["check"](each.name, value)
        strata = self.layout
        _check_gate(self, strata)
        _check_balance(self)
        _check_later_strata(self, strata)
        _check_norms(self, strata)
        _check_branches(self, strata)

    @property
    def layout(self) -> Strata:
        """The strata, read."""
        return Strata.parse(self.strata, self.stacked, self.chain)

    @property
    def learns_balance(self) -> bool:
        """Whether the balance loss is to be trained on."""
        return GATES[self.gate].has_balance_loss and self.balance == "loss"

    @classmethod
    def help_of(cls, name: str) -> str:
        """What an option means."""
        return cls.__dataclass_fields__[name].metadata["help"]

    @classmethod
    def flags(cls) -> dict[str, str]:
        """The models' options that set the block's, by the block's names."""
        return {f.name: f.metadata["flag"] for f in fields(cls) if f.metadata["flag"]}

    @classmethod
    def of_one_choice(cls) -> dict[str, tuple[str, ...]]:
        """The models' options that need a value of another option: that one, and the values."""
        flags = cls.flags()
        found = {f.metadata["flag"]: f.metadata["of"] for f in fields(cls)}
        return {name: (flags[of[0]], *of[1:]) for name, of in found.items() if of}

    @classmethod
    def harmless(cls) -> dict[str, tuple]:
        """Values of the models' options that are no contradiction where they have no effect."""
        return {f.metadata["flag"]: (f.default, *f.metadata["harmless"]) for f in fields(cls)}


# Rules across options, each with the sentence that the user reads.


def _check_gate(config: MoEConfig, strata: Strata) -> None:
    gate = config.gate
    if GATES[gate].of_one_stratum:
        _check_one_stratum(f"{{gate}} {gate}", strata)
    if GATES[gate].takes_top_k:
        _check_top_k(config, strata)
    for name in (*FREE_EXPERTS, "balance", "scores"):
        value = getattr(config, name)
        if gate != "topk" and value != MoEConfig.__dataclass_fields__[name].default:
            raise OptionError(
                f"{{{name}}} {{value}}: it is an option of {{gate}} topk, not of {gate}",
                value=value,
            )
    if gate == "top-p":
        share("top_p", config.top_p)
    if config.gate_residual != "none":
        if gate != "topk" or strata.stacked:
            what = "{stacked}" if strata.stacked else f"{{gate}} {gate}"
            raise OptionError(
                f"{{gate_residual}} {{value}} with {what}: its gates have no such residual; expected none",
                value=config.gate_residual,
            )
        if config.gate_residual == "strata" and len(strata) == 1:
            raise OptionError(
                "{gate_residual} strata: {strata} {sizes} has a single gate; expected none, or layers",
                sizes=strata,
            )
    if GATES[gate].needs_capacity and not config.capacity_factor:
        expected = f"{{gate}} {gate} takes so many experts per token; expected a positive number"
        raise OptionError("{capacity_factor} {given}: " + expected, given=config.capacity_factor)
    if GATES[gate].extra_input == "id":
        _check_hash_table(gate, config.hash_table, strata.num_experts)


def _check_top_k(config: MoEConfig, strata: Strata) -> None:
    top_k = config.top_k
    if top_k < 1:
        _refuse("top_k", top_k, "expected a whole number of at least 1")
    fewest = min(strata.visible) + sum(getattr(config, name) for name in FREE_EXPERTS)
    if top_k > fewest:
        raise OptionError(
            "{top_k} {given}: a gate of {strata} {sizes} sees {fewest} expert{s}, so top-k can be at most "
            "{fewest}; or give every gate at least {given} experts",
            given=top_k,
            sizes=strata,
            fewest=fewest,
            s="" if fewest == 1 else "s",
        )


def _check_hash_table(gate: str, table: Tensor | None, num_experts: int) -> None:
    fits = table is not None and table.dim() == 1 and not table.is_floating_point()
    if fits and not table.is_meta:
        fits = bool(((table >= 0) & (table < num_experts)).all())
    if not fits:
        raise OptionError(
            f"{{hash_table}}: {{gate}} {gate} looks experts up; expected a vector with a number from 0 to "
            "{last} for each token id",
            last=num_experts - 1,
        )


def _check_balance(config: MoEConfig) -> None:
    for name in FREE_EXPERTS:
        if config.balance == "bias" and getattr(config, name):
            raise OptionError(
                f"{{{name}}} {{given}} with {{balance}} bias: {name.replace('_', ' ')} are balanced by the "
                "loss; expected 0, or {balance} loss",
                given=getattr(config, name),
            )
    if config.balance == "bias" and config.top_k > 1 and config.second_expert_policy == "sampling":
        raise OptionError(
            "{second_expert_policy} sampling with {balance} bias: a draw would pass over the bias; "
            "expected all or random"
        )
    if config.balance_over == "update" and not config.learns_balance:
        raise OptionError(
            "{balance_over} update: it is for a balance loss, and {gate} {kind} with {balance} "
            "{balance_given} has none; expected batch",
            kind=config.gate,
            balance_given=config.balance,
        )


def _check_later_strata(config: MoEConfig, strata: Strata) -> None:
    """How often tokens stop, in training and in evaluation: a matter of several strata."""
    later = len(strata.sizes) > 1 and not strata.stacked
    for name in ("capacity_budget", "exit_bias"):
        value = getattr(config, name)
        if value and not later:
            what = "with {stacked} no gate sees those of" if strata.stacked else "there are none in"
            raise OptionError(
                f"{{{name}}} {{given}}: it is about later strata, and {what} {{strata}} {{sizes}}; "
                "expected 0, or several strata such as 4-4",
                given=value,
                sizes=strata,
            )
    if config.capacity_budget and not 1 <= config.capacity_budget <= len(strata):
        expected = f"expected 0 (none) or a number from 1 to the {len(strata)} strata of {strata}"
        _refuse("capacity_budget", config.capacity_budget, expected)
    if math.isnan(config.exit_bias):
        _refuse("exit_bias", config.exit_bias, "expected a number, above 0 for fewer stops")


def _check_branches(config: MoEConfig, strata: Strata) -> None:
    """Networks beside the experts."""
    if config.shared_experts:
        _check_one_stratum(f"{{shared_experts}} {config.shared_experts}", strata)
    if config.residual:
        _check_one_stratum("{residual}", strata)
    if config.cmr:
        _check_one_stratum("{cmr}", strata)
    if config.residual and config.cmr:
        raise OptionError(
            "{residual} with {cmr}: both mix the experts with a network; expected one"
        )


def _check_one_stratum(option: str, strata: Strata) -> None:
    if strata.chain > 1:
        raise OptionError(option + ": expected {chain} 1, not {length}", length=strata.chain)
    if len(strata) > 1:
        raise OptionError(
            option + ": expected one stratum, such as {strata} {one}, not {sizes}",
            one=strata.num_experts,
            sizes=strata,
        )


def _check_norms(config: MoEConfig, strata: Strata) -> None:
    if config.norms != "released":
        return
    if strata.stacked:
        raise OptionError("{norms} released: {stacked} has no inner norms; expected paper")
    if strata.chain > 1:
        raise OptionError(
            "{norms} released: that code has no {chain} {length}; expected paper",
            length=strata.chain,
        )
    if config.dropout_per == "layer":
        raise OptionError(
            "{dropout_per} layer: with {norms} released no residual runs past the whole layer; expected "
            "stratum"
        )
