"""The claims that a study tests: the paper's, and those that a data set lists in advance."""

import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from smoe_fairseq.analysis.results import pivot
from smoe_fairseq.recipes.config import Dataset
from smoe_fairseq.recipes.evaluation import scores
from smoe_fairseq.recipes.evaluation.comparison import (
    BySeed,
    Chance,
    Difference,
    chance,
    interval,
    paired,
)
from smoe_fairseq.recipes.evaluation.grid import MISSING, Grid
from smoe_fairseq.recipes.folders import seed_in
from smoe_fairseq.recipes.study import sentences
from smoe_fairseq.recipes.study.results import Result, Systems, by_seed

CONFIRMED, OPEN, REFUTED, MIXED = "confirmed", "open", "refuted", "mixed"
NO_SEED, SINGLE_SEED = f"{OPEN}: no seed that both have", f"{OPEN}: a single seed"
MARGIN = 0.3  # a model "reaches" another one if it is at most so much BLEU behind
NEAR = 0.1  # relative difference allowed between measured time and what FLOPs predict
SHARE = (
    0.2  # bound for the range of requested capacity of one target language, over that of the others
)
HEADER = ["claim", "seeds", "found", "of these alone", "loss", "directions", "verdict"]
NOTES = {  # below the table, by the letters of the claims that they are about
    "abcd": "- **(a) to (d)**: found is the difference of the mean BLEU over the seeds that both systems "
    "have. Loss is that of the validation loss, in bits per token, where below zero is better.\n"
    "- **of these alone** is the interval of the paired t-test of the two systems, which does not use "
    "the other runs. A verdict that it does not bear out is weak.\n"
    "- **directions** of (a) to (d) are those in which the two systems differ by sacreBLEU's paired "
    f"bootstrap over sentences (p < {sentences.LEVEL} on each side, so two equal systems differ in one "
    "direction of ten). Of the others it is the sign of the mean over seeds.",
    "e": "- **(e)**: how much more time a token takes in training, on the same machine (paired t-test). "
    "Other work on the machine counts.",
    "fgh": "- **(f) to (h)** are measured on the test set's text, with the references as decoder input "
    "(t-test over the seeds). If a test set is parallel in all languages, the targets in one language "
    "are the same sentences for all sources.",
}
_SMOE = re.compile(r"smoe((?:-\d+){2,})")  # the paper's SMoE systems
Routing = dict  # as `results.summary` returns it


MEASURES: dict[str, Callable[[Result], float]] = {
    "loss": lambda result: result.validation,
    "chrF++": lambda result: scores.mean_of(result.scores, scores.chrf),
    "BLEU": lambda result: result.bleu,
    "BLEU without penalty": lambda result: scores.mean_of(
        result.scores, lambda score: score.unpenalized
    ),
}


class Measure:
    """The values of one of `MEASURES` for all runs, and differences between systems."""

    def __init__(self, systems: Systems, name: str):
        self.of = MEASURES[name]
        self.points = by_seed(systems, self.of)
        self.chance = chance(self.points)
        self.digits = 3 if name == "loss" else 2
        self.spec = f"+.{self.digits}f"

    def less(self, system: str, other: str, systems: Systems | None = None) -> Difference | None:
        """``system`` less ``other`` over their common seeds; None without one.

        ``systems`` restricts the runs that are compared; chance is always estimated from all runs.
        """
        points = self.points if systems is None else by_seed(systems, self.of)
        if system not in points or other not in points:
            return None
        return self.chance.between(points[other], points[system])

    def cell(self, found: Difference | None) -> str:
        return MISSING if found is None else format(found, self.spec)


@dataclass(frozen=True)
class Verdict:
    """A ``claim`` in words, the number ``found`` for it (None without a common seed), and the verdict.

    ``spec`` is the number's format. Where the scores of two ``methods`` are compared, ``alone`` is their
    difference by the paired t-test, without the other systems. ``directions`` says in how many directions
    the claim holds.
    """

    claim: str
    found: Difference | None
    verdict: str
    methods: tuple[str, str] | None = None
    alone: Difference | None = None
    spec: str = "+.2f"
    directions: str = ""


def judge(found: Difference | None, least=-math.inf, most=math.inf) -> str:
    """Whether ``found`` is above ``least`` and below ``most``.

    It is open with a single seed, or if the interval contains ``least`` or ``most``.
    """
    if found is None:
        return NO_SEED
    if found.count < 2 or found.low is None:
        return SINGLE_SEED
    if least < found.low and found.high < most:
        return CONFIRMED
    return REFUTED if found.high < least or most < found.low else OPEN


def decide(claim: str, found: Difference | None, least=-math.inf, most=math.inf, **more) -> Verdict:
    """The verdict on the claim that ``found`` is above ``least`` and below ``most``."""
    return Verdict(claim, found, judge(found, least, most), **more)


