"""The language in the middle: the paper's English."""

from collections.abc import Iterable


def pivot(directions: Iterable[str]) -> str | None:
    """The language that all directions ("de-en") have in common, when just one does."""
    languages = [set(direction.split("-")) for direction in directions]
    common = set.intersection(*languages) if len(languages) > 1 else set()
    return common.pop() if len(common) == 1 else None
