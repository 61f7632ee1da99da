"""Flags of a program, as YAML has them and as its command line does."""

from typing import Any

Flags = dict[str, Any]


def arguments(flags: Flags) -> list[str]:
    """Command-line words for flags: ``true`` is the bare flag, ``false`` and null leave it out."""
    words: list[str] = []
    for key, value in flags.items():
        if value is None or value is False:
            continue
        words.append(f"--{key}")
        if value is not True:
            words.append(str(value))
    return words
