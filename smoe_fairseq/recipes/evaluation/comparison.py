"""Comparison of two systems (``--compare``): bootstrap over sentences, tests and intervals over seeds."""

import math
import os
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sacrebleu.metrics.base import Metric
from sacrebleu.significance import PairedTest

from smoe_fairseq.errors import UsageError, quietly
from smoe_fairseq.recipes.datasets import Dataset
from smoe_fairseq.recipes.evaluation import scores
from smoe_fairseq.recipes.evaluation.evaluate import state_notes
from smoe_fairseq.recipes.evaluation.grid import Grid, number
from smoe_fairseq.recipes.evaluation.metrics import flags_for, metrics_of, parsed
from smoe_fairseq.recipes.folders import Folders, run_method, run_order, run_seed, test_file

SAMPLES = 1000  # of the bootstrap
PERMUTATIONS = 200_000  # the most that are computed
BySeed = Mapping[int | None, float]


@dataclass(frozen=True)
class Interval:
    """A ``mean`` over ``count`` seeds with its 95 percent interval, which a single seed does not have."""

    mean: float
    low: float | None
    high: float | None
    count: int

    def __format__(self, spec: str) -> str:
        """``spec`` is the format of each number."""
        numbers = (self.mean, self.low, self.high)
        mean, low, high = (None if n is None else format(n, spec or "+.2f") for n in numbers)
        return mean if low is None else f"{mean} [{low}, {high}]"


def interval(values: Sequence[float]) -> Interval:
    """The mean and the interval of Student's t-test."""
    count, mean = len(values), statistics.fmean(values)
    if count < 2:
        return Interval(mean, None, None, count)
    from scipy import special  # slow to import

    error = float(np.std(values, ddof=1)) / math.sqrt(count)
    width = float(special.stdtrit(count - 1, 0.975)) * error
    return Interval(mean, mean - width, mean + width, count)


def paired(first: BySeed, second: BySeed) -> Interval | None:
    """``second`` minus ``first`` over their common seeds, with the interval of the paired t-test.

    Runs are paired by seed because the seed determines the order of batches. None without a common seed.
    """
    common = [seed for seed in first if seed in second]
    return interval([second[seed] - first[seed] for seed in common]) if common else None


