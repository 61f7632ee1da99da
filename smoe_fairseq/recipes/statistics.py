"""Differences between systems: intervals over seeds, rank correlation, the bootstrap over sentences."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.metrics.base import Metric
from sacrebleu.significance import PairedTest

from smoe_fairseq.errors import UsageError, quietly
from smoe_fairseq.recipes import scores
from smoe_fairseq.recipes.config import Dataset
from smoe_fairseq.recipes.evaluate import SPBLEU_TOKENIZER
from smoe_fairseq.recipes.folders import tested_text

SAMPLES = 1000  # of the bootstrap
BySeed = Mapping[int | None, float]


@dataclass(frozen=True)
class Difference:
    """A ``mean`` over ``count`` seeds and its 95 percent interval, which is None for a single seed."""

    mean: float
    low: float | None
    high: float | None
    count: int

    def map(self, function: Callable[[float], float]) -> "Difference":
        """The same in other units, by an increasing function."""
        ends = (None if end is None else function(end) for end in (self.low, self.high))
        return Difference(function(self.mean), *ends, self.count)

    def __format__(self, spec: str) -> str:
        """``spec`` is the format of each number."""
        numbers = (self.mean, self.low, self.high)
        mean, low, high = (None if n is None else format(n, spec or "+.2f") for n in numbers)
        return mean if low is None else f"{mean} [{low}, {high}]"

    def interval(self, spec: str) -> str:
        """The interval alone; empty if there is none."""
        return format(self, spec).partition(" ")[2]


def _around(values: Sequence[float], error: float, freedom: int) -> Difference:
    """The mean of values with a standard ``error`` that is known from so many degrees of freedom."""
    mean = statistics.fmean(values)
    if not freedom:
        return Difference(mean, None, None, len(values))
    width = quantile(0.975, freedom) * error
    return Difference(mean, mean - width, mean + width, len(values))


def quantile(probability: float, freedom: float) -> float:
    """A quantile of Student's t distribution."""
    from scipy import special  # takes long, and only the study needs it

    return float(special.stdtrit(freedom, probability))


def interval(values: Sequence[float]) -> Difference:
    """The mean with the interval of Student's t-test."""
    count = len(values)
    error = float(np.std(values, ddof=1)) / math.sqrt(count) if count > 1 else 0.0
    return _around(values, error, count - 1)


def paired(first: BySeed, second: BySeed) -> Difference | None:
    """``second`` less ``first`` over the seeds of both, with the interval of the paired t-test.

    A seed gives all systems the same batches in the same order. None if they have no seed in common.
    """
    common = [seed for seed in first if seed in second]
    return interval([second[seed] - first[seed] for seed in common]) if common else None


@dataclass(frozen=True)
class Chance:
    """The standard deviation of one run, and the degrees of freedom that it is known from.

    ``shares``: each system's share of the sum of squares; if one has most, chance is not as wide for all.
    """

    deviation: float
    freedom: int
    shares: Mapping[str, float] = field(default_factory=dict)

    def between(self, first: BySeed, second: BySeed) -> Difference | None:
        """``second`` less ``first`` over the seeds of both; None if they have none in common."""
        apart = [second[seed] - first[seed] for seed in first if seed in second]
        return self.around(apart) if apart else None

    def around(self, apart: Sequence[float]) -> Difference:
        """The mean of the differences of two systems in some seeds, with its interval."""
        return _around(apart, self.deviation * math.sqrt(2 / len(apart)), self.freedom)


def chance(points: Mapping[str, BySeed]) -> Chance:
    """What a number by system and seed differs by from a sum of both, fitted by least squares.

    Values that are not finite, of runs that diverged, are left out. Of two systems this is the paired t-test.
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


def spearman(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's rank correlation; NaN if all values of one are equal."""
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return float("nan")
    from scipy import stats

    return float(stats.spearmanr(first, second).statistic)


class SentenceCounter:
    """What sacreBLEU counts in each sentence of a direction, by one of `scores.METRICS`.

    Raises:
        UsageError: the references are missing.
    """

    def __init__(self, dataset: Dataset, direction: str, metric: str):
        self.reference = tested_text(dataset, direction, direction.split("-")[1])
        references = _lines(self.reference)
        self.sentences = len(references)
        if metric == scores.CHRF:
            self.metric: Metric = CHRF(word_order=2, references=[references])
        else:
            own = str(dataset.sacrebleu.get("tokenize", "13a"))
            tokenize = SPBLEU_TOKENIZER if metric == scores.SPBLEU else own
            self.metric = BLEU(tokenize=tokenize, references=[references])

    def count(self, translations: Path) -> np.ndarray:
        """The counts that the metric is made of, ``(sentences, numbers)``.

        Raises:
            UsageError: translations are missing, or more or fewer than the references.
        """
        lines = _lines(translations)
        if len(lines) != self.sentences:
            raise UsageError(
                f"{translations} has {len(lines)} lines and {self.reference} has {self.sentences}: "
                "evaluate again"
            )
        with quietly():
            return np.array(self.metric._extract_corpus_statistics(lines, None))


def p_value(metric: Metric, first: np.ndarray, second: np.ndarray) -> float:
    """The p-value of sacreBLEU's paired bootstrap, of `SentenceCounter.count` of two systems.

    Counts of several translations of a sentence may be added up, so that they are drawn together. The seed is
    sacreBLEU's (``SACREBLEU_SEED``), so that a comparison repeats itself exactly.
    """
    metric._extract_corpus_statistics = lambda counts, references: counts
    with quietly():
        test = PairedTest(
            [("first", first), ("second", second)],
            {"": metric},
            references=None,
            test_type="bs",
            n_samples=SAMPLES,
        )
        (result,) = (values for name, values in test()[1].items() if name != "System")
    return result[1].p_value


def _lines(path: Path) -> Sequence[str]:
    """Lines that end with a line feed, as sacreBLEU's command reads them."""
    try:
        return path.read_text("utf-8").split("\n")[:-1]
    except FileNotFoundError:
        raise UsageError(f"{path} is missing: evaluate again") from None
