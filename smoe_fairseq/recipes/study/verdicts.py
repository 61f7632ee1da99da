"""The paper's claims about scores, each with what this study says of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from smoe_fairseq.recipes.study.student import Difference, difference

CONFIRMED, OPEN, REFUTED = "confirmed here", "not confirmed here", "refuted here"
MARGIN = 0.3  # BLEU by which a model may be behind one that it is said to reach


@dataclass(frozen=True)
class Verdict:
    """``claim`` in words, the difference in mean BLEU that it is about, and what that says."""

    claim: str
    difference: Difference
    verdict: str


def verdicts(points: Mapping[str, Sequence[float]]) -> list[Verdict]:
    """Of the claims whose systems are there; ``points`` has, by method, BLEU of each seed.

    "Confirmed" and "refuted" are said only where the interval over seeds excludes the opposite: one that
    holds zero, and any difference of single runs, leaves a claim open.
    """
    found = []
    smoe = [m for m in points if m.startswith("smoe-")]
    best = max(smoe, key=lambda m: sum(points[m]) / len(points[m]), default=None)
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


def _above(points, lower: str, upper: str, claim: str, margin: float = 0.0) -> Verdict:
    found = difference(points[lower], points[upper])
    if found.low is None:
        return Verdict(claim, found, f"{OPEN}: a single run")
    if found.low > -margin:
        return Verdict(claim, found, CONFIRMED)
    return Verdict(claim, found, REFUTED if found.high < -margin else OPEN)
