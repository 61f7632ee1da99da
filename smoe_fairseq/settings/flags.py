"""Flags of a program, as YAML has them and as its command line does."""

from typing import Any

Flags = dict[str, Any]


def arguments(flags: Flags) -> list[str]:
    """Command-line words for flags: ``true`` is the bare flag, ``false`` and null leave it out.

    A list is a flag with several words behind it.
    """
    words: list[str] = []
    for key, value in flags.items():
        if value is None or value is False:
            continue
        words.append(f"--{key}")
        if value is not True:
            words += map(str, value if isinstance(value, list) else [value])
    return words
