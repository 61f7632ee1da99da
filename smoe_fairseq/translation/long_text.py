"""A text that is too long for a model, divided where it hurts least."""

import re
from collections.abc import Callable

# Ends of sentences, then of clauses, then of words.
_MARKS = (
    r"(?<=[.!?…])\s+|(?<=[。！？])",
    r"(?<=[,;:–—])\s+|(?<=[，；：、])",
    r"\s+",
)


def divide(text: str, fits: Callable[[str], bool], marks: tuple[str, ...] = _MARKS) -> list[str]:
    """The text in parts that fit, each as long as it may be; they end with sentences as long as these fit.

    A sentence that does not fit is divided at its commas, and then between words; a word between letters.
    """
    if fits(text):
        return [text]
    if not marks:
        half = len(text) // 2
        if not half:
            return [text]
        return [part for side in (text[:half], text[half:]) for part in divide(side, fits, ())]
    parts: list[str] = []
    for piece in filter(None, re.split(marks[0], text)):
        if parts and fits(joined := f"{parts[-1]} {piece}"):
            parts[-1] = joined
        else:
            parts += divide(piece, fits, marks[1:])
    return parts
