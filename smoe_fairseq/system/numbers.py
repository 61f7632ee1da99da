"""Numbers that the flags of our own commands take, as types of argparse."""

import math
from argparse import ArgumentTypeError
from collections.abc import Callable


def positive(text: str) -> int:
    """A whole number of at least 1, in digits alone."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ArgumentTypeError(f"{text}: expected a whole number of at least 1")
    return int(text)


def at_least(kind: type, least: float, most: float = math.inf) -> Callable[[str], float]:
    """The type of finite numbers from ``least`` on, to ``most``; ``kind`` is int or float."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
            float(value)
        except (ValueError, OverflowError):
            value = math.nan
        if not (math.isfinite(value) and least <= value <= most):
            what = "a whole number" if kind is int else "a number"
            bound = f" of at least {least}" if math.isfinite(least) else ""
            bound = f" from {least} to {most}" if math.isfinite(most) else bound
            raise ArgumentTypeError(f"{text!r}: expected {what}{bound}")
        return value

    return parse


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
