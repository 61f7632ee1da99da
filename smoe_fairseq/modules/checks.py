"""Checks of a block's options: each raises ValueError with one sentence that names fairseq's flag."""

import math

from smoe_fairseq.modules.strata import Strata


def check_top_k(top_k: int, strata: Strata) -> None:
    if top_k not in (1, 2):
        raise ValueError(f"--moe-top-k {top_k}: expected 1 or 2")
    fewest = min(strata.visible)
    if top_k > fewest:
        raise ValueError(
            f"--moe-top-k {top_k}: a gate of --smoe-strata {strata} sees {fewest} expert, so top-k "
            f"can be at most {fewest}; or give every gate at least {top_k} experts"
        )


def check_factor(flag: str, factor: float) -> None:
    if not (factor >= 0 and math.isfinite(factor)):
        raise ValueError(f"{flag} {factor}: expected 0 (no limit) or a positive number")


def check_probability(flag: str, p: float) -> None:
    if not 0 <= p < 1:
        raise ValueError(f"{flag} {p}: expected a probability from 0 to below 1")


def check_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{flag} {value!r}: expected one of {', '.join(choices)}")


def check_cmr(cmr: bool, strata: Strata) -> None:
    if cmr and len(strata) > 1:
        raise ValueError(
            f"--moe-cmr: expected one stratum, such as --smoe-strata {strata.num_experts}, "
            f"not {strata}"
        )


def check_scale(flag: str, scale: float) -> None:
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"{flag} {scale}: expected a positive number")


def check_norms(norms: str, dropout_per: str, stacked: bool) -> None:
    if norms == "released" and stacked:
        raise ValueError("--moe-norms released: --moe-stacked has no inner norms; expected paper")
    if norms == "released" and dropout_per == "layer":
        raise ValueError(
            "--moe-dropout-per layer: with --moe-norms released no residual runs past the whole layer; "
            "expected stratum"
        )
