"""Every option of the block, declared once: name, type, default, flag, help, choices and bounds.

The block's arguments, fairseq's flags (models/options.py) and the checks are made from `MoEConfig`.
"""

import functools
import math
import numbers
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any, NamedTuple, Optional

from torch import Tensor

from smoe_fairseq.modules.activation import Activation
from smoe_fairseq.modules.experts import EXECUTIONS
from smoe_fairseq.modules.gates import GATES
from smoe_fairseq.modules.gates.linear import Gate
from smoe_fairseq.modules.registry import BRANCHES, parse_numbers
from smoe_fairseq.modules.routing import DROP_ORDERS
from smoe_fairseq.modules.strata import OptionError, Strata

# What computes a block faster than the general forward: the fused kernels, in training and in evaluation, and
# decoding on a CPU. An option's other values than its default are computed only by those that it names.
TRAINING, EVALUATION, INFERENCE = "fused, training", "fused, evaluation", "inference"
ALL = frozenset({TRAINING, EVALUATION, INFERENCE})
# Options that only some gates read; a gate of a plugin may read some of them, too.
OF_GATES = frozenset().union(*(kind.options | kind.decoder_options for kind in GATES.values()))
FIRST_RESIDUAL = {"strata": 1, "layers": 0}  # the first gate with a gate_residual of this kind


def gates_that_read(option: str) -> list[str]:
    """Names of the gates for which a model accepts an option that only some gates read."""
    kinds = GATES.items()
    return [name for name, kind in kinds if option in kind.options | kind.decoder_options]


def _only_with(option: str) -> str:
    return f"--moe-gate {', '.join(gates_that_read(option))}"


def _default_capacity() -> str:
    most, gates = Gate.default_capacity, {n: kind.default_capacity for n, kind in GATES.items()}
    others = [f"{value:g} with {name}" for name, value in gates.items() if value != most]
    return f"{most}, of --moe-gate {', '.join(others)}"


class Bounds(NamedTuple):
    """A range of valid numbers; it never contains NaN."""

    expected: str
    hold: Callable[[float], bool]


NUMBER = Bounds("expected a whole number from 0 to a million", lambda value: 0 <= value <= 10**6)
FACTOR = Bounds("expected 0 (no limit) or a positive number", lambda value: 0 <= value < math.inf)
PROBABILITY = Bounds("expected a probability from 0 to below 1", lambda value: 0 <= value < 1)
SHARE = Bounds("expected a number above 0, up to 1", lambda value: 0 < value <= 1)
SCALE = Bounds("expected a positive number", lambda value: 0 < value < math.inf)
COUNT = Bounds("expected a whole number of at least 1", lambda value: value >= 1)
ANY = Bounds("expected a number", lambda value: not math.isnan(value))

ONE_STRATUM, SEVERAL_STRATA = "one stratum and {chain} 1", "several strata, not {stacked}"
# What some options, other than in their defaults, are accepted with.
CONDITIONS = {
    ONE_STRATUM: lambda c: len(c.layout) == 1,
    SEVERAL_STRATA: lambda c: len(c.layout.sizes) > 1 and not c.stacked,
    "strata that are not {stacked}": lambda c: not c.stacked,
    "{chain} 1": lambda c: c.chain == 1,
    "{balance} loss": lambda c: c.balance == "loss",
    "{norms} paper": lambda c: c.norms == "paper",
    "no {cmr}": lambda c: not c.cmr,
}


