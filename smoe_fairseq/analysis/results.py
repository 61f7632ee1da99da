"""What an analysis found, in memory for the pictures and as CSV for everyone else.

``tokens.csv``, ``blocks.csv``, ``load.csv``, ``flow.csv``, ``positions.csv``, ``exit_bias.csv`` and
``run.json``; strata, experts and layers are numbered from 0, as in the state dict.
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from fairseq.data import Dictionary

from smoe_fairseq.analysis.capacity_check import CapacityCheck
from smoe_fairseq.analysis.collect import Direction, TypeCounts
from smoe_fairseq.analysis.counts import Block, Counts
from smoe_fairseq.analysis.exit_curve import Curve
from smoe_fairseq.analysis.inputs import TEXT
from smoe_fairseq.analysis.pivot import pivot

KINDS = {False: "text", True: "special"}


@dataclass(frozen=True)
class TypeSummary:
    """Types of one direction and block that are text: number, occurrences and strata stopped at."""

    types: np.ndarray
    occurrences: np.ndarray
    stops: np.ndarray

    def extremes(self, number: int, min_count: int) -> tuple[np.ndarray, np.ndarray]:
        """Types of lowest and of highest mean requested capacity, without those seen too rarely.

        Among equals, those seen more often come first.
        """
        seen = self.occurrences >= min_count
        types, occurrences = self.types[seen], self.occurrences[seen]
        mean = self.stops[seen] / occurrences
        lowest = np.lexsort((types, -occurrences, mean))[:number]
        highest = np.lexsort((types, -occurrences, -mean))[:number]
        return types[lowest], types[highest]


@dataclass
class Results:
    """Counters by direction and block.

    Args:
        run: what was run, for ``run.json``.
        dictionaries: of "encoder" and "decoder".
        ranks: training-frequency ranks of each side's types, or None.
        sizes: training sentences of each direction, or None.
        capacity: what training's capacity takes away, or None where it has no limit.
        curve: over the exit bias, or None where that was not asked for.
    """

    run: dict
    dictionaries: dict[str, Dictionary]
    ranks: dict[str, np.ndarray] | None = None
    sizes: dict[str, int] | None = None
    capacity: CapacityCheck | None = None
    curve: Curve | None = None
    directions: list[str] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    counts: dict[tuple[str, str, bool], Counts] = field(default_factory=dict)
    types: dict[tuple[str, str], TypeSummary] = field(default_factory=dict)

    def add(self, direction: Direction) -> None:
        """Keeps a direction's sums; its counters by token type are not kept."""
        self.directions.append(direction.name)
        self.blocks = [block.block for block in direction.blocks]
        for block in direction.blocks:
            name = block.block.name
            for special in KINDS:
                self.counts[direction.name, name, special] = block.total(special)
            text = ~block.special
            self.types[direction.name, name] = TypeSummary(
                block.types[text], block.occurrences[text], block.stops[text]
            )

    @property
    def has_languages(self) -> bool:
        """No: of a language model."""
        return self.directions != [TEXT]

    def sides(self) -> list[str]:
        """Of "encoder" and "decoder", those that have blocks."""
        return list(dict.fromkeys(block.side for block in self.blocks))

    def of(self, direction: str, block: Block) -> Counts:
        """Counters of the tokens that are text."""
        return self.counts[direction, block.name, False]

    def over(self, directions: list[str], block: Block) -> Counts:
        """The same, summed over some directions."""
        first, *others = (self.of(direction, block) for direction in directions)
        return sum(others, start=first)

    def mean(self, direction: str, side: str) -> float:
        """Requested capacity, mean over the tokens and the blocks of one side; nan without blocks."""
        blocks = [self.of(direction, block) for block in self.blocks if block.side == side]
        tokens = sum(counts.tokens for counts in blocks)
        return sum(counts.stops for counts in blocks) / tokens if tokens else float("nan")

    def by_resource(self) -> list[str]:
        """Directions from most to least training data, or as they were given."""
        if self.sizes is None:
            return list(self.directions)
        return sorted(self.directions, key=lambda name: -self.sizes[name])

    def pivot(self) -> str | None:
        """See `pivot`."""
        return pivot(self.directions)


class TokenTable:
    """``tokens.csv``, written one direction at a time, since it may be larger than memory."""

    def __init__(self, path: Path, results: Results):
        self.results = results
        self.file = open(path, "w", encoding="utf-8", newline="")
        self.writer = csv.writer(self.file, lineterminator="\n")
        self.choices: list[tuple[int, int]] | None = None

    def add(self, direction: Direction) -> None:
        if self.choices is None:  # of all blocks, which may have other strata
            self.choices = sorted(
                {choice for block in direction.blocks for choice in _visible(block)}
            )
            self.writer.writerow(
                ["direction", "side", "layer", "token", "kind", "frequency_rank"]
                + ["occurrences", "requested_capacity"]
                + [f"stratum{i}_expert{e}" for i, e in self.choices]
            )
        for block in direction.blocks:
            self.writer.writerows(self._rows(direction.name, block))

    def _rows(self, direction: str, block: TypeCounts) -> Iterator[list]:
        side = block.block.side
        ranks = self.results.ranks
        visible = _visible(block)
        strata, experts = np.array(visible).T
        columns = [visible.index(choice) if choice in visible else None for choice in self.choices]
        for n, number in enumerate(block.types):
            first = block.first_choices[n][strata, experts].tolist()
            yield [
                *_names(direction, block.block),
                self.results.dictionaries[side][number],
                KINDS[bool(block.special[n])],
                "" if ranks is None or block.special[n] else ranks[side][number],
                block.occurrences[n],
                f"{block.stops[n] / block.occurrences[n]:.6f}",
                *("" if column is None else first[column] for column in columns),
            ]

    def __enter__(self) -> "TokenTable":
        return self

    def __exit__(self, *error) -> None:
        self.file.close()


def write(folder: Path, results: Results) -> None:
    """The sums over token types, and ``run.json``."""
    blocks, load, flow = [], [], []
    for (direction, _, special), counts in results.counts.items():
        block = counts.block
        start = [*_names(direction, block), KINDS[special]]
        mean = f"{counts.requested_capacity:.6f}" if counts.tokens else ""
        blocks.append([*start, counts.tokens, counts.stops, mean])
        load += [[*start, i, e, counts.first_choices[i, e]] for i, e in counts.visible()]
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
    if results.curve is not None:
        _write_curve(folder / "exit_bias.csv", results.curve)
    text = json.dumps(results.run, indent=2, ensure_ascii=False)
    (folder / "run.json").write_text(text + "\n", encoding="utf-8")


def _write_curve(path: Path, curve: Curve) -> None:
    header = ["direction", "exit_bias", "sentences", "requested_capacity", "nll_loss"]
    header += ["bleu", "seconds"]
    rows = []
    for p in curve.points:
        numbers = p.requested_capacity, p.nll_loss, p.bleu, p.seconds
        rows.append([p.direction, f"{p.bias:g}", p.sentences, *(f"{n:.6f}" for n in numbers)])
    _write(path, header, rows)


def _names(direction: str, block: Block) -> list[str]:
    return [direction, block.side, block.name.split(".")[-1]]


def _visible(block: TypeCounts) -> list[tuple[int, int]]:
    return block.total(special=False).visible()


def _write(path: Path, header: list[str], rows: list[list]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])
