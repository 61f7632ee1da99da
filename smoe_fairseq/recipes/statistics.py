"""Intervals, rank correlation and the paired bootstrap."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.metrics.base import Metric
from sacrebleu.significance import PairedTest

from smoe_fairseq.errors import UsageError, quietly
from smoe_fairseq.recipes import scores
from smoe_fairseq.recipes.config import Dataset
from smoe_fairseq.recipes.evaluate import SPBLEU_TOKENIZER
from smoe_fairseq.recipes.processes import tested_text


@dataclass(frozen=True)
class Difference:
    """``mean`` of ``count`` and the ends of its 95 percent interval; both None where it is a single one's."""

    mean: float
    low: float | None
    high: float | None
    count: int

    def map(self, function: Callable[[float], float]) -> "Difference":
        """The same in other units, by a function that rises."""
        ends = (None if end is None else function(end) for end in (self.low, self.high))
        return Difference(function(self.mean), *ends, self.count)

    def __format__(self, spec: str) -> str:
        """``spec`` is that of each number."""
        mean, low, high = (
            None if number is None else format(number, spec or "+.2f")
            for number in (self.mean, self.low, self.high)
        )
        return mean if low is None else f"{mean} [{low}, {high}]"

    def interval(self, spec: str) -> str:
        """Only the interval; nothing where there is none."""
        return format(self, spec).partition(" ")[2]


def interval(values: Sequence[float]) -> Difference:
    """Of the mean of a few values, against zero."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Difference(mean, None, None, 1)
    width = (
        quantile(0.975, len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    )
    return Difference(mean, mean - width, mean + width, len(values))


def paired(first: Mapping, second: Mapping) -> Difference | None:
    """``second`` less ``first``, each a value by seed, over the seeds of both; None where these are none.

    A seed gives all systems the same batches in the same order, so part of what it does is the same to both.
    """
    common = [seed for seed in first if seed in second]
    return interval([second[seed] - first[seed] for seed in common]) if common else None


def quantile(probability: float, freedom: float) -> float:
    """Of Student's t distribution with so many degrees of freedom."""
    from scipy import special  # takes long, and only the study needs it

    return float(special.stdtrit(freedom, probability))


def spearman(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's rank correlation; nan where all values of one are equal."""
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return float("nan")
    from scipy import stats

    return float(stats.spearmanr(first, second).statistic)


# The paired bootstrap: what sacreBLEU counts in each sentence, and what that says of two systems.

SAMPLES = 1000


class SentenceCounter:
    """Counts of a direction's translations beside its references.

    ``metric`` is one of `scores.METRICS`.

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
        """What the metric is made of, ``(sentences, numbers)``.

        Raises:
            UsageError: they are missing, or more or fewer than the references.
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
    """That of sacreBLEU's paired bootstrap, of `SentenceCounter.count` of two systems.

    Counts of several translations of a sentence add up: they are drawn together. The generator's seed is
    sacreBLEU's (``SACREBLEU_SEED``), so a comparison repeats itself exactly.
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
    """Lines end with a line feed alone, as they did for sacreBLEU's command."""
    try:
        return path.read_text("utf-8").split("\n")[:-1]
    except FileNotFoundError:
        raise UsageError(f"{path} is missing: evaluate again") from None
