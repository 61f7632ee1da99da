"""The tables of an analysis."""

import csv
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from fairseq.data import Dictionary, data_utils
from fairseq.data.indexed_dataset import MMapIndexedDataset

from smoe_fairseq.analysis import inputs
from smoe_fairseq.analysis.capacity import CapacityCheck
from smoe_fairseq.analysis.record import Block, Counts, TypeCounts

# Frequency of token types in the training text.

_PART = 2**22  # tokens counted at a time


def ranks(task, directions: list[str]) -> dict[str, np.ndarray] | None:
    """Rank of each type by training frequency, from 1, for "encoder" and "decoder".

    Each language's text of each pair is counted once, even if both directions are trained. Sides with equal
    dictionaries share the counts. Directions without training text do not count; None if all lack it.
    """
    texts: dict[str, set[str | None]] = {side: set() for side in inputs.sides(task)}
    for folder, direction in itertools.product(inputs.folders(task), directions):
        languages = inputs.languages(task, direction)
        for side, language in zip(texts, languages):
            texts[side].add(_prefix(folder, languages, language))
    prefixes = set.union(*texts.values()) - {None}
    if not prefixes:
        return None
    if task.source_dictionary == task.target_dictionary:
        return dict.fromkeys(texts, _rank(prefixes, task.source_dictionary))
    return {
        side: _rank(own - {None}, inputs.dictionary_of(task, side)) for side, own in texts.items()
    }


def sizes(task, directions: list[str]) -> dict[str, int] | None:
    """Training sentences of each direction; None without any binarised training text."""
    numbers = dict.fromkeys(directions, 0)
    for direction in directions:
        languages = inputs.languages(task, direction)
        for folder in inputs.folders(task):
            prefix = _prefix(folder, languages, languages[0])
            if prefix is not None:
                numbers[direction] += len(data_utils.load_indexed_dataset(prefix, None))
    return numbers if any(numbers.values()) else None


def _prefix(folder: Path, languages: list[str], language: str) -> str | None:
    pairs = ("-".join(order) for order in (languages, reversed(languages)))
    names = [f"train.{pair}.{language}" for pair in pairs]
    for name in ["train"] if languages == [inputs.TEXT] else names:
        if (folder / f"{name}.idx").exists():
            return str(folder / name)
    return None


def _count(prefix: str, vocabulary: int) -> np.ndarray:
    """The frequency of each type in a binarised text."""
    sentences = data_utils.load_indexed_dataset(prefix, None)
    counts = np.zeros(vocabulary, dtype=np.int64)
    if isinstance(sentences, MMapIndexedDataset):  # its sentences are one array
        size = int(sentences.sizes.sum())
        tokens = np.frombuffer(sentences._bin_buffer, sentences._index.dtype, size)
        parts = (tokens[i : i + _PART] for i in range(0, len(tokens), _PART))
    else:
        parts = (sentences[i].numpy() for i in range(len(sentences)))
    for part in parts:
        counts += np.bincount(part, minlength=vocabulary)[:vocabulary]
    return counts


def _rank(texts: Iterable[str], dictionary: Dictionary) -> np.ndarray:
    counts = sum(_count(prefix, len(dictionary)) for prefix in texts)
    ranks = np.empty(len(counts), dtype=np.int64)
    ranks[np.argsort(-counts, kind="stable")] = np.arange(1, len(counts) + 1)
    return ranks


# The results of an analysis, in memory for the pictures and in files: ``tokens.csv``, ``blocks.csv``,
# ``load.csv``, ``flow.csv``, ``positions.csv`` and ``run.json``. Strata, experts and layers are numbered from
# 0, as in the state dict.

KINDS = {False: "text", True: "special"}


