"""How frequent a token type is in the training text."""

from pathlib import Path

import numpy as np
from fairseq.data import data_utils

from smoe_fairseq.analysis import inputs

_PART = 2**22  # tokens counted at a time


def ranks(task, directions: list[str]) -> dict[str, np.ndarray] | None:
    """Rank of each type by training frequency, 1 the most frequent, for "encoder" and "decoder".

    Each language's text of each pair is counted once, also when both directions are trained. Where
    the two sides share their dictionary, they share the counts. None without binarised training text.
    """
    same = task.source_dictionary == task.target_dictionary
    counts = {
        side: np.zeros(len(inputs.dictionary_of(task, side)), dtype=np.int64)
        for side in inputs.sides(task)
    }
    seen = set()
    for folder in inputs.folders(task):
        for direction in directions:
            for side, language in zip(counts, direction.split("-")):
                prefix = _prefix(folder, direction, language)
                if prefix is None:
                    return None
                if (same, prefix) in seen or (side, prefix) in seen:
                    continue
                seen.add((same, prefix) if same else (side, prefix))
                for other in counts if same else [side]:
                    counts[other] += _count(prefix, len(counts[other]))
    return {side: _rank(count) for side, count in counts.items()}


def sizes(task, directions: list[str]) -> dict[str, int] | None:
    """Training sentences of each direction; None without binarised training text."""
    found = dict.fromkeys(directions, 0)
    for direction in directions:
        for folder in inputs.folders(task):
            prefix = _prefix(folder, direction, direction.split("-")[0])
            if prefix is None:
                return None
            found[direction] += len(data_utils.load_indexed_dataset(prefix, None))
    return found


def _prefix(folder: Path, direction: str, language: str) -> str | None:
    reverse = "-".join(reversed(direction.split("-")))
    names = [f"train.{pair}.{language}" for pair in (direction, reverse)]
    for name in ["train"] if direction == inputs.TEXT else names:
        prefix = folder / name
        if prefix.with_name(f"{prefix.name}.idx").exists():
            return str(prefix)
    return None


def _count(prefix: str, vocabulary: int) -> np.ndarray:
    sentences = data_utils.load_indexed_dataset(prefix, None)
    counts = np.zeros(vocabulary, dtype=np.int64)
    part, size = [], 0
    for i in range(len(sentences)):
        part.append(sentences[i].numpy())
        size += len(part[-1])
        if size >= _PART or i == len(sentences) - 1:
            counts += np.bincount(np.concatenate(part), minlength=vocabulary)[:vocabulary]
            part, size = [], 0
    return counts


def _rank(counts: np.ndarray) -> np.ndarray:
    ranks = np.empty(len(counts), dtype=np.int64)
    ranks[np.argsort(-counts, kind="stable")] = np.arange(1, len(counts) + 1)
    return ranks
