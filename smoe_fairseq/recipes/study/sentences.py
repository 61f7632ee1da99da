"""The paired bootstrap of the systems that claims compare, kept beside the runs: ``comparisons.json``."""

import json
from collections.abc import Iterable, Mapping, Sequence

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

    Computed of the runs' translations where these are there; otherwise as kept from before. A pair of which
    there is neither is left out.
    """
    file = folder_of(dataset.name) / FILE
    before = json.loads(file.read_text("utf-8")) if file.exists() else {}
    now, found = {}, {}
    for pair in dict.fromkeys(pairs):
        key = " ".join(pair)
        common = set.intersection(*({r.seed for r in systems[method]} for method in pair))
        of_both = [r for method in pair for r in systems[method] if r.seed in common]
        runs = {r.name: round(r.bleu, 6) for r in of_both}
        if before.get(key, {}).get("runs") == runs:
            now[key] = before[key]
        else:
            try:
                now[key] = {"runs": runs, "directions": by_sentences(dataset, *pair, common)}
            except UsageError:  # a machine without the runs
                continue
        found[pair] = {d: tuple(values) for d, values in now[key]["directions"].items()}
    text = json.dumps(now, indent=1) + "\n"
    if now and now != before:
        write_whole(file, text)
    return found


def in_words(directions: Mapping[str, tuple[float, float]]) -> str:
    """How many of them are significantly above, and below."""
    above = sum(d > 0 and p < LEVEL for d, p in directions.values())
    below = sum(d < 0 and p < LEVEL for d, p in directions.values())
    return f"{above} above, {below} below, of {len(directions)}"
