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
        By direction and layer: "requested_capacity", the mean over tokens that are text, and
        "rank_correlation", Spearman's, over types, of a type's rank by frequency in training (1 is the most
        frequent) and its mean requested capacity. Within a direction, since languages differ in both.
    """
    folder = run / FOLDER
    if not folder.exists():
        return None
    requested: dict[str, dict[str, float]] = defaultdict(dict)
    for row in _rows(folder / "blocks.csv"):
        requested[row["direction"]][_layer(row)] = float(row["requested_capacity"])
    types: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)  # rank, capacity
    for row in _rows(folder / "tokens.csv"):
        if row["frequency_rank"] and int(row["occurrences"]) >= MIN_COUNT:
            numbers = float(row["frequency_rank"]), float(row["requested_capacity"])
            types[row["direction"], _layer(row)].append(numbers)
    correlation: dict[str, dict[str, float]] = defaultdict(dict)
    for (direction, layer), numbers in types.items():
        if len(numbers) > 2:
            found = spearman(*np.array(numbers).T)
            if found == found:  # where all ask for the same there is none
                correlation[direction][layer] = round(found, 4)
    return {"requested_capacity": dict(requested), "rank_correlation": dict(correlation)}


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