def strata(method: str) -> tuple[int, ...]:
    """The experts of each stratum of one of the paper's SMoE systems; empty for other methods."""
    found = _SMOE.fullmatch(method)
    return tuple(int(size) for size in found[1][1:].split("-")) if found else ()


def about_scores(points: Mapping[str, BySeed], experts: int) -> list[Verdict]:
    """Verdicts on claims (a) to (d) for the systems in ``points``, which has BLEU by method and seed.

    All SMoE systems with as many ``experts`` as the data set's ``moe`` are compared: choosing the best one by
    the same scores would favour it.
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
    """Verdicts on claim (e): an SMoE's time per token, over ``baseline``'s, is the ratio of their FLOPs.

    Args:
        times: by method, seconds of training per token by (seed, machine).
        flops: by method, per token.
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


def about_capacity(runs: Mapping[str, Sequence[Routing]]) -> list[Verdict]:
    """Verdicts on claims (f) to (h); ``runs`` has the summaries of each seed's analysis, by method."""
    claims = (_languages, _frequency, _first_block)
    return [v for claim in claims for method, seeds in runs.items() for v in claim(method, seeds)]


def _languages(method: str, runs: Sequence[Routing]) -> list[Verdict]:
    shares, names = [], set()
    for run in runs:
        requested = run["requested_capacity"]
        language = pivot(requested)
        means = {name: _mean(layers, "decoder") for name, layers in requested.items()}
        into = [mean for name, mean in means.items() if name.endswith(f"-{language}")]
        others = [mean for name, mean in means.items() if not name.endswith(f"-{language}")]
        if language is None or len(into) < 2 or len(others) < 2 or None in means.values():
            continue
        if np.ptp(others):
            shares.append(float(np.ptp(into) / np.ptp(others)))
            names.add(language)
    if not shares:
        return []
    claim = (
        f"(f) {method}: requested capacity of targets in {'/'.join(sorted(names))} does not depend on the "
        f"source language, other targets differ: range of these over that of others, below {SHARE}"
    )
    return [decide(claim, interval(shares), most=SHARE, spec=".3f")]


def _frequency(method: str, runs: Sequence[Routing]) -> list[Verdict]:
    found = []
    for side in ("encoder", "decoder"):
        seeds = [_each(run["rank_correlation"], side) for run in runs]
        seeds = [by_direction for by_direction in seeds if by_direction]
        if seeds:
            claim = (
                f"(g) {method}: frequent tokens ask for less in the {side}: rank correlation of rareness "
                "and requested capacity"
            )
            found.append(_over_directions(claim, seeds))
    return found


def _first_block(method: str, runs: Sequence[Routing]) -> list[Verdict]:
    seeds = []
    for run in runs:
        differences = {}
        for direction, layers in run["requested_capacity"].items():
            blocks = sorted(
                (int(name.split(".")[1]), value)
                for name, value in layers.items()
                if name.startswith("encoder.")
            )
            if len(blocks) > 1:
                first, *later = (value for _, value in blocks)
                differences[direction] = first - statistics.fmean(later)
        if differences:
            seeds.append(differences)
    claim = f"(h) {method}: the first encoder block asks for more than the later ones"
    return [_over_directions(claim, seeds)] if seeds else []


def _over_directions(claim: str, seeds: Sequence[Mapping[str, float]]) -> Verdict:
    """The verdict on the claim that the mean over directions is above zero."""
    names = dict.fromkeys(name for by_direction in seeds for name in by_direction)
    means = [statistics.fmean(each[name] for each in seeds if name in each) for name in names]
    above = sum(mean > 0 for mean in means)
    found = interval([statistics.fmean(by_direction.values()) for by_direction in seeds])
    words = f"sign + in {above}, - in {len(means) - above}"
    return decide(claim, found, least=0, directions=words)


def _each(by_direction: Mapping[str, Mapping[str, float]], side: str) -> dict[str, float]:
    """By direction, the mean over the MoE blocks of a side, without NaN."""
    means = {name: _mean(layers, side) for name, layers in by_direction.items()}
    return {name: mean for name, mean in means.items() if mean is not None and mean == mean}


def _mean(layers: Mapping[str, float], side: str) -> float | None:
    values = [value for name, value in layers.items() if name.startswith(f"{side}.")]
    return statistics.fmean(values) if values else None


