"""The paper's claims and their verdicts."""

import itertools
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from smoe_fairseq.analysis.results import pivot
from smoe_fairseq.recipes import study_sentences
from smoe_fairseq.recipes.config import Dataset
from smoe_fairseq.recipes.folders import method_of
from smoe_fairseq.recipes.statistics import Difference, interval, paired, quantile
from smoe_fairseq.recipes.study_results import Result, by_seed
from smoe_fairseq.recipes.table import MISSING, Grid

BySeed = Mapping[int | None, float]


@dataclass(frozen=True)
class Chance:
    """Its standard deviation in one run, and the degrees of freedom that this is known from.

    ``shares``: by system, of the squares that it is made of; where one has most, it is not as wide for all.
    """

    deviation: float
    freedom: int
    shares: Mapping[str, float] = field(default_factory=dict)

    def between(self, first: BySeed, second: BySeed) -> Difference | None:
        """``second`` less ``first`` over the seeds of both; None where these are none."""
        apart = [second[seed] - first[seed] for seed in first if seed in second]
        return self.around(apart) if apart else None

    def around(self, apart: Sequence[float]) -> Difference:
        """The mean of what lies between two systems in some seeds, with its 95 percent interval.

        Where there are no other systems, it is that of the paired t-test.
        """
        mean, count = statistics.fmean(apart), len(apart)
        if not self.freedom:
            return Difference(mean, None, None, count)
        width = quantile(0.975, self.freedom) * self.deviation * math.sqrt(2 / count)
        return Difference(mean, mean - width, mean + width, count)


def chance(points: Mapping[str, BySeed]) -> Chance:
    """Of ``points`` by system and seed: what is left by least squares of a sum of both.

    Those that are no number, of a run that diverged, say nothing of it.
    """
    cells = [(s, seed) for s in points for seed, x in points[s].items() if math.isfinite(x)]
    if not cells:
        return Chance(0.0, 0)
    values = np.array([points[system][seed] for system, seed in cells])
    systems, seeds = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
    sums = np.zeros((len(cells), len(systems) + len(seeds)))
    for row, (system, seed) in enumerate(cells):
        sums[row, systems.index(system)] = sums[row, len(systems) + seeds.index(seed)] = 1
    found, _, rank, _ = np.linalg.lstsq(sums, values, rcond=None)
    freedom = len(cells) - int(rank)
    squares: dict[str, float] = {}
    for (system, _), left in zip(cells, values - sums @ found, strict=True):
        squares[system] = squares.get(system, 0.0) + float(left) ** 2
    total = math.fsum(squares.values())
    if not freedom or not total:
        return Chance(0.0, freedom)
    shares = {system: each / total for system, each in squares.items()}
    return Chance(math.sqrt(total / freedom), freedom, shares)


# The paper's claims, each with what this study says of it: (a) to (d) about scores, (e) about
# cost.

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


# The paper's claims about requested capacity, (f) to (h), each with what this study says of it.

SHARE = 0.2  # of what other targets differ by, which those of one language may, where they "do not"
Routing = dict  # as `capacity_summary.summary` gives it


def about_capacity(runs: Mapping[str, Sequence[Routing]]) -> list[Verdict]:
    """Of the claims that can be told from ``runs``: by method, of each seed; methods are not pooled."""
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
        if _range(others):
            shares.append(_range(into) / _range(others))
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
    """Of the runs that have several encoder blocks."""
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
    """The claim is that the mean over directions is above zero; it is said of how many directions."""
    names = dict.fromkeys(name for by_direction in seeds for name in by_direction)
    means = [statistics.fmean(each[name] for each in seeds if name in each) for name in names]
    above = sum(mean > 0 for mean in means)
    found = interval([statistics.fmean(by_direction.values()) for by_direction in seeds])
    words = f"sign + in {above}, - in {len(means) - above}"
    return decide(claim, found, least=0, directions=words)


def _each(by_direction: Mapping[str, Mapping[str, float]], side: str) -> dict[str, float]:
    """Of each direction the mean over the blocks of a side, where that is a number."""
    means = {name: _mean(layers, side) for name, layers in by_direction.items()}
    return {name: mean for name, mean in means.items() if mean is not None and mean == mean}


def _mean(layers: Mapping[str, float], side: str) -> float | None:
    values = [value for name, value in layers.items() if name.startswith(f"{side}.")]
    return statistics.fmean(values) if values else None


def _range(values: Sequence[float]) -> float:
    return max(values) - min(values)


# What a system brings for what it costs: its loss beside the baseline's after as many FLOPs, or as
# long.

Costs = Callable[[Result], float | None]  # per target token


def equal_cost_table(
    systems: Mapping[str, Sequence[Result]], flops: Mapping[str, float], baseline: str
) -> Grid:
    """``flops``: by method, of a forward pass, per target token."""
    of_flops = _beside(systems, baseline, lambda r: flops.get(method_of(r.name)))
    of_time = _beside(systems, baseline, lambda r: r.time or None, same_machine=True)
    rows = [
        [method, *_cells(of_flops, method), *_cells(of_time, method)]
        for method in systems
        if method in of_flops | of_time
    ]
    header = ["method", "FLOPs/token", "loss at equal FLOPs", "time/token", "loss at equal time"]
    notes = [
        f"Beside {baseline}, over the seeds that both have: how much more a token costs, and what lies "
        "between the lowest losses (bits per token; below zero is better), with its 95 percent interval, "
        "when both had cost as much as the one that ends first. Between validations the loss is taken to "
        "fall in line with the logarithm of the cost. Time is of seeds that one machine made."
    ]
    return Grid(header, rows, notes)


