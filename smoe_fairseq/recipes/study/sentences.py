"""The paired bootstrap of the systems that claims compare, kept beside the runs: ``comparisons.json``."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from smoe_fairseq.recipes.evaluating import scores
from smoe_fairseq.recipes.evaluating.scores import Score
from smoe_fairseq.recipes.folders import Folders
from smoe_fairseq.recipes.study.kept import Result, folder_of
from smoe_fairseq.recipes.tables.compare import by_sentences
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
    """By pair, of the seeds that both have: computed of the runs' translations, or as kept from before.

    What is kept may be of fewer seeds, where the translations are elsewhere. A pair of which there is
    neither is left out.
    """
    file = folder_of(dataset.name) / FILE
    before = json.loads(file.read_text("utf-8")) if file.exists() else {}
    everything = {r.name: _bleu(r.scores) for results in systems.values() for r in results}
    now = {k: v for k, v in before.items() if v["runs"].items() <= everything.items()}
    found = {}
    for pair in dict.fromkeys(pairs):
        key = " ".join(pair)
        common = set.intersection(*({r.seed for r in systems[method]} for method in pair))
        of_both = [r for method in pair for r in systems[method] if r.seed in common]
        runs = {r.name: everything[r.name] for r in of_both}
        if now.get(key, {}).get("runs") != runs and _there(dataset, runs):
            with suppress(UsageError):  # scores without translations
                now[key] = {"runs": runs, "directions": by_sentences(dataset, *pair, common)}
        if key in now:
            directions = {d: tuple(values) for d, values in now[key]["directions"].items()}
            found[pair] = Compared(directions, len(now[key]["runs"]) // 2)
    if now != before:
        write_whole(file, json.dumps(dict(sorted(now.items())), indent=1) + "\n")
    return found


def _there(dataset: Dataset, runs: Mapping[str, float | None]) -> bool:
    """Whether these are the machine's; it may have none, or others of these names."""
    folders = Folders(dataset.name)
    try:
        return {name: _bleu(scores.read(folders.run(name))) for name in runs} == runs
    except UsageError:
        return False


def _bleu(found: Mapping[str, Score]) -> float | None:
    """Mean over the directions as it is kept; None of a run that is not scored."""
    mean = scores.mean_bleu(found)
    return None if mean is None else round(mean, 6)
