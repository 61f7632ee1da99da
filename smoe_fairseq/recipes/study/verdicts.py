"""The paper's claims, each with what this study says of it: (a) to (d) about scores, (e) about cost."""

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from smoe_fairseq.recipes.study.blocks import BySeed, chance
from smoe_fairseq.recipes.tables.student import Difference, paired

CONFIRMED, OPEN, REFUTED = "confirmed here", "not confirmed here", "refuted here"
MARGIN = 0.3  # BLEU by which a model may be behind one that it is said to reach
NEAR = 0.1  # share by which the time of a token may differ from what its FLOPs say
_SMOE = re.compile(r"smoe((?:-\d+){2,})")  # the paper's: others' names go on otherwise


@dataclass(frozen=True)
class Verdict:
    """``claim`` in words, the number it is about and what that says.

    ``found`` is None where there is no seed to tell from, ``spec`` is how its numbers are written;
    ``methods`` are two whose scores are compared, ``alone`` what is found of these two without the others,
    ``directions`` in how many it is so.
    """

    claim: str
    found: Difference | None
    verdict: str
    methods: tuple[str, str] | None = None
    alone: Difference | None = None
    spec: str = "+.2f"
    directions: str = ""


def decide(claim: str, found: Difference | None, least=-math.inf, most=math.inf, **more) -> Verdict:
    """The claim is that what was ``found`` lies above ``least`` and below ``most``.

    "Confirmed" and "refuted" are said only where the interval excludes the opposite: one that holds either
    end, and any single seed, leaves a claim open.
    """
    if found is None:
        verdict = f"{OPEN}: no seed that both have"
    elif found.count < 2 or found.low is None:
        verdict = f"{OPEN}: a single seed"
    elif least < found.low and found.high < most:
        verdict = CONFIRMED
    else:
        verdict = REFUTED if found.high < least or most < found.low else OPEN
    return Verdict(claim, found, verdict, **more)


def strata(method: str) -> tuple[int, ...]:
    """Experts of each stratum of an SMoE as the paper has it; of other methods none."""
    found = _SMOE.fullmatch(method)
    return tuple(int(size) for size in found[1][1:].split("-")) if found else ()


def about_scores(points: Mapping[str, BySeed], experts: int) -> list[Verdict]:
    """Of the claims whose systems are there; ``points`` has, by method, BLEU by seed.

    Each SMoE of ``experts`` experts, which are those of the data set's ``moe``, is compared: to choose the
    best one, and test it on what it was chosen by, would favour it.
    """
    smoe = [method for method in points if sum(strata(method)) == experts]
    claims: list[tuple[str, str, str, float]] = []  # upper, lower, words, least
    for method, other in itertools.product(smoe, ("moe", "switch", "moe-eom", "moe-cmr")):
        claims.append((method, other, f"(a) {method} is above {other}", 0))
    for stacked in (m for m in points if m.startswith("stacked-")):
        claims.append(("moe", stacked, f"(b) moe is above {stacked}", 0))
    twice = f"moe-{2 * experts}"
    for method in smoe:
        words = f"(c) {method} reaches {twice}, within {MARGIN} BLEU"
        claims.append((method, twice, words, -MARGIN))
    even = sorted((m for m in smoe if len(set(strata(m))) == 1), key=lambda m: len(strata(m)))
    for coarse, fine in itertools.pairwise(even):
        words = f"(d) fewer experts per stratum are better: {fine} is above {coarse}"
        claims.append((fine, coarse, words, 0))
    by_chance = chance(points)
    found = []
    for upper, lower, words, least in claims:
        if upper in points and lower in points:
            both = points[lower], points[upper]
            apart, alone = by_chance.between(*both), paired(*both)
            found.append(decide(words, apart, least, methods=(lower, upper), alone=alone))
    return found


def about_cost(
    times: Mapping[str, Mapping], flops: Mapping[str, float], baseline: str
) -> list[Verdict]:
    """Whether a token of each SMoE takes about as much longer than one of ``baseline`` as it has more FLOPs.

    Args:
        times: by method, seconds of training per token, by seed and machine: those of two are not compared.
        flops: per token.
    """
    found = []
    for method in times:
        if not strata(method) or baseline not in times:
            continue
        ratio = flops[method] / flops[baseline]
        logs = [{s: math.log(x) for s, x in times[m].items()} for m in (baseline, method)]
        ends = ratio / (1 + NEAR) - 1, ratio * (1 + NEAR) - 1
        claim = (
            f"(e) time per token of {method} is within {NEAR:.0%} of what FLOPs say, {ratio - 1:+.0%} beside "
            f"{baseline}: from {ends[0]:+.0%} to {ends[1]:+.0%}"
        )
        logs_apart = paired(*logs)
        more = None if logs_apart is None else logs_apart.map(math.expm1)
        found.append(decide(claim, more, *ends, spec="+.1%"))
    return found
