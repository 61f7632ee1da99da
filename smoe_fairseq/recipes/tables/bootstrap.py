"""The paired bootstrap: what sacreBLEU counts in each sentence, and what that says of two systems."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.metrics.base import Metric
from sacrebleu.significance import PairedTest

from smoe_fairseq.recipes.evaluating import scores
from smoe_fairseq.recipes.evaluating.evaluation import SPBLEU_TOKENIZER
from smoe_fairseq.recipes.folders import tested_text
from smoe_fairseq.settings.dataset import Dataset
from smoe_fairseq.system.errors import UsageError
from smoe_fairseq.system.quiet import quietly

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
