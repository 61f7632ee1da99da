"""The paper's claims, each with what this study says of it: (a) to (d) about scores, (e) about cost."""

import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from smoe_fairseq.recipes.study.student import Difference, paired

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


def about_scores(points: Mapping[str, Mapping[int | None, float]]) -> list[Verdict]:
    """Of the claims whose systems are there, with a seed that both have; ``points`` has, by method, BLEU by
    seed.
    """
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
    return [verdict for verdict in found if verdict is not None]


def best_smoe(points: Mapping[str, Mapping[int | None, float]]) -> str | None:
    """The SMoE of highest mean."""
    smoe = [method for method in points if SMOE.match(method)]
    return max(smoe, key=lambda m: statistics.fmean(points[m].values()), default=None)


def about_cost(
    times: Mapping[str, Mapping[int | None, float]], flops: Mapping[str, float], baseline: str
) -> list[Verdict]:
    """Whether a token of each SMoE takes as much longer than one of ``baseline`` as it has more FLOPs.

    Args:
        times: by method, seconds of training per word, by seed.
        flops: per token.
    """
    found = []
    for method in times:
        if not SMOE.match(method) or baseline not in times:
            continue
        more = math.log(flops[method] / flops[baseline])
        logs = [{s: math.log(x) for s, x in times[m].items()} for m in (baseline, method)]
        if (d := paired(*logs)) is None:
            continue
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


def _above(points, lower: str, upper: str, claim: str, margin: float = 0.0) -> Verdict | None:
    found = paired(points[lower], points[upper])
    return None if found is None else decide(claim, found, margin, (lower, upper))
