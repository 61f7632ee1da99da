"""Faults of a pair of sentences, judged by the text alone."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from smoe_fairseq.languages import words_in
from smoe_fairseq.recipes.data.readers import Pair

MAX_RATIO, MAX_WORDS = 9, 250
FAULTS = ("empty", "repeated", "equal", "overlap", "max-ratio", "max-words")
SIDES = ("source", "target", "both")


class Faults:
    """Finds the faults of pairs of sentences, one pair at a time.

    A pair is "repeated" from its second occurrence on, "equal" if both sides are the same, and has
    "overlap" if a side is held out. With ``clean`` of a data set, only empty sides and the faults that it
    drops are found. ``leaked`` has the held-out sentences that have occurred, on each side and on both.
    """

    def __init__(self, held_out: Iterable[Pair] = (), clean: Mapping[str, Any] | None = None):
        drops = dict.fromkeys(FAULTS, "drop") if clean is None else clean
        dropped = {name for name in FAULTS if drops.get(name) not in (None, "keep")}
        self.checked = dropped | {"empty"}
        self.max_ratio = (clean or {}).get("max-ratio") or MAX_RATIO
        self.max_words = (clean or {}).get("max-words") or MAX_WORDS
        self.seen: set[int] = set()  # hashes, which take less memory
        both = set(held_out)
        sides = ({a for a, _ in both}, {b for _, b in both}, both)
        self.held_out = dict(zip(SIDES, sides, strict=True))
        self.leaked: dict[str, set] = {side: set() for side in SIDES}

    def of(self, source: str, target: str) -> tuple[str, ...]:
        """The faults of this pair, of those to check for."""
        return tuple(name for name in self._all(source, target) if name in self.checked)

    def _all(self, source: str, target: str) -> Iterator[str]:
        if not source or not target:
            yield "empty"
            return
        if "repeated" in self.checked:
            pair = hash((source, target))
            if pair in self.seen:
                yield "repeated"
            self.seen.add(pair)
        if source == target:
            yield "equal"
        if self._leaks(source, target):
            yield "overlap"
        one, other = words_in(source), words_in(target)
        if max(one, other) > self.max_ratio * min(one, other):
            yield "max-ratio"
        if max(one, other) > self.max_words:
            yield "max-words"

    def _leaks(self, source: str, target: str) -> bool:
        leaks = False
        for side, text in zip(SIDES, (source, target, (source, target)), strict=True):
            if text in self.held_out[side]:
                self.leaked[side].add(text)
                leaks = True
        return leaks