def option(
    default,
    help: str,
    flag: str | None = None,
    choices: Collection[str] = (),
    bounds: Bounds | None = None,
    alias: str = "",
    needs: tuple = (),
    harmless: tuple = (),
    only: Collection[str] = (),
    fast: Collection[str] = (),
):
    """A field of `MoEConfig`.

    Args:
        flag: the model's option that sets it; None: ``moe_`` and its name; empty: no such option.
        choices: the valid values; empty: any.
        alias: a second flag.
        needs: another option, followed by its values for which this option has an effect; those `OF_GATES`
            need a gate that reads them.
        harmless: further values that are accepted where the option has no effect.
        only: the `CONDITIONS` of all values but the default.
        fast: those of `ALL` that compute all of its values, or ask the gates or experts whether they do.
    """
    metadata = {"help": help, "flag": flag, "choices": choices, "bounds": bounds, "alias": alias}
    metadata |= {"needs": needs, "harmless": harmless, "only": only, "fast": fast}
    return field(default=default, metadata=metadata)


fast_option = functools.partial(option, fast=ALL)


@dataclass(frozen=True, eq=False)
class MoEConfig:
    """Options of `StratifiedMoE`; ``--flags`` in the help texts are the models' flags.

    Raises:
        OptionError: a ValueError for an invalid value or combination; it names the option.
    """

    strata: str = fast_option(
        "2-2-2-2",
        "experts per stratum, in the paper's notation: 16 is a vanilla MoE, 4-12 has two strata; "
        "give one value for all MoE layers, or one per MoE layer of a side, separated by commas",
        "smoe_strata",
    )
    chain: int = option(
        1,
        "chain of experts: number of times that every token passes the experts; each pass has its "
        "own gate",
        "smoe_chain",
        fast={INFERENCE},
    )
    gate: str = fast_option(
        "topk",
        "how experts are chosen. "
        + "; ".join(f"{name}: {kind.summary}" for name, kind in GATES.items()),
        choices=GATES,
    )
    gate_options: str = fast_option(
        "",
        "numbers of a plugin's gate, as its class names them: NAME=NUMBER,...",
    )
    top_k: int = fast_option(
        2,
        "experts per token and stratum, null experts included; relu and threshold: their target mean",
        bounds=COUNT,
        harmless=(1,),
    )
    top_p: float = fast_option(
        0.4,
        f"{_only_with('top_p')}: least sum of the probabilities of a token's experts",
        bounds=SHARE,
    )
    threshold_step: float = fast_option(
        0.05,
        f"{_only_with('threshold_step')}: weight of the newest update in the running thresholds",
        bounds=SHARE,
    )
    scores: str = option(
        "softmax",
        f"{_only_with('scores')}: function that turns logits into scores",
        choices=("softmax", "sigmoid"),
        fast={INFERENCE},
    )
    gate_residual: str = option(
        "none",
        "MoE++: add a learnt linear map of an earlier gate's logits. strata: of the token's last "
        "stop in the layer; layers: of the previous MoE layer, too",
        choices=("none", "strata", "layers"),
        only=("strata that are not {stacked}",),
    )
    null_experts: int = option(
        0,
        "number of experts that return 0 and cost nothing; use a larger --moe-top-k with them",
        bounds=NUMBER,
        only=("{balance} loss",),
    )
    copy_experts: int = option(
        0,
        "number of experts that return their input; chosen like null experts",
        bounds=NUMBER,
        only=("{balance} loss",),
    )
    constant_experts: int = option(
        0,
        "number of experts that mix their input with a learnt vector; chosen like null experts",
        bounds=NUMBER,
        only=("{balance} loss",),
    )
    expert_ffn_dim: int = fast_option(
        0,
        "inner width of each expert, shared experts included; 0: the FFN dimension of the side",
        bounds=NUMBER,
    )
    shared_experts: int = option(
        0,
        "number of experts that every token uses, in addition to the chosen ones",
        bounds=NUMBER,
        only=(ONE_STRATUM,),
    )
    residual: bool = option(
        False,
        "PR-MoE: add a shared FFN, mixed with the experts by its own gate",
        only=(ONE_STRATUM, "no {cmr}"),
    )
    branches: str = option(
        "",
        "networks of plugins in parallel to the experts: names of @register_branch, separated by "
        "commas",
    )
    balance: str = option(
        "loss",
        "how the load of experts is balanced: by a loss, or by a bias that changes the choice but "
        "not the weights",
        choices=("loss", "bias"),
    )
    bias_step: float = fast_option(
        1e-3,
        "--moe-balance bias: change of the bias per update",
        bounds=SCALE,
        needs=("balance", "bias"),
    )
    balance_over: str = option(
        "batch",
        "tokens over which the balance loss counts first choices: a rank's batch, or all batches of "
        "the update so far, on all ranks",
        choices=("batch", "update"),
        fast={INFERENCE},
    )
    capacity_budget: float = option(
        0.0,
        "target mean of the requested capacity, from 1 to the number of strata; trained by a loss "
        "(--smoe-capacity-budget-wt); 0: no such loss",
        "smoe_capacity_budget",
        fast={INFERENCE},
        only=(SEVERAL_STRATA,),
    )
    exit_bias: float = fast_option(
        0.0,
        "evaluation only: above 0, tokens stop at fewer strata and translation is faster; below "
        "0, at more; set it with --model-overrides",
        "smoe_exit_bias",
        bounds=ANY,
        only=(SEVERAL_STRATA,),
    )
    stacked: bool = option(
        False,
        "naive stacking: each stratum is a separate MoE layer, without layer norm or residual "
        "between them",
        fast={INFERENCE},
    )
    capacity_factor: Optional[float] = fast_option(  # noqa: UP045 (fairseq reads no other form)
        None,
        "in training an expert processes at most ceil(factor * tokens / experts) tokens; 0: no "
        f"limit; default: {_default_capacity()}",
        bounds=FACTOR,
        harmless=(2.0, 0.0),
    )
    eval_capacity_factor: float = fast_option(
        0.0,
        "the same in evaluation; with 0, no limit, a translation does not depend on its batch",
        bounds=FACTOR,
    )
    second_expert_policy: str = fast_option(
        "sampling",
        "second and later experts in training. sampling: drawn by their scores; all: the best; "
        "random: the best, kept with probability min(1, 2 * weight)",
        choices=("sampling", "all", "random"),
        harmless=("all",),
    )
    gate_normalization: str = fast_option(
        "after-drop",
        "when the weights of a token's experts, if several, are divided by their sum: after "
        "dropping, before it, or never",
        choices=("after-drop", "before-drop", "none"),
        harmless=("none",),
    )
    drop_order: str = fast_option(
        "sentence",
        "which tokens an expert keeps when it is full. sentence: the first in the batch; score: those "
        "with the highest gate probability; random: a random choice",
        choices=DROP_ORDERS,
    )
    norms: str = option(
        "paper",
        "inner layer norms and residuals. paper: as in the paper; released: as in its released "
        "code, which also normalises the output of an MoE layer",
        "smoe_norm",
        choices=("paper", "released"),
        alias="--moe-norms",
        fast={INFERENCE},
        only=("strata that are not {stacked}", "{chain} 1"),
    )
    dropout_per: str = fast_option(
        "stratum",
        "apply dropout to the output of each stratum, or once to the output of the MoE layer",
        choices=("stratum", "layer"),
        only=("{norms} paper",),
    )
    gate_init_scale: float = fast_option(
        1.0,
        "scale of the gates' initial weights, relative to a linear layer",
        bounds=SCALE,
    )
    output_init_scale: float = fast_option(
        1.0,
        "scale of the initial weights and biases of the experts' second layer, relative to a "
        "linear layer",
        bounds=SCALE,
    )
    eom: float = option(
        0.0,
        "expert output masking: probability of dropping the output of a chosen expert",
        bounds=PROBABILITY,
    )
    fom: float = option(
        0.0,
        "final output masking: probability of dropping the output of all experts for a token",
        bounds=PROBABILITY,
    )
    gating_dropout: float = option(
        0.0,
        "probability in training that an MoE layer routes none of a batch's tokens",
        bounds=PROBABILITY,
        fast={EVALUATION, INFERENCE},
    )
    cmr: bool = option(
        False,
        "conditional MoE routing: a gate chooses between a shared FFN and the experts",
        only=(ONE_STRATUM,),
    )
    cmr_gate_drop: float = fast_option(
        0.0,
        "CMR: probability in training that a token uses only the shared FFN",
        "cmr_gate_drop",
        bounds=PROBABILITY,
        needs=("cmr", True),
    )
    expert_parallel: bool = fast_option(
        False,
        "shard the experts of every MoE layer over the ranks; needs --ddp-backend legacy_ddp",
        "expert_parallel",
    )
    # Without a flag of their own: the first three are the transformer's options of the same names, and the
    # table is computed from its dictionary.
    activation_fn: Activation = fast_option(
        "relu",
        "the experts' activation: a function, or the name of one in torch.nn.functional",
        flag="",
    )
    dropout: float = fast_option(
        0.0,
        "dropout of the block's output before its residual; see dropout_per",
        flag="",
    )
    activation_dropout: float = fast_option(
        0.0, "dropout after the activation in the experts", flag=""
    )
    hash_table: Tensor | None = fast_option(
        None,
        "the expert of each token id, of shape (V,)",
        flag="",
    )
    execution: str = fast_option(
        "auto",
        "how experts are computed. per-expert: a product for each; grouped: one for all; fused: the "
        "whole block in a few kernels (a top-k gate on a GPU, with Triton; else as auto); "
        "fused-triton: the same, with our own products in place of torch's; auto: fused where it "
        "applies, else grouped where the device has that in one kernel, else per-expert",
        choices=EXECUTIONS,
    )

    def __post_init__(self):
        if self.capacity_factor is None and self.gate in GATES:
            object.__setattr__(self, "capacity_factor", GATES[self.gate].default_capacity)
        for each in fields(self):
            name, value, data = each.name, getattr(self, each.name), each.metadata
            if data["choices"] and value not in data["choices"]:
                expected = f"expected one of {', '.join(data['choices'])}"
                raise OptionError(f"{{{name}}} {{value}}: {expected}", value=repr(value))
            kind = numbers.Integral if type(each.default) is int else numbers.Real
            is_number = type(each.default) in (int, float) or data["bounds"]
            if is_number and not isinstance(value, kind):
                raise OptionError(f"{{{name}}} {{value}}: expected a number", value=repr(value))
            if data["bounds"] and not data["bounds"].hold(value):
                raise OptionError(f"{{{name}}} {value}: {data['bounds'].expected}")
        for sentence in chain(without_effect(vars(self)).values(), contradictions(self)):
            raise OptionError(sentence)

    @property
    def layout(self) -> Strata:
        """The parsed strata."""
        return Strata.parse(self.strata, self.stacked, self.chain)

    @property
    def extra(self) -> list[str]:
        """The names in ``branches``."""
        return [name for name in self.branches.split(",") if name]

    @functools.cached_property
    def fast(self) -> frozenset[str]:
        """Those of `ALL` that compute all of these options."""
        others = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return ALL.intersection(*(f.metadata["fast"] for f in others))

    @property
    def free_experts(self) -> int:
        """The experts that have no FFN."""
        return self.null_experts + self.copy_experts + self.constant_experts

    @property
    def learns_balance(self) -> bool:
        """Whether the balance loss is trained on."""
        return GATES[self.gate].has_balance_loss and self.balance == "loss"

    @classmethod
    def flags(cls) -> dict[str, str]:
        """Maps the block's options to the models' options that set them."""
        flags = {f.name: f.metadata["flag"] for f in fields(cls)}
        flags = {name: f"moe_{name}" if flag is None else flag for name, flag in flags.items()}
        return {name: flag for name, flag in flags.items() if flag}


