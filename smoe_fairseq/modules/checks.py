"""Checks of a block's options: each raises OptionError, one sentence that names the parameter."""

import math

from smoe_fairseq.modules.balance import BALANCED_OVER, BALANCES
from smoe_fairseq.modules.capacity import DROP_ORDERS
from smoe_fairseq.modules.gates.make import GATES, OF_ONE_STRATUM, GateOptions
from smoe_fairseq.modules.gates.top_k import GATE_NORMALIZATIONS, SECOND_EXPERT_POLICIES
from smoe_fairseq.modules.option_error import OptionError
from smoe_fairseq.modules.strata import Strata


def check_gate(options: GateOptions, strata: Strata) -> None:
    """Each option by itself, and those that do not go together."""
    check_choice("gate", options.gate, GATES)
    check_number("null_experts", options.null_experts)
    check_factor("capacity_factor", options.capacity_factor)
    check_factor("eval_capacity_factor", options.eval_capacity_factor)
    check_choice("gate_normalization", options.gate_normalization, GATE_NORMALIZATIONS)
    check_choice("second_expert_policy", options.second_expert_policy, SECOND_EXPERT_POLICIES)
    check_choice("drop_order", options.drop_order, DROP_ORDERS)
    check_scale("gate_init_scale", options.gate_init_scale)
    check_choice("balance", options.balance, BALANCES)
    check_scale("bias_step", options.bias_step)
    if options.gate in OF_ONE_STRATUM:
        check_one_stratum(f"{{gate}} {options.gate}", strata)
    if options.gate == "topk":
        check_top_k(options.top_k, strata, options.null_experts)
    elif options.null_experts or options.balance == "bias":
        name = "null_experts" if options.null_experts else "balance"
        raise OptionError(
            f"{{{name}}} {{value}}: it is an option of {{gate}} topk, not of {options.gate}",
            value=getattr(options, name),
        )
    if options.gate == "top-p" and not 0 < options.top_p <= 1:
        _refuse("top_p", options.top_p, "expected a probability above 0, up to 1")
    if options.gate == "expert-choice" and not options.capacity_factor:
        expected = (
            "{gate} expert-choice takes so many experts per token; expected a positive number"
        )
        raise OptionError("{capacity_factor} {given}: " + expected, given=options.capacity_factor)
    if options.gate == "hash":
        check_hash_table(options.hash_table, strata.num_experts)
    if options.balance == "bias":
        check_bias(options)


def check_top_k(top_k: int, strata: Strata, null_experts: int) -> None:
    if top_k < 1:
        _refuse("top_k", top_k, "expected a whole number of at least 1")
    fewest = min(strata.visible) + null_experts
    if top_k > fewest:
        raise OptionError(
            "{top_k} {given}: a gate of {strata} {sizes} sees {fewest} expert{s}, so top-k can be at most "
            "{fewest}; or give every gate at least {given} experts",
            given=top_k,
            sizes=strata,
            fewest=fewest,
            s="" if fewest == 1 else "s",
        )


def check_hash_table(table, num_experts: int) -> None:
    fits = table is not None and table.dim() == 1 and not table.is_floating_point()
    if fits and not table.is_meta:
        fits = bool(((table >= 0) & (table < num_experts)).all())
    if not fits:
        raise OptionError(
            "{hash_table}: {gate} hash looks experts up; expected a vector with a number from 0 to {last} "
            "for each token id",
            last=num_experts - 1,
        )


def check_bias(options: GateOptions) -> None:
    """What the bias could not balance."""
    if options.null_experts:
        raise OptionError(
            "{null_experts} {given} with {balance} bias: null experts are balanced by the loss; expected 0, "
            "or {balance} loss",
            given=options.null_experts,
        )
    if options.top_k > 1 and options.second_expert_policy == "sampling":
        raise OptionError(
            "{second_expert_policy} sampling with {balance} bias: a draw would pass over the bias; "
            "expected all or random"
        )


def check_balance_over(balance_over: str, options: GateOptions) -> None:
    check_choice("balance_over", balance_over, BALANCED_OVER)
    if balance_over == "update" and not options.learns_balance:
        raise OptionError(
            "{balance_over} update: it is for a balance loss, and {gate} {kind} with {balance} "
            "{balance_given} has none; expected batch",
            kind=options.gate,
            balance_given=options.balance,
        )


def check_strata_knobs(capacity_budget: float, exit_bias: float, strata: Strata) -> None:
    """How often tokens stop, in training and in evaluation: a matter of several strata."""
    later = len(strata.sizes) > 1 and not strata.stacked
    for name, value in (("capacity_budget", capacity_budget), ("exit_bias", exit_bias)):
        if value and not later:
            what = "with {stacked} no gate sees those of" if strata.stacked else "there are none in"
            raise OptionError(
                f"{{{name}}} {{given}}: it is about later strata, and {what} {{strata}} {{sizes}}; "
                "expected 0, or several strata such as 4-4",
                given=value,
                sizes=strata,
            )
    if capacity_budget and not 1 <= capacity_budget <= len(strata):
        expected = f"expected 0 (none) or a number from 1 to the {len(strata)} strata of {strata}"
        _refuse("capacity_budget", capacity_budget, expected)
    if math.isnan(exit_bias):
        _refuse("exit_bias", exit_bias, "expected a number, above 0 for fewer stops")


def check_beside(shared_experts: int, residual: bool, cmr: bool, strata: Strata) -> None:
    """Networks beside the experts."""
    check_number("shared_experts", shared_experts)
    if shared_experts:
        check_one_stratum(f"{{shared_experts}} {shared_experts}", strata)
    if residual:
        check_one_stratum("{residual}", strata)
    if cmr:
        check_one_stratum("{cmr}", strata)
    if residual and cmr:
        raise OptionError(
            "{residual} with {cmr}: both mix the experts with a network; expected one"
        )


def check_number(name: str, number: int) -> None:
    if number < 0:
        _refuse(name, number, "expected a whole number of at least 0")


def check_one_stratum(option: str, strata: Strata) -> None:
    if strata.chain > 1:
        raise OptionError(option + ": expected {chain} 1, not {length}", length=strata.chain)
    if len(strata) > 1:
        raise OptionError(
            option + ": expected one stratum, such as {strata} {one}, not {sizes}",
            one=strata.num_experts,
            sizes=strata,
        )


def check_factor(name: str, factor: float) -> None:
    if not (factor >= 0 and math.isfinite(factor)):
        _refuse(name, factor, "expected 0 (no limit) or a positive number")


def check_probability(name: str, p: float) -> None:
    if not 0 <= p < 1:
        _refuse(name, p, "expected a probability from 0 to below 1")


def check_scale(name: str, scale: float) -> None:
    if not (scale > 0 and math.isfinite(scale)):
        _refuse(name, scale, "expected a positive number")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        _refuse(name, repr(value), f"expected one of {', '.join(choices)}")


def check_norms(norms: str, dropout_per: str, strata: Strata) -> None:
    if norms == "released" and strata.stacked:
        raise OptionError("{norms} released: {stacked} has no inner norms; expected paper")
    if norms == "released" and strata.chain > 1:
        raise OptionError(
            "{norms} released: that code has no {chain} {length}; expected paper",
            length=strata.chain,
        )
    if norms == "released" and dropout_per == "layer":
        raise OptionError(
            "{dropout_per} layer: with {norms} released no residual runs past the whole layer; expected "
            "stratum"
        )


def _refuse(name: str, value, expected: str) -> None:
    raise OptionError(f"{{{name}}} {{given}}: {{expected}}", given=value, expected=expected)
