"""How many tokens an update sees: the same for any number of GPUs, through ``--update-freq``."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from smoe_fairseq.settings.dataset import Dataset
from smoe_fairseq.system.errors import UsageError

TOLERANCE = 0.02  # of what was asked for


@dataclass(frozen=True)
class Batch:
    """``processes`` times ``max_tokens`` times ``update_freq`` tokens per update, for ``wanted``.

    ``max_tokens`` is fairseq's: of one forward pass on one GPU, counted on the longer side.
    """

    name: str
    wanted: int
    processes: int
    max_tokens: int
    update_freq: int

    @property
    def tokens(self) -> int:
        """Per update over all processes."""
        return self.processes * self.max_tokens * self.update_freq

    @property
    def kept(self) -> bool:
        """Whether ``tokens`` are as many as wanted."""
        return abs(self.tokens - self.wanted) <= TOLERANCE * self.wanted

    def __str__(self) -> str:
        plural = "es" if self.processes > 1 else ""
        return (
            f"{self.tokens:,} tokens per update = {self.processes} process{plural} x "
            f"{self.max_tokens:,} (--max-tokens) x {self.update_freq} (--update-freq); asked for "
            f"(BATCH={self.name}): {self.wanted:,}"
        )


def choices(dataset: Dataset) -> str:
    """What ``BATCH`` may be, for people."""
    return (
        ", ".join(f"{name} ({size:,})" for name, size in _sizes(dataset).items()) + " or a number"
    )


def plan(dataset: Dataset, processes: int, extra: Sequence[str]) -> Batch:
    """The batch that ``BATCH`` asks for: one of the data set's by name (paper), or a number of tokens.

    ``--max-tokens`` and ``--update-freq`` among the ``extra`` flags are kept. A single forward pass is
    never made so small that the longest sentence does not fit in.
    """
    sizes = _sizes(dataset)
    name = os.environ.get("BATCH") or "paper"
    if name not in sizes and not (name.isdecimal() and int(name)):
        raise UsageError(f"BATCH={name}: {dataset.name} has {choices(dataset)} of tokens")
    wanted = sizes.get(name) or int(name)
    per_update = wanted / processes
    frequency = _given(extra, "--update-freq")
    if tokens := _given(extra, "--max-tokens"):
        frequency = frequency or max(1, round(per_update / tokens))
    else:
        longest = dataset.train.get("max-source-positions", 1)
        most = max(longest, dataset.batch["max-tokens"])
        frequency = frequency or -int(-per_update // most)
        tokens = min(most, max(longest, int(per_update / frequency)))
    return Batch(name, wanted, processes, tokens, frequency)


def _sizes(dataset: Dataset) -> dict[str, int]:
    return {name: size for name, size in dataset.batch.items() if name != "max-tokens"}


def _given(words: Sequence[str], flag: str) -> int | None:
    """The number after a flag's last occurrence, ``--flag 8`` or ``--flag=8``."""
    value = None
    for i, word in enumerate(words):
        name, equals, rest = word.partition("=")
        if name == flag:
            value = rest if equals else (words[i + 1] if i + 1 < len(words) else "")
    if value is None:
        return None
    if not value.isdecimal() or not int(value):
        raise UsageError(f"{flag} {value}: expected a whole number of at least 1")
    return int(value)
