"""Checks of a block's options: each raises OptionError, one sentence that names the parameter."""

import math

from smoe_fairseq.modules.option_error import OptionError
from smoe_fairseq.modules.strata import Strata


def check_top_k(top_k: int, strata: Strata) -> None:
    if top_k not in (1, 2):
        raise OptionError("{top_k} {given}: expected 1 or 2", given=top_k)
    fewest = min(strata.visible)
    if top_k > fewest:
        raise OptionError(
            "{top_k} {given}: a gate of {strata} {sizes} sees {fewest} expert, so top-k can be at most "
            "{fewest}; or give every gate at least {given} experts",
            given=top_k,
            sizes=strata,
            fewest=fewest,
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


def check_cmr(cmr: bool, strata: Strata) -> None:
    if cmr and len(strata) > 1:
        raise OptionError(
            "{cmr}: expected one stratum, such as {strata} {one}, not {sizes}",
            one=strata.num_experts,
            sizes=strata,
        )


def check_norms(norms: str, dropout_per: str, stacked: bool) -> None:
    if norms == "released" and stacked:
        raise OptionError("{norms} released: {stacked} has no inner norms; expected paper")
    if norms == "released" and dropout_per == "layer":
        raise OptionError(
            "{dropout_per} layer: with {norms} released no residual runs past the whole layer; expected "
            "stratum"
        )


def _refuse(name: str, value, expected: str) -> None:
    raise OptionError(f"{{{name}}} {{given}}: {{expected}}", given=value, expected=expected)
