"""Faults of a pair of sentences, judged by the text alone."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from smoe_fairseq.recipes.data.readers import Pair

MAX_RATIO, MAX_WORDS = 9, 250
FAULTS = ("empty", "repeated", "equal", "overlap", "max-ratio", "max-words")
SIDES = ("source", "target", "both")
# Scripts without blanks between words, of which each letter counts as a word; and words of others.
_WORDS = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
    r"|[^\s\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]+"
)


def words_in(text: str) -> int:
    """The number of words; in Chinese, Japanese, Thai, Lao, Khmer and Burmese of letters."""
    return text.count(" ") + 1 if text.isascii() else len(_WORDS.findall(text))


class Faults:
    """The faults of pairs that are given one after the other.

    A pair is "repeated" from its second time on, "equal" if both sides are the same, and has "overlap" if a
    side is held out.

    Args:
        held_out: pairs to validate and test.
        clean: of a data set, to look only for the faults that it has dropped, and for empty sides.

    Attributes:
        leaked: of each side, and of both together, what is held out and was seen.
    """

    def __init__(self, held_out: Iterable[Pair] = (), clean: Mapping[str, Any] | None = None):
        dropped = clean if clean is not None else dict.fromkeys(FAULTS, "drop")
        wanted = {name for name in FAULTS if dropped.get(name) not in (None, "keep")}
        self.looked_for = wanted | {"empty"}
        self.max_ratio = (clean or {}).get("max-ratio") or MAX_RATIO
        self.max_words = (clean or {}).get("max-words") or MAX_WORDS
        self.seen: set[int] = set()  # hashes, which take less memory
        both = set(held_out)
        sides = ({a for a, _ in both}, {b for _, b in both}, both)
        self.held_out = dict(zip(SIDES, sides, strict=True))
        self.leaked: dict[str, set] = {side: set() for side in SIDES}

    def of(self, source: str, target: str) -> tuple[str, ...]:
        """Those of `FAULTS` that this pair has."""
        return tuple(name for name in self._of(source, target) if name in self.looked_for)

    def _of(self, source: str, target: str) -> Iterator[str]:
        if not source or not target:
            yield "empty"
            return
        if "repeated" in self.looked_for:
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
        found = False
        for side, text in zip(SIDES, (source, target, (source, target)), strict=True):
            if text in self.held_out[side]:
                self.leaked[side].add(text)
                found = True
        return found
