"""Routing metrics over the course of training, read from fairseq's log."""

import json
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from smoe_fairseq.files import read_plain

UPDATES = "num_updates"
MAX_BYTES = 1 << 32
NUMBER = re.compile(r"([\w./]+)[ =]([-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?)(?=,| \||$)", re.ASCII)
VALID_NUMBER = re.compile(
    r" \| (\w+) ([-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?|nan|inf)(?= \||$)", re.ASCII
)
JSON_NUMBER = r'"{}_(\w+)": "?([-+.\w]+)"?[,}}]'
VALID_SUBSETS = re.compile(r" --valid-subset[ =]([^\s,]+)")
LAYER = re.compile(r"(?:encoder|decoder)\.layer\.\d+/", re.ASCII)
TRAINING = re.compile(r"^(?:.*\| train_inner \| |.*INFO \| \S+ \| )?(epoch \d+:.*|\{.*\})$")


def read(path: Path) -> dict[str, dict[int, float]]:
    """The values of each logged routing metric by update, by the metric's name."""
    series: dict[str, dict[int, float]] = {}
    for values in read_lines(path):
        for name, value in values.items():
            if LAYER.match(name) or name.startswith(("requested_capacity", "overflow_", "unused_")):
                series.setdefault(name, {})[int(values[UPDATES])] = value
    return series


def read_lines(path: Path) -> Iterator[dict[str, float]]:
    """The values of each line of training, from ``--log-file`` or a redirected console.

    fairseq's formats simple and json are supported. Raises UsageError for a file that cannot be read.
    """
    for line in _lines(path):
        if UPDATES in (values := _values(line)):
            yield values


def read_validations(path: Path) -> Iterator[dict[str, float]]:
    """The values of each validation, in the formats of `read_lines`; a loss may be NaN or infinite.

    Of several validation sets the first counts, by which fairseq chooses the best checkpoint.
    """
    subset = "valid"
    for line in _lines(path):
        if line.startswith("$ "):  # the command of a recipe
            *_, subset = ["valid", *VALID_SUBSETS.findall(line)]
        found = VALID_NUMBER.findall(line.partition(f" | valid on '{subset}' subset")[2])
        found = found or re.findall(JSON_NUMBER.format(re.escape(subset)), line, re.ASCII)
        with suppress(ValueError):  # a line that is cut off
            values = {name: float(value) for name, value in found}
            if UPDATES in values:
                yield values


def _lines(path: Path) -> list[str]:
    """The lines of a log, which a crash may have damaged."""
    return read_plain(path, MAX_BYTES).decode("utf-8", "replace").splitlines()


def _values(line: str) -> dict[str, float]:
    match = TRAINING.match(line)
    if match is None:
        return {}
    text = match[1]
    if not text.startswith("{"):
        return _finite(NUMBER.findall(text))
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return _finite(values.items())


def _finite(values: Iterable[tuple[str, object]]) -> dict[str, float]:
    """The finite numbers. Other values occur if a log is cut off, or if two runs write it at once."""
    numbers = {}
    for name, value in values:
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            continue
        if math.isfinite(number):
            numbers[name] = number
    return numbers
