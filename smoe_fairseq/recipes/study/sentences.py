"""The paired bootstrap of the systems that claims compare, kept beside the runs: ``comparisons.json``."""

import json
from collections.abc import Iterable, Mapping, Sequence

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


def compared(
    dataset: Dataset,
    systems: Mapping[str, Sequence[Result]],
    pairs: Iterable[tuple[str, str]],
) -> dict[tuple[str, str], dict[str, tuple[float, float]]]:
    """By pair and direction, the difference in BLEU and its p-value over sentences, of the seeds of both.

    As kept from before, and otherwise computed of the runs' translations. A pair of which there is neither
    is left out.
    """
    folders = Folders(dataset.name)
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
        if now.get(key, {}).get("runs") != runs:
            try:
                there = {name: _bleu(scores.read(folders.run(name))) for name in runs}
                if there != runs:  # a machine without the runs, or with others of these names
                    continue
                now[key] = {"runs": runs, "directions": by_sentences(dataset, *pair, common)}
            except UsageError:  # scores without translations
                continue
        found[pair] = {d: tuple(values) for d, values in now[key]["directions"].items()}
    if now != before:
        write_whole(file, json.dumps(dict(sorted(now.items())), indent=1) + "\n")
    return found


def _bleu(found: Mapping[str, Score]) -> float | None:
    """Mean over the directions as it is kept; None of a run that is not scored."""
    mean = scores.mean_bleu(found)
    return None if mean is None else round(mean, 6)


def in_words(directions: Mapping[str, tuple[float, float]]) -> str:
    """How many of them are significantly above, and below."""
    above = sum(d > 0 and p < LEVEL for d, p in directions.values())
    below = sum(d < 0 and p < LEVEL for d, p in directions.values())
    return f"{above} above, {below} below, of {len(directions)}"
