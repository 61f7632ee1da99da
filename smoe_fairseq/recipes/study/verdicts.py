"""The paper's claims, each with what this study says of it: (a) to (d) about scores, (e) about cost."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from smoe_fairseq.recipes.study.student import Difference, difference

CONFIRMED, OPEN, REFUTED = "confirmed here", "not confirmed here", "refuted here"
SMOE = re.compile(r"smoe-\d")  # as the paper has it: other methods' names go on otherwise
MARGIN = 0.3  # BLEU by which a model may be behind one that it is said to reach
NEAR = 0.1  # share by which the time of a token may differ from what its FLOPs say


@dataclass(frozen=True)
class Verdict:
    """``claim`` in words, the number it is about and what that says; ``methods`` that it compares."""

    claim: str
    difference: Difference
    verdict: str
    methods: tuple[str, str] | None = None


def decide(claim: str, found: Difference, margin: float = 0.0, methods=None) -> Verdict:
    """The claim is that ``found`` is above zero, or no further below than ``margin``.

    "Confirmed" and "refuted" are said only where the interval excludes the opposite: one that holds zero,
    and any single number, leaves a claim open.
    """
    if found.low is None:
        return Verdict(claim, found, f"{OPEN}: a single run", methods)
    if found.low > -margin:
        return Verdict(claim, found, CONFIRMED, methods)
    return Verdict(claim, found, REFUTED if found.high < -margin else OPEN, methods)


def about_scores(points: Mapping[str, Sequence[float]]) -> list[Verdict]:
    """Of the claims whose systems are there; ``points`` has, by method, BLEU of each seed."""
    found = []
    best = best_smoe(points)
    if best is not None:
        for other in ("moe", "switch", "moe-eom", "moe-cmr"):
            if other in points:
                found.append(_above(points, other, best, f"(a) {best} is above {other}"))
    for stacked in sorted(m for m in points if m.startswith("stacked-")):
        if "moe" in points:
            found.append(_above(points, stacked, "moe", f"(b) moe is above {stacked}"))
    if best is not None and "moe-16" in points:
        claim = f"(c) {best} reaches moe-16, within {MARGIN} BLEU"
        found.append(_above(points, "moe-16", best, claim, MARGIN))
    if {"smoe-4-4", "smoe-2-2-2-2"} <= points.keys():
        claim = "(d) fewer experts per stratum are better: smoe-2-2-2-2 is above smoe-4-4"
        found.append(_above(points, "smoe-4-4", "smoe-2-2-2-2", claim))
    return found


def best_smoe(points: Mapping[str, Sequence[float]]) -> str | None:
    """The SMoE of highest mean."""
    smoe = [method for method in points if SMOE.match(method)]
    return max(smoe, key=lambda m: sum(points[m]) / len(points[m]), default=None)


def about_cost(
    times: Mapping[str, Sequence[float]], flops: Mapping[str, float], baseline: str
) -> list[Verdict]:
    """Whether a token of each SMoE takes as much longer than one of ``baseline`` as it has more FLOPs.

    Args:
        times: by method, seconds of training per word of each seed.
        flops: per token.
    """
    found = []
    for method in times:
        if not SMOE.match(method) or baseline not in times:
            continue
        more = math.log(flops[method] / flops[baseline])
        logs = [[math.log(x) for x in times[m]] for m in (baseline, method)]
        d = difference(*logs)
        ends = None if d.low is None else (math.expm1(d.low - more), math.expm1(d.high - more))
        beside = Difference(math.expm1(d.mean - more), *(ends or (None, None)))
        claim = (
            f"(e) {method} takes as much more time than {baseline} as FLOPs "
            f"({math.expm1(more):+.0%}), within {NEAR:.0%}"
        )
        if ends is None:
            verdict = f"{OPEN}: a single run"
        elif max(map(abs, ends)) <= NEAR:
            verdict = CONFIRMED
        else:
            apart = ends[0] > NEAR or ends[1] < -NEAR
            verdict = REFUTED if apart else OPEN
        found.append(Verdict(claim, beside, verdict))
    return found


def _above(points, lower: str, upper: str, claim: str, margin: float = 0.0) -> Verdict:
    found = difference(points[lower], points[upper])
    return decide(claim, found, margin, (lower, upper))
