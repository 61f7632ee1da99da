"""The batch of a run: tokens (or sentences) per update, the same on any number of ranks."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes.config import FAIRSEQ_POSITIONS, Dataset, Flags, flag_values, is_number
from smoe_fairseq.recipes.folders import shard_folders

TOLERANCE = 0.02  # of the tokens requested
SIZES = ("max-tokens", "batch-size")  # of one forward pass on one rank, in tokens or in sentences


@dataclass(frozen=True)
class Batch:
    """``ranks`` times ``size`` times ``update_freq`` tokens per update; ``wanted`` were requested."""

    unit: str  # max-tokens (on the longer side), or batch-size where a data set sets only that
    wanted: int
    ranks: int
    size: int
    update_freq: int
    name: str = ""  # what BATCH is, if the batch is chosen by it
    sentences: int | None = None  # at most, of a forward pass on a rank, beside its tokens

    @property
    def total(self) -> int:
        """Per update, over all ranks."""
        return self.ranks * self.size * self.update_freq

    @property
    def kept(self) -> bool:
        """Whether ``total`` is about as large as wanted."""
        return abs(self.total - self.wanted) <= TOLERANCE * self.wanted

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
        return text + (f"; requested (BATCH={self.name}): {self.wanted:,}" if self.name else "")


def batch_choices(dataset: Dataset) -> str:
    """The values of ``BATCH``, in words."""
    names = [f"{name} ({size:,})" for name, size in _named(dataset).items()]
    return ", ".join(names) + (" or a number" if names else "a number")


def plan_batch(
    dataset: Dataset,
    flags: Flags,
    ranks: int,
    extra: Sequence[str] = (),
    least: int = 1,
    earlier: int | None = None,
) -> Batch | None:
    """The batch on so many ranks.

    It is ``BATCH``, a name of the data set or a number of tokens; else the data set's ``batch: paper``;
    else that of ``flags`` and ``extra`` on one rank. Ranks share it, in the same forward passes if their
    number allows it. ``--max-tokens`` beside a ``BATCH``, and ``--update-freq``, stay as they are.

    Args:
        flags: those of the recipe; ``extra`` are the user's.
        least: tokens that a forward pass has room for.
        earlier: the batch of a run that an earlier version started, where each rank had the whole batch.

    Returns:
        None if neither sets a batch, or ``--update-freq`` is a list, with a number for each epoch.

    Raises:
        UsageError: ``BATCH`` is neither name nor number, a flag has no number, or so many ranks cannot
            share the batch.
    """
    by_epoch = flag_values(extra).get("--update-freq", str(flags.get("update-freq", 1)))
    name = os.environ.get("BATCH") or ("paper" if _named(dataset) else "")
    if not name and {",", "["} & set(by_epoch):
        return None
    given = {name: _number(extra, f"--{name}") for name in (*SIZES, "update-freq")}
    if name:
        wanted = _named(dataset).get(name)
        if wanted is None and not (name.isdecimal() and int(name)):
            raise UsageError(f"BATCH={name}: expected {batch_choices(dataset)} of tokens from 1")
        wanted = wanted or int(name)
        most = dataset.batch.get("max-tokens") or flags.get("max-tokens") or wanted
        return _named_batch(name, wanted, most, ranks, given, least)
    sizes = {unit: given[unit] or flags.get(unit) for unit in SIZES}
    unit = next((unit for unit, size in sizes.items() if size), None)
    if unit is None:
        return None
    size, frequency = int(sizes[unit]), given["update-freq"] or int(flags.get("update-freq", 1))
    if given["update-freq"] or ranks == 1 and not earlier:
        return Batch(unit, ranks * size * frequency, ranks, size, frequency)
    wanted = size * frequency
    if earlier and earlier % wanted == 0:
        wanted = earlier
    batch = _divided(unit, wanted, size, ranks, least if unit == "max-tokens" else 1)
    if unit == "max-tokens" and (sentences := sizes["batch-size"]):
        return replace(batch, sentences=max(1, round(int(sentences) * batch.size / size)))
    return batch


def _named(dataset: Dataset) -> dict[str, int]:
    return {name: size for name, size in dataset.batch.items() if name != "max-tokens"}


def _named_batch(name: str, wanted: int, most: int, ranks: int, given: dict, least: int) -> Batch:
    frequency, size = given["update-freq"], given["max-tokens"]
    if size:
        frequency = frequency or max(1, round(wanted / ranks / size))
    elif frequency:
        size = min(max(least, most), max(least, int(wanted / ranks / frequency)))
    else:
        return _divided("max-tokens", wanted, most, ranks, least, name)
    return Batch("max-tokens", wanted, ranks, size, frequency, name)


def _divided(unit: str, wanted: int, most: int, ranks: int, least: int, name: str = "") -> Batch:
    """The batch in as few and large forward passes as ``most`` and ``least`` allow."""

    def on(ranks: int) -> Batch:
        frequency = -int(-wanted / ranks // max(least, most))
        size = min(max(least, most), max(least, int(wanted / ranks / frequency)))
        return Batch(unit, wanted, ranks, size, frequency, name)

    batch = on(ranks)
    if not batch.kept:
        below = next((n for n in range(ranks - 1, 0, -1) if on(n).kept), None)
        above = next((n for n in range(ranks + 1, 2 * ranks + 1) if on(n).kept), None)
        near = " or ".join(str(n) for n in (below, above) if n) or "none"
        room = f"; a rank needs room for a sentence of {least}" if least > 1 else ""
        shared = f"a batch of {wanted:,} {'tokens' if unit == 'max-tokens' else 'sentences'}{room}"
        advice = f"the nearest number that can is {near}; or set BATCH"
        raise UsageError(f"{ranks} ranks (GPUS x NODES) cannot share {shared}: {advice}")
    return batch


def _number(words: Sequence[str], flag: str) -> int | None:
    value = flag_values(words).get(flag)
    if value is None:
        return None
    if not value.isdecimal() or not int(value):
        raise UsageError(f"{flag} {value}: expected a whole number of at least 1")
    return int(value)


def without_sizes(words: Sequence[str], flags: Flags) -> list[str]:
    """The user's words without the flags that ``flags`` sets anew, with their values."""
    kept, dropping = [], False
    for word in words:
        if word.startswith("-") and not is_number(word):
            (name,) = flag_values([word])  # `--batch-size` for --max-sentences
            dropping = name.removeprefix("--") in flags
        if not dropping:
            kept.append(word)
    return kept


def most_positions(flags: Flags, extra: Sequence[str]) -> int:
    """Tokens of a sentence at most: fairseq does not train on longer ones."""
    names = (f"max-{side}-positions" for side in ("source", "target"))
    given = (_number(extra, f"--{name}") or flags.get(name) for name in names)
    return max(int(number or FAIRSEQ_POSITIONS) for number in given)


def longest_sentence(folder: Path) -> int | None:
    """Tokens of the longest sentence for training or validation, with its language token.

    On either side, of the first shard; None without a readable index.
    """
    from smoe_fairseq.recipes.data.binarise import read_index  # imports numpy and sentencepiece

    longest = 0
    first = shard_folders(folder)[0]
    for file in [*first.glob("train.*.idx"), *first.glob("valid.*.idx")]:
        try:
            longest = max(longest, int(read_index(file).max(initial=0)))
        except (OSError, UsageError):
            return None  # of another format, or cut off: training says so
    return longest + 1 if longest else None