@dataclass
class Results:
    """Counters by direction and block."""

    run: dict  # the content of ``run.json``
    dictionaries: dict[str, Dictionary]  # of "encoder" and "decoder"
    ranks: dict[str, np.ndarray] | None = None  # of each side's types, by training frequency
    sizes: dict[str, int] | None = None  # training sentences of each direction
    capacity: CapacityCheck | None = None  # None if training has no limit
    # Source and target of each direction; by default its name is split at the hyphen.
    languages: dict[str, list[str]] = field(default_factory=dict)
    directions: list[str] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    counts: dict[tuple[str, str, bool], Counts] = field(default_factory=dict)
    # ``(3, N)``: types of text, their occurrences and their stops.
    types: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)

    def add(self, direction: str, blocks: list[TypeCounts]) -> None:
        """Add the sums of a direction, without its counters by token type."""
        self.directions.append(direction)
        self.blocks = [block.block for block in blocks]
        for block in blocks:
            name = block.block.name
            for special in KINDS:
                self.counts[direction, name, special] = block.total(special)
            numbers = np.stack([block.types, block.occurrences, block.stops])
            self.types[direction, name] = numbers[:, ~block.special]

    @property
    def has_languages(self) -> bool:
        """False for a language model."""
        return self.directions != [inputs.TEXT]

    def sides(self) -> list[str]:
        """The sides ("encoder", "decoder") that have blocks."""
        return list(dict.fromkeys(block.side for block in self.blocks))

    def blocks_of(self, side: str) -> list[Block]:
        return [block for block in self.blocks if block.side == side]

    def of(self, direction: str, block: Block) -> Counts:
        """Counters of text, without special tokens."""
        return self.counts[direction, block.name, False]

    def over(self, directions: list[str], block: Block) -> Counts:
        """Counters of text, summed over some directions."""
        first, *others = (self.of(direction, block) for direction in directions)
        return sum(others, start=first)

    def mean(self, directions: list[str], side: str) -> float:
        """Requested capacity, mean over the tokens and the blocks of one side; nan without blocks."""
        blocks = [self.over(directions, block) for block in self.blocks_of(side)]
        tokens = sum(counts.tokens for counts in blocks)
        return sum(counts.stops for counts in blocks) / tokens if tokens else float("nan")

    def means(self, side: str, into: str = "") -> dict[str, float]:
        """`mean` of each direction, or of those into one language."""
        end = f"-{into}" if into else ""
        return {name: self.mean([name], side) for name in self.directions if name.endswith(end)}

    def by_depth(self, side: str) -> list[float]:
        """Requested capacity, mean over the tokens of all directions, of each block of a side."""
        blocks = (self.over(self.directions, block) for block in self.blocks_of(side))
        return [counts.requested_capacity for counts in blocks]

    def by_resource(self) -> list[str]:
        """Directions from most to least training data, or in their original order if it is missing."""
        if self.sizes is None:
            return list(self.directions)
        return sorted(self.directions, key=lambda name: -self.sizes[name])

    def pivot(self) -> str | None:
        """The language that all directions ("de-en") have in common, if there is exactly one."""
        languages = [set(direction.split("-")) for direction in self.directions]
        common = set.intersection(*languages) if len(languages) > 1 else set()
        return common.pop() if len(common) == 1 else None


TOKENS = ["direction", "side", "layer", "token", "kind", "frequency_rank", "occurrences"]


def token_rows(results: Results, direction: str, blocks: list[TypeCounts]) -> Iterator[list]:
    """Rows of ``tokens.csv``, with the header for the first direction.

    The table is written one direction at a time, since it may be larger than memory.
    """
    # Of all blocks, since strata may differ.
    columns = sorted({c for block in blocks for c in block.block.choices()})
    if results.directions == [direction]:
        yield [*TOKENS, "requested_capacity", *(f"stratum{i}_expert{e}" for i, e in columns)]
    for block in blocks:
        side, occurrences, stops = block.block.side, block.occurrences, block.stops
        choices = block.block.choices()
        strata, experts = np.array(choices).T
        for n, number in enumerate(block.types):
            ranked = results.ranks is not None and not block.special[n]
            first = dict(zip(choices, block.first_choices[n][strata, experts].tolist()))
            yield [
                *_names(direction, block.block),
                results.dictionaries[side][number],
                KINDS[bool(block.special[n])],
                results.ranks[side][number] if ranked else "",
                occurrences[n],
                f"{stops[n] / occurrences[n]:.6f}",
                *(first.get(choice, "") for choice in columns),
            ]


def write(folder: Path, results: Results) -> None:
    """The sums over token types, and ``run.json``."""
    blocks, load, flow = [], [], []
    for (direction, _, special), counts in results.counts.items():
        block = counts.block
        start = [*_names(direction, block), KINDS[special]]
        mean = f"{counts.requested_capacity:.6f}" if counts.tokens else ""
        blocks.append([*start, counts.tokens, counts.stops, mean])
        load += [[*start, i, e, counts.first_choices[i, e]] for i, e in block.choices()]
        moves = counts.flow()
        for i, j in np.argwhere(np.triu(np.ones_like(moves))):
            if not block.strata.fixed_depth or i == j:
                flow.append([*start, i, j, moves[i, j]])
    start = ["direction", "side", "layer", "kind"]
    _write(folder / "blocks.csv", [*start, "tokens", "stops", "requested_capacity"], blocks)
    _write(folder / "load.csv", [*start, "stratum", "expert", "first_choices"], load)
    _write(folder / "flow.csv", [*start, "stratum", "chosen_stratum", "tokens"], flow)
    if results.capacity is not None:
        positions = [
            [*name.split(".")[::2], fifth, *counts]
            for name, table in results.capacity.fifths.items()
            for fifth, counts in enumerate(table.T.tolist(), start=1)
        ]
        header = ["side", "layer", "fifth", "first_choices", "dropped"]
        _write(folder / "positions.csv", header, positions)
    text = json.dumps(results.run, indent=2, ensure_ascii=False)
    (folder / "run.json").write_text(text + "\n", encoding="utf-8")


def _names(direction: str, block: Block) -> list[str]:
    return [direction, block.side, block.name.split(".")[-1]]


def _write(path: Path, header: list[str], rows: list[list]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])
