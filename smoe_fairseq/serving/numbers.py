"""Numbers that flags take."""

import math
from argparse import ArgumentTypeError


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ArgumentTypeError(f"{text}: expected a whole number of at least 1")
    return int(text)


def port(text: str) -> int:
    """0 to 65535."""
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise ArgumentTypeError(f"{text}: expected a number from 0 to 65535")
    return int(text)


def seconds(text: str) -> float:
    """More than 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ArgumentTypeError(f"{text}: expected seconds, more than 0")
    return value
