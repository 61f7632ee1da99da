"""The columns of a data set's table: directions, or averages over classes of languages."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from smoe_fairseq.recipes.folders import Folders
from smoe_fairseq.settings.dataset import Dataset
from smoe_fairseq.settings.paper_tables import tables
from smoe_fairseq.system.errors import UsageError

SIZES = "sizes.json"  # in the data set's folder: {language: training sentence pairs}
HIGH, LOW = 900_000, 100_000  # OPUS-100: high above, low below, medium between


@dataclass(frozen=True)
class Column:
    """The average over some directions, or one of them; None: which ones is not known."""

    name: str
    directions: tuple[str, ...] | None


def columns(dataset: Dataset) -> list[Column]:
    """In the paper's order; the last one is the average over all directions."""
    if dataset.name == "m15":
        found = _by_class(dataset, tables()["m15_classes"])
    elif dataset.name == "opus100":
        found = _by_class(dataset, opus_classes(dataset))
    else:
        found = [Column(direction, (direction,)) for direction in dataset.directions]
    return [*found, Column("average", dataset.directions)]


def opus_classes(dataset: Dataset) -> dict[str, list[str] | None]:
    """Languages by the size of their training text, which prepare.sh counted; None: not counted."""
    path = Folders(dataset.name).data / SIZES
    if not path.exists():
        return {"high": None, "medium": None, "low": None}
    try:
        sizes = json.loads(path.read_text("utf-8"))
        missing = [language for language in dataset.languages[1:] if language not in sizes]
        if missing:
            raise UsageError(f"{path} has no size for {', '.join(missing)}: prepare the data again")
        high = [language for language, size in sizes.items() if size > HIGH]
        low = [language for language, size in sizes.items() if size < LOW]
    except (ValueError, TypeError, AttributeError):
        raise UsageError(f"{path} has to hold {{language: sentence pairs}} in JSON") from None
    medium = [language for language in sizes if language not in {*high, *low}]
    return {"high": high, "medium": medium, "low": low}


def _by_class(dataset: Dataset, classes: Mapping[str, Sequence[str] | None]) -> list[Column]:
    english = dataset.languages[0]
    found = []
    for side, position in (("eng-xxx", 0), ("xxx-eng", 1)):
        here = [d for d in dataset.directions if d.split("-")[position] == english]
        found.append(Column(f"{side} all", tuple(here)))
        for name, languages in classes.items():
            chosen = None
            if languages is not None:
                chosen = tuple(d for d in here if d.split("-")[1 - position] in languages)
            found.append(Column(f"{side} {name}", chosen))
    return found
