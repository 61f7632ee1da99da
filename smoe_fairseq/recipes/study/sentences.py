"""The paired bootstrap of the systems that claims compare, by what is kept of each run's sentences.

Kept beside the runs: ``comparisons.json``.
"""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sacrebleu.metrics import BLEU

from smoe_fairseq.recipes.study import sentence_counts
from smoe_fairseq.recipes.study.kept import Result, folder_of
from smoe_fairseq.recipes.tables.bootstrap import p_value
from smoe_fairseq.settings.dataset import Dataset
from smoe_fairseq.system.errors import UsageError
from smoe_fairseq.system.files import write_whole

FILE = "comparisons.json"
LEVEL = 0.05


@dataclass(frozen=True)
class Compared:
    """By direction, the difference in BLEU and its p-value over sentences, of ``seeds`` of both systems."""

    directions: Mapping[str, tuple[float, float]]
    seeds: int

    def in_words(self, seeds: int) -> str:
        """How many directions are significantly above, and below; there are ``seeds`` of both."""
        above = sum(d > 0 and p < LEVEL for d, p in self.directions.values())
        below = sum(d < 0 and p < LEVEL for d, p in self.directions.values())
        words = f"{above} above, {below} below, of {len(self.directions)}"
        return words if self.seeds == seeds else f"{words} ({self.seeds} of {seeds} seeds)"


def compared(
    dataset: Dataset,
    systems: Mapping[str, Sequence[Result]],
    pairs: Iterable[tuple[str, str]],
) -> dict[tuple[str, str], Compared]:
    """By pair, of the seeds that both have and of whose sentences the counts are kept.

    One that was made before of more seeds stays; a pair of which there is none is left out.
    """
    file = folder_of(dataset.name) / FILE
    before = _read(file)
    everything = {r.name: round(r.bleu, 6) for results in systems.values() for r in results}
    now = {k: v for k, v in before.items() if v["runs"].items() <= everything.items()}
    counted: dict[str, sentence_counts.Counts] = {}
    found = {}
    for pair in dict.fromkeys(pairs):
        key = " ".join(pair)
        first, second = (
            {r.seed: r for r in systems[m] if sentence_counts.are_kept(r)} for m in pair
        )
        both = [
            result for seed in first if seed in second for result in (first[seed], second[seed])
        ]
        runs = {result.name: everything[result.name] for result in both}
        made = now.get(key, {}).get("runs", {})
        if len(runs) >= len(made) and runs != made:
            counted |= {r.name: sentence_counts.read(r) for r in both if r.name not in counted}
            now[key] = {"runs": runs, "directions": _directions(both[::2], both[1::2], counted)}
        if key in now:
            directions = {d: tuple(values) for d, values in now[key]["directions"].items()}
            found[pair] = Compared(directions, len(now[key]["runs"]) // 2)
    if now != before:
        write_whole(file, json.dumps(dict(sorted(now.items())), indent=1) + "\n")
    return found


def _read(file: Path) -> dict[str, dict]:
    try:
        before = json.loads(file.read_text("utf-8")) if file.exists() else {}
        if all(
            isinstance(pair[key], dict)
            for pair in before.values()
            for key in ("runs", "directions")
        ):
            return before
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    raise UsageError(
        f"{file} does not hold comparisons of runs: delete it, and those are made anew of which the counts "
        "of sentences are there"
    )


def _directions(
    first: Sequence[Result],
    second: Sequence[Result],
    counted: Mapping[str, sentence_counts.Counts],
) -> dict[str, tuple[float, float]]:
    """A sentence is drawn with the translations of all seeds."""
    found = {}
    for direction in first[0].scores:
        for r in [*first, *second]:
            _check_references(direction, first[0], r, counted)
        one, other = (
            statistics.fmean(r.scores[direction].bleu for r in rs) for rs in (first, second)
        )
        sums = (sum(counted[r.name][direction] for r in rs) for rs in (first, second))
        metric = BLEU(references=[[""]])  # it wants some; those that count are in the counts
        found[direction] = (other - one, p_value(metric, *sums))
    return found


def _check_references(
    direction: str, one: Result, other: Result, counted: Mapping[str, sentence_counts.Counts]
) -> None:
    lengths = (counted[r.name][direction][:, 1] for r in (one, other))
    if not np.array_equal(*lengths):
        raise UsageError(
            f"{one.folder} and {other.folder} were scored on different sentences of {direction}: evaluate "
            "and study again with the same test set"
        )
