"""The columns of a data set's table: directions, or averages over classes of languages."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from smoe_fairseq.recipes.folders import Folders
from smoe_fairseq.settings.dataset import Dataset
from smoe_fairseq.settings.paper_tables import resource_classes
from smoe_fairseq.system.errors import UsageError

SIZES = "sizes.json"  # in the data set's folder: {language: training sentence pairs}


@dataclass(frozen=True)
class Column:
    """The average over some directions, or one of them; None: which ones is not known."""

    name: str
    directions: tuple[str, ...] | None


def columns(dataset: Dataset) -> list[Column]:
    """In the paper's order; the last one is the average over all directions."""
    if classes := resource_classes(dataset.name):
        if None in classes.values():
            classes = resource_classes(dataset.name, _counted(dataset))
        found = _by_class(dataset, classes)
    else:
        found = [Column(direction, (direction,)) for direction in dataset.directions]
    return [*found, Column("average", dataset.directions)]


def _counted(dataset: Dataset) -> dict[str, int] | None:
    """Sentence pairs of each language's training text, as prepare.sh counted them; None: it did not."""
    path = Folders(dataset.name).data / SIZES
    if not path.exists():
        return None
    try:
        sizes = json.loads(path.read_text("utf-8"))
        if not all(isinstance(size, int) for size in sizes.values()):
            raise ValueError
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, AttributeError):
        raise UsageError(f"{path} has to hold {{language: sentence pairs}} in JSON") from None
    missing = [language for language in dataset.languages[1:] if language not in sizes]
    if missing:
        raise UsageError(f"{path} has no size for {', '.join(missing)}: prepare the data again")
    return sizes


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