def without_effect(options: Mapping[str, Any]) -> dict[str, str]:
    """The options of `MoEConfig` that change nothing beside the others, each with a sentence about it."""
    found = {}
    for each in fields(MoEConfig):
        name, needs = each.name, each.metadata["needs"]
        if name in OF_GATES:
            needs = "gate", *gates_that_read(name)
        if not needs or name not in options:
            continue
        other, *values = needs
        accepted = each.default, *each.metadata["harmless"]
        # Options of a model are enumerations, equal to their values only as strings.
        value = options[name]
        is_harmless = value in accepted or str(value) in map(str, accepted)
        if is_harmless or str(options[other]) in map(str, values):
            continue
        expected = " or ".join([f"{{{other}}}"] if values == [True] else map(str, values))
        where = "" if values == [True] else f"{{{other}}} "
        found[name] = f"{{{name}}} {value}: expected it with {where}{expected}"
    return found


def contradictions(c: MoEConfig) -> Iterator[str]:
    """What cannot be combined, as sentences for `OptionError`."""
    strata, kind = c.layout, GATES[c.gate]
    for each in fields(c):
        name, value = each.name, getattr(c, each.name)
        for condition in each.metadata["only"]:
            if value != each.default and not CONDITIONS[condition](c):
                shown = f"{{{name}}}" if value is True else f"{{{name}}} {value}"
                yield f"{shown} with {{strata}} {strata}: expected it with {condition}"
    try:
        parse_numbers(c.gate_options, kind.numbers)
    except ValueError as error:
        yield f"{{gate_options}} {error}, with {{gate}} {c.gate}"
    if kind.single_stratum and not CONDITIONS[ONE_STRATUM](c):
        yield f"{{gate}} {c.gate} with {{strata}} {strata}: expected it with {ONE_STRATUM}"
    fewest = min(strata.visible) + c.free_experts
    if "top_k" in kind.options and c.top_k > fewest:
        yield (
            f"{{top_k}} {c.top_k}: a gate of {{strata}} {strata} sees {fewest} expert{'s' * (fewest != 1)}; "
            f"expected at most {fewest}, or larger strata"
        )
    if c.gate_residual == "strata" and len(strata) == 1:
        yield f"{{gate_residual}} strata: {{strata}} {strata} has one gate; expected none or layers"
    if kind.needs_capacity and not c.capacity_factor:
        mean = f"with {{gate}} {c.gate} it is the mean number of experts per token"
        yield f"{{capacity_factor}} {c.capacity_factor}: {mean}; expected a positive number"
    if kind.extra_input == "id" and not _is_table(c.hash_table, strata.num_experts):
        numbers = f"a number from 0 to {strata.num_experts - 1} for each token id"
        yield f"{{hash_table}}: {{gate}} {c.gate} expects a vector with {numbers}"
    if c.balance == "bias" and c.top_k > 1 and c.second_expert_policy == "sampling":
        expected = "expected all or random, since sampling ignores the bias"
        yield f"{{second_expert_policy}} sampling with {{balance}} bias: {expected}"
    if c.balance_over == "update" and not c.learns_balance:
        none = f"{{gate}} {c.gate} with {{balance}} {c.balance} has no balance loss"
        yield f"{{balance_over}} update: {none}; expected batch"
    if c.capacity_budget and not 1 <= c.capacity_budget <= len(strata):
        expected = f"expected 0 (none), or 1 to the {len(strata)} strata of {strata}"
        yield f"{{capacity_budget}} {c.capacity_budget}: {expected}"
    if unknown := [name for name in c.extra if name not in BRANCHES]:
        known = ", ".join(BRANCHES) or "those of a plugin, which has to be imported"
        yield f"{{branches}} {unknown[0]}: expected names of {known}"


def _is_table(table: Tensor | None, num_experts: int) -> bool:
    """Whether the table has a valid expert for each token id."""
    fits = table is not None and table.dim() == 1 and not table.is_floating_point()
    return fits and (table.is_meta or bool(((table >= 0) & (table < num_experts)).all()))
