"""The batch of a run: ``BATCH`` tokens per update, divided over processes and forward passes."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes.config import Dataset, given_flags

TOLERANCE = 0.02  # of the tokens asked for


@dataclass(frozen=True)
class Batch:
    """``processes`` times ``max_tokens`` times ``update_freq`` tokens per update; ``wanted`` were asked for.

    ``max_tokens`` is fairseq's: tokens of one forward pass on one GPU, on the longer side.
    """

    name: str
    wanted: int
    processes: int
    max_tokens: int
    update_freq: int

    @property
    def tokens(self) -> int:
        """Per update, over all processes."""
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


def batch_sizes(dataset: Dataset) -> dict[str, int]:
    """Tokens per update by the data set's name for them."""
    return {name: size for name, size in dataset.batch.items() if name != "max-tokens"}


def batch_choices(dataset: Dataset) -> str:
    """The values of ``BATCH``, in words."""
    sizes = batch_sizes(dataset).items()
    return ", ".join(f"{name} ({size:,})" for name, size in sizes) + " or a number"


def plan_batch(dataset: Dataset, processes: int, extra: Sequence[str]) -> Batch:
    """The batch that ``BATCH`` asks for, by name (paper) or as a number of tokens.

    ``--max-tokens`` and ``--update-freq`` among the flags ``extra`` are kept. A forward pass always has
    room for the longest sentence.

    Raises:
        UsageError: ``BATCH`` is neither, or a flag has no number.
    """
    sizes = batch_sizes(dataset)
    name = os.environ.get("BATCH") or "paper"
    if name not in sizes and not (name.isdecimal() and int(name)):
        raise UsageError(f"BATCH={name}: {dataset.name} has {batch_choices(dataset)} of tokens")
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


def _given(words: Sequence[str], flag: str) -> int | None:
    value = given_flags(words).get(flag)
    if value is None:
        return None
    if not value.isdecimal() or not int(value):
        raise UsageError(f"{flag} {value}: expected a whole number of at least 1")
    return int(value)
