"""Comparisons of a study's systems sentence by sentence, by the n-gram counts of each run.

The counts are in a run's ``sentences.csv``, the comparisons in ``comparisons.json`` beside the runs.
"""

import csv
import io
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sacrebleu.metrics import BLEU

from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import write_whole
from smoe_fairseq.recipes.config import Dataset
from smoe_fairseq.recipes.evaluation import scores
from smoe_fairseq.recipes.evaluation.comparison import SentenceCounter, p_value
from smoe_fairseq.recipes.folders import Folders, read_json
from smoe_fairseq.recipes.study.results import SENTENCES, Result, Systems, folder_of

FILE = "comparisons.json"
LEVEL = 0.05
ORDERS = 4  # of n-grams
COLUMNS = ("direction", "tokens", "reference", *(f"matches_{n + 1}" for n in range(ORDERS)))
# By direction, a row for each sentence, as sacreBLEU's BLEU counts.
Counts = Mapping[str, np.ndarray]


def keep(dataset: Dataset, results: Iterable[Result]) -> None:
    """Write the counts of runs that lack them, where the scored translations still exist."""
    counters: dict[str, SentenceCounter] = {}
    for result in results:
        try:
            if not _has_counts(result):
                _keep(dataset, result, counters)
        except UsageError:  # no translations, or no references
            continue


def _has_counts(result: Result) -> bool:
    return (result.folder / SENTENCES).exists()


def _keep(dataset: Dataset, result: Result, counters: dict[str, SentenceCounter]) -> None:
    run = Folders(dataset.name).run(result.name)
    if scores.read(run) != result.scores:  # translations of another run with this name
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


def _read_counts(result: Result) -> Counts:
    """Raises UsageError if the file holds anything else."""
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
    # A sentence of t tokens has t - n + 1 n-grams.
    return {
        direction: np.hstack([c, np.maximum(0, c[:, :1] - np.arange(ORDERS))])
        for direction, c in counts.items()
    }


@dataclass(frozen=True)
class Compared:
    """By direction, the difference in BLEU and its p-value over sentences, of ``seeds`` of both systems."""

    directions: Mapping[str, tuple[float, float]]
    seeds: int

    def in_words(self, seeds: int) -> str:
        """How many directions are significantly above or below; ``seeds`` is how many both systems have."""
        above = sum(d > 0 and p < LEVEL for d, p in self.directions.values())
        below = sum(d < 0 and p < LEVEL for d, p in self.directions.values())
        words = f"{above} above, {below} below, of {len(self.directions)}"
        return words if self.seeds == seeds else f"{words} ({self.seeds} of {seeds} seeds)"


def compared(
    dataset: Dataset, systems: Systems, pairs: Iterable[tuple[str, str]]
) -> dict[tuple[str, str], Compared]:
    """Compare pairs of systems over their common seeds that have counts.

    An earlier comparison over more seeds is kept. A pair without a comparison is left out.
    """
    file = folder_of(dataset.name) / FILE
    before = _read_comparisons(file)
    everything = {r.name: round(r.bleu, 6) for results in systems.values() for r in results}
    now = {k: v for k, v in before.items() if v["runs"].items() <= everything.items()}
    counted: dict[str, Counts] = {}
    found = {}
    for pair in dict.fromkeys(pairs):
        key = " ".join(pair)
        first, second = ({r.seed: r for r in systems[m] if _has_counts(r)} for m in pair)
        common = [seed for seed in first if seed in second]
        both = [result for seed in common for result in (first[seed], second[seed])]
        runs = {result.name: everything[result.name] for result in both}
        made = now.get(key, {}).get("runs", {})
        if len(runs) >= len(made) and runs != made:
            counted |= {r.name: _read_counts(r) for r in both if r.name not in counted}
            now[key] = {"runs": runs, "directions": _directions(both[::2], both[1::2], counted)}
        if key in now:
            directions = {d: tuple(values) for d, values in now[key]["directions"].items()}
            found[pair] = Compared(directions, len(now[key]["runs"]) // 2)
    if now != before:
        write_whole(file, json.dumps(dict(sorted(now.items())), indent=1) + "\n")
    return found


def _read_comparisons(file: Path) -> dict[str, dict]:
    def parse(content: dict) -> dict:
        parts = [pair[key] for pair in content.values() for key in ("runs", "directions")]
        if not all(isinstance(part, dict) for part in parts):
            raise TypeError
        return content

    otherwise = (
        "does not hold comparisons of runs: delete it, and those are made anew of which the counts of "
        "sentences are there"
    )
    return read_json(file, parse, otherwise) if file.exists() else {}


def _directions(
    first: Sequence[Result], second: Sequence[Result], counted: Mapping[str, Counts]
) -> dict[str, tuple[float, float]]:
    """By direction: the difference in BLEU, and the p-value, drawing a sentence with all seeds at once."""
    found = {}
    for direction in first[0].scores:
        references = counted[first[0].name][direction][:, 1]
        for r in [*first, *second]:
            if not np.array_equal(references, counted[r.name][direction][:, 1]):
                raise UsageError(
                    f"{first[0].folder} and {r.folder} were scored on different sentences of {direction}: "
                    "evaluate and study again with the same test set"
                )
        one, other = (
            statistics.fmean(r.scores[direction].bleu for r in rs) for rs in (first, second)
        )
        sums = (sum(counted[r.name][direction] for r in rs) for rs in (first, second))
        metric = BLEU(references=[[""]])  # required, but the counts include the references
        found[direction] = (other - one, p_value(metric, *sums))
    return found