def _beside(
    systems: Mapping[str, Sequence[Result]], baseline: str, cost: Costs, same_machine: bool = False
) -> dict[str, dict[int | None, tuple[float, float]]]:
    """By method and seed: a token's cost as a multiple of the baseline's, and what lies between losses."""
    of_baseline = {result.seed: result for result in systems.get(baseline, ()) if cost(result)}
    found: dict[str, dict] = {}
    for method, results in systems.items():
        for r in results if method != baseline else ():
            b = of_baseline.get(r.seed)
            if not b or not cost(r) or not r.logged or not b.logged:
                continue
            if same_machine and r.machine != b.machine:
                continue
            apart = _apart(r, b, cost)
            if apart is not None:
                found.setdefault(method, {})[r.seed] = (cost(r) / cost(b), apart)
    return found


def _cells(found: Mapping[str, Mapping], method: str) -> list[str]:
    """How much more a token costs, and what lies between the losses.

    What the baseline's run owes to chance is in all differences of a seed, as what the seed does.
    """
    if method not in found:
        return [MISSING, MISSING]
    apart = {m: {seed: a for seed, (_, a) in seeds.items()} for m, seeds in found.items()}
    more = math.exp(statistics.fmean(math.log(ratio) for ratio, _ in found[method].values())) - 1
    return [f"{more:+.0%}", f"{chance(apart).around(list(apart[method].values())):+.3f}"]


def _apart(result: Result, other: Result, cost: Costs) -> float | None:
    """None where the one that ends first does so before the other's first validation."""
    curves = [
        (cost(r) * each["words"], np.fmin.accumulate(each["loss"]))
        for r, each in ((r, r.validated()) for r in (result, other))
    ]
    end = min(costs[-1] for costs, _ in curves)
    if any(end < costs[0] for costs, _ in curves):
        return None
    here, there = (np.interp(math.log(end), np.log(costs), losses) for costs, losses in curves)
    return float(here - there)


# The paper's claims with their verdicts, as a table.

HEADER = ["claim", "seeds", "found", "of these alone", "loss", "directions", "verdict"]


def claims_table(dataset: Dataset, systems, flops, baseline: str) -> Grid:
    """``systems``: by method, results in the order of their seeds; ``flops``: by method, per token."""
    bleu = by_seed(systems, lambda result: result.bleu)
    losses = by_seed(systems, lambda result: result.validation)
    of_losses = chance(losses)
    times = {m: {(r.seed, r.machine): r.time for r in systems[m] if r.time} for m in flops}
    scored = about_scores(bleu, dataset.experts)
    by_sentence = study_sentences.compared(dataset, systems, [v.methods for v in scored if v.found])
    rows = [
        _row(
            v,
            loss=f"{of_losses.between(*(losses[m] for m in v.methods)):+.3f}"
            if v.found
            else MISSING,
            directions=by_sentence[v.methods].in_words(v.found.count)
            if v.methods in by_sentence
            else "not computed",
        )
        for v in scored
    ]
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
        "Found, of scores: the difference of the mean BLEU over the seeds that both have, with its 95 "
        "percent interval; of these alone: the interval of the paired t-test of these two systems, which "
        "knows nothing of the others (a verdict goes by the first, and is weak where this one does not "
        "bear it out); loss: the difference of the validation loss, in bits per token, where below zero is "
        f"better. {_known(chance(bleu), of_losses)}Directions, of scores: those that differ by sentences "
        f"(sacreBLEU's paired bootstrap of both systems' seeds, p < {study_sentences.LEVEL}: of two equal "
        "systems one direction in ten, since that p-value knows one side); of the rest: the sign of the "
        "mean over seeds. (e): how much more time a token takes, from what training took on the same "
        "machine, beside whatever else ran on it (paired t). (f) to (h): of the text of the test set, with "
        "the references as the decoder's input (t over the seeds); where a test set is parallel in all "
        "languages, targets in one language are the same sentences whatever the source."
    ]
    return Grid(HEADER, rows, notes, texts=len(HEADER))


def _known(of_bleu: Chance, of_losses: Chance) -> str:
    """How wide chance is in a run, where there are seeds to tell it from."""
    if not of_bleu.shares or not of_losses.shares:
        return ""
    most = (
        f"{max(c.shares.values()):.0%} by {max(c.shares, key=c.shares.get)}"
        for c in (of_bleu, of_losses)
    )
    return (
        "A score is taken to be what its system does, what its seed does, and chance, as wide for all; by "
        f"all runs together {of_bleu.deviation:.2f} BLEU and {of_losses.deviation:.3f} bits (standard "
        f"deviation in a run, known from {of_bleu.freedom} degrees of freedom; of its squares "
        f"{' and '.join(most)}). The intervals are made of that. "
    )


def _row(verdict: Verdict, loss: str, directions: str) -> list[str]:
    found = verdict.found
    number = MISSING if found is None else format(found, verdict.spec)
    seeds = MISSING if found is None else str(found.count)
    alone = "" if verdict.alone is None else verdict.alone.interval(verdict.spec)
    return [verdict.claim, seeds, number, alone, loss, directions, verdict.verdict]
