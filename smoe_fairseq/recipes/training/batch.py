"""The batch of a run: tokens (or sentences) per update, the same on any number of ranks."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes.datasets import Dataset
from smoe_fairseq.recipes.folders import shard_folders
from smoe_fairseq.recipes.program_flags import FAIRSEQ_POSITIONS, Flags, flag_values, is_number

TOLERANCE = 0.02  # of the tokens requested
SIZES = ("max-tokens", "batch-size")  # of one forward pass on one rank, in tokens or in sentences


@dataclass(frozen=True)
class Batch:
    """``ranks`` times ``size`` times ``update_freq`` tokens per update; ``requested`` is the target."""

    unit: str  # max-tokens (of the longer side), or batch-size if a data set sets only that
    requested: int
    ranks: int
    size: int
    update_freq: int
    name: str = ""  # the value of BATCH, if that chose the batch
    sentences: int | None = None  # maximum per forward pass and rank, in addition to tokens

    @property
    def total(self) -> int:
        """Per update, over all ranks."""
        return self.ranks * self.size * self.update_freq

    @property
    def is_close(self) -> bool:
        """Whether ``total`` is within `TOLERANCE` of the request."""
        return abs(self.total - self.requested) <= TOLERANCE * self.requested

    def flags(self) -> Flags:
        """The flags of fairseq-train."""
        sentences = {"batch-size": self.sentences} if self.sentences else {}
        return {self.unit: self.size, **sentences, "update-freq": self.update_freq}

    def __str__(self) -> str:
        what = "tokens" if self.unit == "max-tokens" else "sentences"
        plural = "s" if self.ranks > 1 else ""
        text = (
            f"{self.total:,} {what} per update = {self.ranks} rank{plural} x {self.size:,} "
            f"(--{self.unit}) x {self.update_freq} (--update-freq)"
        )
        requested = f"; requested (--batch {self.name}): {self.requested:,}" if self.name else ""
        return text + requested


def batch_choices(dataset: Dataset) -> str:
    """The values of ``BATCH``, in words."""
    names = [f"{name} ({size:,})" for name, size in _named(dataset).items()]
    return ", ".join(names) + (" or a number" if names else "a number")


def plan_batch(
    dataset: Dataset, flags: Flags, ranks: int, extra: Sequence[str] = (), least: int = 1
) -> Batch | None:
    """Divide the batch over the ranks.

    The batch is ``BATCH`` (a name of the data set or a number of tokens), else the data set's ``paper``,
    else that of ``flags`` (the recipe's) and ``extra`` (the user's) on one rank; None if none is set, or
    ``--update-freq`` is a list, with a number for each epoch. It is divided into the same forward passes, of
    ``least`` tokens or more, if the number of ranks allows it. The user's ``--update-freq``, and
    ``--max-tokens`` with a ``BATCH``, are not changed.

    Raises:
        UsageError: ``BATCH`` is neither a name nor a number, a flag is not a number, or the ranks cannot
            share the batch.
    """
    frequencies = flag_values(extra).get("--update-freq", str(flags.get("update-freq", 1)))
    name = dataset.settings.batch or ("paper" if "paper" in _named(dataset) else "")
    if not name and {",", "["} & set(frequencies):
        return None
    typed = {name: _number(extra, f"--{name}") for name in (*SIZES, "update-freq")}
    if name:
        requested = _named(dataset).get(name)
        if requested is None and not (name.isdecimal() and int(name)):
            raise UsageError(f"--batch {name}: expected {batch_choices(dataset)} of tokens from 1")
        requested = requested or int(name)
        most = dataset.batch.get("max-tokens") or flags.get("max-tokens") or requested
        return _named_batch(name, requested, most, ranks, typed, least)
    sizes = {unit: typed[unit] or flags.get(unit) for unit in SIZES}
    unit = next((unit for unit, size in sizes.items() if size), None)
    if unit is None:
        return None
    size, frequency = int(sizes[unit]), typed["update-freq"] or int(flags.get("update-freq", 1))
    if typed["update-freq"] or ranks == 1:
        return Batch(unit, ranks * size * frequency, ranks, size, frequency)
    batch = _divide(unit, size * frequency, size, ranks, least if unit == "max-tokens" else 1)
    if unit == "max-tokens" and (sentences := sizes["batch-size"]):
        return replace(batch, sentences=max(1, round(int(sentences) * batch.size / size)))
    return batch


def _named(dataset: Dataset) -> dict[str, int]:
    return {name: size for name, size in dataset.batch.items() if name != "max-tokens"}


def _named_batch(name: str, total: int, most: int, ranks: int, typed: dict, least: int) -> Batch:
    frequency, size = typed["update-freq"], typed["max-tokens"]
    if size:
        frequency = frequency or max(1, round(total / ranks / size))
    elif frequency:
        size = min(max(least, most), max(least, int(total / ranks / frequency)))
    else:
        return _divide("max-tokens", total, most, ranks, least, name)
    return Batch("max-tokens", total, ranks, size, frequency, name)


def _divide(unit: str, requested: int, most: int, ranks: int, least: int, name: str = "") -> Batch:
    """The batch in as few forward passes of ``least`` to ``most`` tokens as possible."""

    def on(ranks: int) -> Batch:
        frequency = -int(-requested / ranks // max(least, most))
        size = min(max(least, most), max(least, int(requested / ranks / frequency)))
        return Batch(unit, requested, ranks, size, frequency, name)

    batch = on(ranks)
    if not batch.is_close:
        most_ranks = 2 * requested  # with more of them a rank has no token
        below = range(min(ranks - 1, most_ranks), 0, -1)
        above = range(ranks + 1, min(2 * ranks, most_ranks) + 1)
        found = (next((n for n in side if on(n).is_close), None) for side in (below, above))
        near = " or ".join(str(n) for n in found if n) or "none"
        room = f"; a rank needs room for a sentence of {least}" if least > 1 else ""
        shared = f"{requested:,} {'tokens' if unit == 'max-tokens' else 'sentences'}{room}"
        advice = f"the nearest number that can is {near}; or set --batch"
        raise UsageError(f"{ranks} ranks (--gpus) cannot share a batch of {shared}: {advice}")
    return batch


def _number(words: Sequence[str], flag: str) -> int | None:
    value = flag_values(words).get(flag)
    if value is None:
        return None
    if not value.isdecimal() or not int(value):
        raise UsageError(f"{flag} {value}: expected a whole number of at least 1")
    return int(value)


def without_flags(words: Sequence[str], flags: Collection[str]) -> list[str]:
    """The words without ``flags``, which are named as settings, and their values."""
    kept, dropping = [], False
    for word in words:
        if word.startswith("-") and not is_number(word):
            (name,) = flag_values([word])  # `--batch-size` for --max-sentences
            dropping = name.removeprefix("--") in flags
        if not dropping:
            kept.append(word)
    return kept


def most_positions(flags: Flags, extra: Sequence[str]) -> int:
    """Maximum tokens of a sentence; fairseq does not train on longer ones."""
    names = (f"max-{side}-positions" for side in ("source", "target"))
    numbers = (_number(extra, f"--{name}") or flags.get(name) for name in names)
    return max(int(number or FAIRSEQ_POSITIONS) for number in numbers)


def longest_sentence(folder: Path) -> int | None:
    """Tokens of the longest training or validation sentence on either side, with its language token.

    Only the first shard is read. None without a readable index.
    """
    from smoe_fairseq.recipes.data.binarise import read_index  # imports numpy and sentencepiece

    longest = 0
    first = shard_folders(folder)[0]
    for file in [*first.glob("train.*.idx"), *first.glob("valid.*.idx")]:
        try:
            longest = max(longest, int(read_index(file).max(initial=0)))
        except (OSError, UsageError):
            return None  # another format, or cut off: training reports it
    return longest + 1 if longest else None