def claims_table(dataset: Dataset, systems: Systems, flops, baseline: str) -> Grid:
    """A row for each of the paper's claims; ``flops`` are per token."""
    bleu, losses = Measure(systems, "BLEU"), Measure(systems, "loss")
    times = {m: {(r.seed, r.machine): r.time for r in systems[m] if r.time} for m in flops}
    scored = about_scores(bleu.points, dataset.experts)
    by_sentence = sentences.compared(dataset, systems, [v.methods for v in scored if v.found])
    rows = []
    for v in scored:
        lower, upper = v.methods
        directions = "not computed"
        if v.methods in by_sentence:
            directions = by_sentence[v.methods].in_words(v.found.count)
        rows.append(_row(v, losses.cell(losses.less(upper, lower)), directions))
    rest = about_cost({m: of_runs for m, of_runs in times.items() if of_runs}, flops, baseline)
    rest += about_capacity(
        {
            method: [result.routing for result in results if result.routing]
            for method, results in systems.items()
            if strata(method.replace("deep-", "smoe-"))
        }
    )
    rows += [_row(v, loss="", directions=v.directions) for v in rest]
    notes = [
        "- **Verdicts**: confirmed where the 95 percent interval of what was found excludes the opposite "
        "of the claim, refuted where it excludes the claim, else open. A single seed has no verdict.",
        *_chance_in_words(bleu.chance, losses.chance),
        *_across_machines(dataset, systems, [v.methods for v in scored]),
        *(text for letters, text in NOTES.items() if any(row[0][1] in letters for row in rows)),
    ]
    return Grid(HEADER, rows, notes, texts=len(HEADER))


def _chance_in_words(of_bleu: Chance, of_losses: Chance) -> list[str]:
    """A note on the standard deviation by chance; none if too few seeds are there to estimate it."""
    if not of_bleu.shares or not of_losses.shares:
        return []
    most = (
        f"{max(c.shares.values()):.0%} from {max(c.shares, key=c.shares.get)} in {name}"
        for c, name in ((of_bleu, "BLEU"), (of_losses, "loss"))
    )
    return [
        "- **Intervals of scores** come from a randomized block design: a score is the effect of its "
        "system, plus the effect of its seed, plus chance, which is as wide for all systems. From all runs "
        f"together, chance has a standard deviation of {of_bleu.deviation:.2f} BLEU and "
        f"{of_losses.deviation:.3f} bits ({of_bleu.freedom} degrees of freedom). The largest share of its "
        f"squares: {' and '.join(most)}.",
    ]


def _across_machines(
    dataset: Dataset, systems: Systems, pairs: Iterable[Sequence[str]]
) -> list[str]:
    """A note on the pairs whose runs of one seed were trained on two machines; none if there are none."""
    found = []
    for pair in pairs:
        first, second = (
            {seed_in(r.name, dataset): r.machine for r in systems.get(method, ())}
            for method in pair
        )
        common = sorted(first.keys() & second.keys())
        if seeds := [str(seed) for seed in common if first[seed] != second[seed]]:
            found.append(f"{' and '.join(pair)} ({', '.join(seeds)})")
    if not found:
        return []
    return [
        "- **Two machines** (or numbers of threads) trained these pairs, in the seeds in brackets: "
        f"{'; '.join(found)}. Machines round differently, which makes another run of the same seed."
    ]


def _row(verdict: Verdict, loss: str, directions: str) -> list[str]:
    found = verdict.found
    number = MISSING if found is None else format(found, verdict.spec)
    seeds = MISSING if found is None else str(found.count)
    alone = "" if verdict.alone is None else verdict.alone.interval(verdict.spec)
    return [verdict.claim, seeds, number, alone, loss, directions, verdict.verdict]


# Claims that a data set lists in advance (``claims``): one system is ahead of another, which means a lower
# validation loss after the same number of updates.


def verdict(loss: Difference | None, chrf: Difference | None) -> str:
    """The verdict by the difference in loss; "mixed" if chrF++ says the opposite."""
    found = judge(loss, most=0)
    if chrf is None or chrf.low is None:
        return found
    against = {CONFIRMED: chrf.high < 0, REFUTED: chrf.low > 0}
    return MIXED if against.get(found) else found


def planned_claims(dataset: Dataset, systems: Systems, flops: Mapping[str, float]) -> Grid:
    """A row for each claim of the data set; ``flops`` are per token."""
    measures = {name: Measure(systems, name) for name in MEASURES}
    rows = []
    for name, (first, second) in dataset.claims.items():
        apart = {m: measure.less(first, second) for m, measure in measures.items()}
        cost = MISSING
        if first in flops and second in flops:
            cost = f"{flops[first] / flops[second] - 1:+.0%}"
        seeds = apart["loss"].count if apart["loss"] else 0
        cells = [measure.cell(apart[m]) for m, measure in measures.items()]
        said = verdict(apart["loss"], apart["chrF++"])
        rows.append([name, f"{first} is ahead of {second}", str(seeds), cost, *cells, said])
    header = ["", "claim", "seeds", "FLOPs", *MEASURES, "verdict"]
    notes = [
        "- **Differences** are the first system less the second, over the seeds that both have, with 95 "
        "percent intervals. FLOPs: how much more a token costs with the first. The validation loss decides "
        "(bits per target token; below zero is better): confirmed if its interval is below zero, refuted "
        "if it is above, else open; mixed if the interval of chrF++ says the opposite.",
        *_across_machines(dataset, systems, dataset.claims.values()),
    ]
    return Grid(header, rows, notes, texts=2)
