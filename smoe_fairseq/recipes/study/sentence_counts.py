"""What BLEU is made of, sentence by sentence, kept beside a run's scores: ``sentences.csv``.

Systems are compared by it on a machine that has neither their translations nor the references.
"""

import csv
import io
from collections.abc import Mapping, Sequence

import numpy as np

from smoe_fairseq.recipes.evaluating import scores
from smoe_fairseq.recipes.folders import Folders
from smoe_fairseq.recipes.study.kept import SENTENCES, Result
from smoe_fairseq.recipes.tables.bootstrap import SentenceCounter
from smoe_fairseq.settings.dataset import Dataset
from smoe_fairseq.system.errors import UsageError
from smoe_fairseq.system.files import write_whole

ORDERS = 4  # of n-grams
COLUMNS = ("direction", "tokens", "reference", *(f"matches_{n + 1}" for n in range(ORDERS)))
Counts = Mapping[
    str, np.ndarray
]  # by direction, a row for each sentence as sacreBLEU's BLEU has it


def are_kept(result: Result) -> bool:
    return (result.folder / SENTENCES).exists()


def keep(dataset: Dataset, results: Sequence[Result]) -> None:
    """Counts of those runs that have none yet, where their translations are there.

    Folders of these names may also be of other runs; these have other scores.
    """
    counters: dict[str, SentenceCounter] = {}
    for result in results:
        if not are_kept(result):
            try:
                _keep(dataset, result, counters)
            except UsageError:  # no translations, or no references
                continue


def _keep(dataset: Dataset, result: Result, counters: dict[str, SentenceCounter]) -> None:
    run = Folders(dataset.name).run(result.name)
    if scores.read(run) != result.scores:
        return
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for direction in result.scores:
        if direction not in counters:
            counters[direction] = SentenceCounter(dataset, direction, scores.BLEU)
        counts = counters[direction].count(run / "test" / f"{direction}.txt")
        writer.writerows([direction, *row[: 2 + ORDERS]] for row in counts.tolist())
    write_whole(result.folder / SENTENCES, text.getvalue())


def read(result: Result) -> Counts:
    """Those of a run of which they are kept.

    Raises:
        UsageError: the file holds anything else.
    """
    file = result.folder / SENTENCES
    by_direction: dict[str, list[list[int]]] = {}
    try:
        header, *rows = csv.reader(file.read_text("utf-8").splitlines())
        for direction, *numbers in rows:
            by_direction.setdefault(direction, []).append([int(number) for number in numbers])
        counts = {direction: np.array(rows) for direction, rows in by_direction.items()}
        sound = all(of_direction.shape[1:] == (2 + ORDERS,) for of_direction in counts.values())
        if tuple(header) != COLUMNS or not sound or counts.keys() != result.scores.keys():
            raise ValueError
    except (OSError, ValueError, csv.Error):
        raise UsageError(f"{file} does not hold counts of sentences: delete it") from None
    return {direction: _with_totals(of_direction) for direction, of_direction in counts.items()}


def _with_totals(counts: np.ndarray) -> np.ndarray:
    """A sentence of ``t`` tokens has ``t - n + 1`` n-grams."""
    return np.hstack([counts, np.maximum(0, counts[:, :1] - np.arange(ORDERS))])
