"""A run is a method and a seed: ``SEED=2 scripts/train.sh m4 moe`` has a folder of its own."""

import os
import re

from smoe_fairseq.settings.dataset import Dataset
from smoe_fairseq.system.errors import UsageError

_NAME = re.compile(r"(?P<method>.+)\.seed-(?P<seed>\d+)")
LARGEST = 2**31 - 1


def seed_of(dataset: Dataset) -> int:
    """``SEED``, or the data set's own.

    Raises:
        UsageError: it is no number.
    """
    given = os.environ.get("SEED", "")
    return _number("SEED", given) if given else _own(dataset)


def several(dataset: Dataset) -> tuple[int, ...]:
    """``SEEDS``, with blanks between them, or the data set's own.

    Raises:
        UsageError: one is no number, or is there twice.
    """
    given = os.environ.get("SEEDS", "").split()
    found = tuple(_number("SEEDS", word) for word in given) or (_own(dataset),)
    if len(set(found)) < len(found):
        raise UsageError(f"SEEDS={' '.join(given)}: expected each seed once")
    return found


def _number(variable: str, given: str) -> int:
    if not (given.isascii() and given.isdecimal() and int(given) <= LARGEST):
        raise UsageError(f"{variable}={given}: expected a whole number from 0 to {LARGEST:,}")
    return int(given)


def run_name(dataset: Dataset, method: str) -> str:
    """The run's folder, of the seed that is chosen."""
    return name_of(dataset, method, seed_of(dataset))


def name_of(dataset: Dataset, method: str, seed: int) -> str:
    """A run's folder; that of the data set's own seed has just the method's name."""
    return method if seed == _own(dataset) else f"{method}.seed-{seed}"


def _own(dataset: Dataset) -> int:
    return dataset.train.get("seed", 1)  # fairseq's


def method_of(name: str) -> str:
    """Of a run's folder."""
    found = _NAME.fullmatch(name)
    return found["method"] if found else name


def seed_in(name: str) -> int | None:
    """Of a run's folder; None is the data set's own."""
    found = _NAME.fullmatch(name)
    return int(found["seed"]) if found else None


def number_in(dataset: Dataset, name: str) -> int:
    """The same, with the data set's own as a number."""
    found = seed_in(name)
    return _own(dataset) if found is None else found


def order(name: str) -> tuple[str, int]:
    """Runs of a method one after the other, that of the data set's own seed first."""
    found = _NAME.fullmatch(name)
    return (found["method"], int(found["seed"])) if found else (name, -1)
