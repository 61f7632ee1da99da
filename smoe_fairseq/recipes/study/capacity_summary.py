"""Where the capacity of a run goes, in the numbers that claims are about, as ``smoe analyze`` finds them."""

import csv
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from smoe_fairseq.recipes.folders import Folders
from smoe_fairseq.recipes.shell import command
from smoe_fairseq.settings.dataset import Dataset

FOLDER = "routing"  # beside the checkpoints
MIN_COUNT = 10  # occurrences of a token whose mean is looked at


def commands(dataset: Dataset, run: Path) -> list[str]:
    """What makes the analysis of the test set, anew."""
    checkpoint = run / f"checkpoint_{dataset.checkpoint}.pt"
    data = Folders(dataset.name).binary_path(dataset.shards)
    analyze = ("smoe", "analyze", data, "--path", checkpoint, "--gen-subset", "test")
    return [
        command("rm", "-rf", run / FOLDER),
        command(*analyze, "--output", run / FOLDER),
    ]


def summary(run: Path) -> dict | None:
    """What is kept of it, with layers as "encoder.1"; None where there is none.

    Returns:
        "requested_capacity": by direction and layer, the mean over tokens that are text; "rank_correlation":
        by layer, Spearman's, over the types of all directions, of a type's rank by frequency in training
        (1 is the most frequent) and its mean requested capacity.
    """
    folder = run / FOLDER
    if not folder.exists():
        return None
    requested: dict[str, dict[str, float]] = defaultdict(dict)
    for row in _rows(folder / "blocks.csv"):
        requested[row["direction"]][_layer(row)] = float(row["requested_capacity"])
    types: dict[str, dict[str, list[float]]] = defaultdict(dict)  # rank, occurrences, stops
    for row in _rows(folder / "tokens.csv"):
        if row["frequency_rank"]:
            number = int(row["occurrences"])
            stops = number * float(row["requested_capacity"])
            of_type = types[_layer(row)].setdefault(
                row["token"], [float(row["frequency_rank"]), 0, 0]
            )
            of_type[1] += number
            of_type[2] += stops
    correlation = {}
    for layer, of_layer in types.items():
        seen = np.array([values for values in of_layer.values() if values[1] >= MIN_COUNT])
        if len(seen) > 2:
            correlation[layer] = spearman(seen[:, 0], seen[:, 2] / seen[:, 1])
    return {"requested_capacity": dict(requested), "rank_correlation": correlation}


def mean(runs: Iterable[dict | None]) -> dict[str, float] | None:
    """Requested capacity by MoE layer, as `moe_blocks` names them, over directions and ``runs``."""
    found = defaultdict(list)
    for run in runs:
        for layers in run["requested_capacity"].values() if run else ():
            for layer, value in layers.items():
                found[layer.replace(".", ".layer.")].append(value)
    return {layer: statistics.fmean(values) for layer, values in found.items()} or None


def _rows(file: Path) -> Iterator[dict]:
    """Those of text."""
    with open(file, encoding="utf-8", newline="") as lines:
        yield from (row for row in csv.DictReader(lines) if row["kind"] == "text")


def _layer(row: dict) -> str:
    return f"{row['side']}.{row['layer']}"


def spearman(first: np.ndarray, second: np.ndarray) -> float:
    """Correlation of the ranks, among equals their mean; nan where all of one are equal."""
    ranks = [_ranks(values) for values in (first, second)]
    if any(np.ptp(values) == 0 for values in ranks):
        return float("nan")
    return float(np.corrcoef(*ranks)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[where]