def spearman(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's rank correlation; NaN if all values of one are equal."""
    from scipy import stats

    with quietly():  # scipy warns of equal values
        return float(stats.spearmanr(first, second).statistic)


def p_value(metric: Metric, first: np.ndarray, second: np.ndarray) -> float:
    """The p-value of sacreBLEU's paired bootstrap, given its counts ``(sentences, counts)`` of two systems.

    For equal scores it is 1: no sample's difference is smaller. sacreBLEU counts only larger ones.
    The counts of several translations of a sentence may be summed, so that they are drawn together. The
    random seed is sacreBLEU's (``SACREBLEU_SEED``), so that a comparison is reproducible.
    """
    metric._extract_corpus_statistics = lambda counts, references: counts
    systems = [("first", first), ("second", second)]
    with quietly():
        test = PairedTest(systems, {"": metric}, None, test_type="bs", n_samples=SAMPLES)
        ((one, other),) = (values for name, values in test()[1].items() if name != "System")
    return 1.0 if one.score == other.score else other.p_value


def mean_p_value(first: np.ndarray, second: np.ndarray) -> float:
    """As `p_value` for a metric that is a mean over sentences; the arguments are ``(sentences,)``."""
    apart = (second - first).astype(np.float64)
    seed = os.environ.get("SACREBLEU_SEED", "12345")
    draw = np.random.default_rng(None if seed.lower() == "none" else int(seed))
    samples = np.abs(apart[draw.choice(len(apart), (SAMPLES, len(apart)))].mean(1))
    return float(((samples - samples.mean() >= abs(apart.mean())).sum() + 1) / (SAMPLES + 1))


# ``--compare A B``


def comparison(dataset: Dataset, first: str, second: str, metric: str = scores.BLEU) -> Grid:
    """By direction, the means over seeds, their difference, and p-values.

    ``first`` and ``second`` are methods, with all seeds that are scored, or runs (``moe.seed-2``).
    "p (sentences)" is from sacreBLEU's paired bootstrap, which draws a sentence with its translations of all
    seeds; "p (seeds)" is from an exact permutation test over the runs.

    Raises:
        UsageError: one is not scored, they have no common direction, or signatures or test sets differ.
    """
    if first == second:
        raise UsageError(f"--compare {first} {second}: expected two different methods")
    systems = {name: _System(dataset, name, metric) for name in (first, second)}
    one, other = systems.values()
    if shared := sorted({*one.runs} & {*other.runs}):
        both = f"{', '.join(shared)} is of both; expected two that share no run"
        raise UsageError(f"--compare {first} {second}: {both}")
    common = [d for d in dataset.directions if one.has(d) and other.has(d)]
    if not common:
        runs = ", ".join([*one.runs, *other.runs])
        advice = f"run scripts/evaluate.sh {dataset.name} for each of them"
        raise UsageError(f"no direction is scored in all of {runs}: {advice}")
    now = scores.test_checksums(dataset, common)
    if different := scores.different_tests(*one.runs.values(), *other.runs.values(), now=now):
        texts = f"another test set than that in {Folders(dataset.name).raw}"
        scored = f"{first} or {second} was scored on {texts} ({', '.join(different)})"
        raise UsageError(f"{scored}: run scripts/evaluate.sh {dataset.name} for both again")
    several = len(one.runs) + len(other.runs) > 2
    by_direction = scores.signatures(*one.runs.values(), *other.runs.values(), metric=metric)
    rows, signatures = [], set()
    for direction in dataset.directions:
        if direction not in common:
            rows.append([direction, *(number(None) for _ in range(4 + several))])
            continue
        if len(kinds := by_direction[direction]) > 1:
            raise UsageError(
                f"{first} and {second} were scored differently on {direction} "
                f"({' and '.join(sorted(kinds))}): evaluate both again with the same settings"
            )
        signatures |= kinds
        points = [system.points([direction]) for system in systems.values()]
        rows.append([direction, *_row(points, _bootstrap(dataset, direction, one, other, metric))])
        if several:
            rows[-1].append(number(permutation_p(*points), digits=4))
    names = [f"{name}, mean of {len(s.runs)}" if several else name for name, s in systems.items()]
    header = ["direction", *names, "difference", "p (sentences)" if several else "p"]
    notes = [f"paired bootstrap, {SAMPLES} samples: the difference is significant where p < 0.05"]
    if several:
        header.append("p (seeds)")
        points = [system.points(common) for system in systems.values()]
        rows.append(["average", *_row(points, None), number(permutation_p(*points), digits=4)])
        notes += [f"{name}: {', '.join(system.runs)}" for name, system in systems.items()]
        notes.append(_smallest_p_note(*points))
        notes += _paired_note(systems.values(), points)
    notes += [f"{scores.label(metric)} {signature}" for signature in sorted(signatures)]
    for run in [*one.runs, *other.runs]:
        notes += [*state_notes(dataset, run), *scores.search_notes(dataset, run)]
    return Grid(header, rows, notes)


class _System:
    """The scored runs of a method, or one run."""

    def __init__(self, dataset: Dataset, name: str, metric: str):
        self.metric, self.folder = metric, Folders(dataset.name).runs
        names = sorted((p.name for p in self.folder.glob("*") if p.is_dir()), key=run_order)
        runs = [run for run in names if name in (run, run_method(run))]
        self.runs = {run: result for run in runs if (result := scores.read(self.folder / run))}
        if not self.runs:
            file, advice = self.folder / name / scores.FILE, f"evaluate.sh {dataset.name} {name}"
            raise UsageError(f"{file} is missing: run scripts/{advice} first")

    def has(self, direction: str) -> bool:
        return all(direction in r and r[direction].of(self.metric) for r in self.runs.values())

    def points(self, directions: Sequence[str]) -> list[float]:
        """The mean of each run."""
        points = ([r[d].of(self.metric)[0] for d in directions] for r in self.runs.values())
        return [*map(statistics.fmean, points)]

    def translations(self, direction: str) -> list[Path]:
        return [scores.translations_of(self.folder / run, direction) for run in self.runs]


def permutation_p(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The two-sided p-value of the permutation test; None unless both have two runs.

    It draws `PERMUTATIONS` if there are more.
    """
    if min(len(first), len(second)) < 2:
        return None
    from scipy import stats

    def distance(one: np.ndarray, other: np.ndarray, axis: int) -> np.ndarray:
        # Equal means may differ in the last digits, by the order of summation.
        return np.abs(one.mean(axis) - other.mean(axis)).round(9)

    options = {"alternative": "greater", "n_resamples": PERMUTATIONS, "random_state": 12345}
    options["batch"] = 10_000  # as many fit into memory
    return float(stats.permutation_test((first, second), distance, **options).pvalue)


def _smallest_p_note(first: Sequence[float], second: Sequence[float]) -> str:
    """A note on the smallest possible p-value of the permutation test for this number of runs."""
    if min(len(first), len(second)) < 2:
        return "p (seeds) takes two runs of each"
    permutations = math.comb(len(first) + len(second), len(first))
    least = max((1 + (len(first) == len(second))) / permutations, 1 / (PERMUTATIONS + 1))
    return f"p (seeds): permutation test over the runs; with so many it is at least {least:.4f}"


def _paired_note(systems: Collection["_System"], points: Sequence[Sequence[float]]) -> list[str]:
    pairs = zip(systems, points, strict=True)
    apart = paired(*(dict(zip(map(run_seed, system.runs), of)) for system, of in pairs))
    if apart is None or apart.low is None:
        return []
    return [f"within the {apart.count} seeds of both: {apart}, 95 percent interval (paired t)"]


def _row(points: Sequence[Sequence[float]], p: float | None) -> list[str]:
    means = [statistics.fmean(values) for values in points]
    difference = number(means[1] - means[0], sign=True)
    return [*(number(mean) for mean in means), difference, number(p, digits=4)]


def _bootstrap(
    dataset: Dataset, direction: str, first: _System, second: _System, metric: str
) -> float:
    files = [system.translations(direction) for system in (first, second)]
    if metric == scores.COMET:
        lines = ([scores.comet_of_lines(file) for file in of_runs] for of_runs in files)
        return mean_p_value(*(np.mean(of_runs, axis=0) for of_runs in lines))
    language = direction.split("-")[1]
    reference = test_file(dataset, direction, language)
    references = scores.lines_of(reference)
    flags = flags_for(dataset.sacrebleu, language, metric)
    (counter,) = metrics_of(parsed(flags), references)

    def count(translations: Path) -> np.ndarray:
        lines = scores.lines_of(translations)
        if len(lines) != len(references):
            both = f"{translations} has {len(lines)} lines and {reference} {len(references)}"
            raise UsageError(f"{both}: evaluate again")
        with quietly():
            return np.array(counter._extract_corpus_statistics(lines, None))

    return p_value(counter, *(sum(map(count, of_runs)) for of_runs in files))
