"""Intervals, tests and verdicts over sentences and over seeds; nothing here knows a data set or a run."""

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from sacrebleu.metrics.base import Metric
from sacrebleu.significance import PairedTest

from smoe_fairseq.errors import quietly

SAMPLES = 1000  # of the bootstrap
PERMUTATIONS = 200_000  # the most that are computed
LEVEL = 0.05
AHEAD, BEHIND, EQUAL, OPEN = "ahead", "behind", "equal within the margin", "open"


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean over seeds, and the ends of its 95 percent t interval, which are NaN for a single seed."""
    count, mean = len(values), statistics.fmean(values)
    if count < 2:
        return mean, math.nan, math.nan
    from scipy import special  # slow to import

    error = float(np.std(values, ddof=1)) / math.sqrt(count)
    width = float(special.stdtrit(count - 1, 0.975)) * error
    return mean, mean - width, mean + width


def in_words(values: Sequence[float], digits: int = 2) -> str:
    """The mean over seeds with its `interval`, which a single seed does not have."""
    mean, low, high = (f"{number:+.{digits}f}" for number in interval(values))
    return f"{mean} [{low}, {high}]" if len(values) > 1 else mean


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


def permutation_p(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The two-sided p-value over permutations, `PERMUTATIONS` at most; None unless both have two runs."""
    if min(len(first), len(second)) < 2:
        return None
    from scipy import stats

    def distance(one: np.ndarray, other: np.ndarray, axis: int) -> np.ndarray:
        # Equal means may differ in the last digits, by the order of summation.
        return np.abs(one.mean(axis) - other.mean(axis)).round(9)

    options = {"alternative": "greater", "n_resamples": PERMUTATIONS, "random_state": 12345}
    options["batch"] = 10_000  # as many fit into memory
    return float(stats.permutation_test((first, second), distance, **options).pvalue)


@dataclass(frozen=True)
class Difference:
    """The first system's values minus the second's, by seed."""

    by_seed: Mapping[int | None, float]
    margin: float

    @property
    def values(self) -> np.ndarray:
        return np.array(list(self.by_seed.values()), dtype=float)

    def p_different(self) -> float:
        """The p-value of the two-sided t-test that the mean is not zero."""
        return self._p(0, "two-sided")

    def p_equal(self) -> float:
        """The p-value of the two one-sided t-tests that the mean is within the margin."""
        return max(self._p(-self.margin, "greater"), self._p(self.margin, "less"))

    def _p(self, mean: float, alternative: str) -> float:
        from scipy import stats  # slow to import

        if len(self.values) < 2:
            return 1.0
        with quietly():  # scipy warns of equal values
            p = float(stats.ttest_1samp(self.values, mean, alternative=alternative).pvalue)
        return 1.0 if math.isnan(p) else p


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected by Holm (1979), to be compared with the level itself."""
    adjusted, highest = [1.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = highest
    return adjusted


def verdicts(differences: Sequence[Difference], sign: int) -> list[str]:
    """The verdicts of all statements in one measure; ``sign`` as in `Measure`."""
    equal = holm([d.p_equal() for d in differences])
    different = holm([d.p_different() for d in differences])

    def verdict(d: Difference, p_equal: float, p_different: float) -> str:
        if p_equal < LEVEL:
            return EQUAL
        if p_different >= LEVEL:
            return OPEN
        return AHEAD if sign * statistics.fmean(d.values) > 0 else BEHIND

    return [*map(verdict, differences, equal, different)]
