"""Flags of our commands: their declarations, the types of their values, and argparse's errors."""

import io
import math
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr

from smoe_fairseq.errors import UsageError


def flag_of(name: str) -> str:
    """The flag of an option or a parameter."""
    return f"--{name.replace('_', '-')}"


def with_value(name: str, value) -> str:
    """The flag that sets an option to a value; True: a flag without a value."""
    return flag_of(name) if value is True else f"{flag_of(name)} {value}"


def values_of(part) -> Mapping:
    """The settings in a part of a checkpoint's config, a mapping or a namespace; else empty."""
    return part if isinstance(part, Mapping) else getattr(part, "__dict__", {})


def differing_flags(before: Mapping, now: Mapping) -> dict[str, str]:
    """The flags that set the options of ``before``, where ``now`` has other values."""
    differing = [name for name in before if (before[name] or None) != (now[name] or None)]
    return {name: as_flag(name, before[name]) for name in differing}


def as_flag(name: str, value) -> str:
    """The flag that sets an option to a value, which may be a list, or nothing: "no --flag"."""
    shown = ",".join(value) if isinstance(value, list) else value
    return with_value(name, shown) if value else f"no {flag_of(name)}"


def add_flag(parser, name: str, metavar: str | None, text: str, kind=None, default=None) -> None:
    """Add a flag with a value to a parser or a group; its help ends with the default, if there is one."""
    text += f"; default: {default}" if default is not None else ""
    parser.add_argument(name, metavar=metavar, help=text, type=kind, default=default)


def number_fault(value: float, kind: type, least: float, most: float = math.inf) -> str | None:
    """What is expected, unless ``value`` is a finite number from ``least`` to ``most``; else None."""
    if math.isfinite(value) and least <= value <= most:
        return None
    bound = f" of at least {least}" if math.isfinite(least) else ""
    bound = f" from {least} to {most}" if math.isfinite(most) else bound
    return f"expected {'a whole number' if kind is int else 'a number'}{bound}"


def at_least(kind: type, least: float, most: float = math.inf) -> Callable[[str], float]:
    """The type of a flag for finite numbers from ``least`` to ``most``; ``kind`` is int or float."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
            float(value)
        except (ValueError, OverflowError):
            value = math.nan
        if fault := number_fault(value, kind, least, most):
            raise ArgumentTypeError(f"{text}: {fault}")
        return value

    return parse


positive = at_least(int, 1)
port = at_least(int, 0, 65535)
seconds = at_least(float, 0.001)


@contextmanager
def refusing_flags(start: str = "") -> Iterator[None]:
    """Raise UsageError where argparse would print a message and exit; ``start`` precedes the message."""
    output = io.StringIO()
    try:
        with redirect_stderr(output):
            yield
    except SystemExit as error:
        if isinstance(error.code, int) and error.code > 128:  # a signal, see `exit_on_signals`
            raise
        line = (output.getvalue().splitlines() or [str(error)])[-1]
        raise UsageError(start + (line.partition("error: ")[2] or line)) from None


def filled(text: str) -> str:
    """The type of a flag for text that is not empty, as the value of an unset shell variable would be."""
    if not text:
        raise ArgumentTypeError("it is empty")
    return text


SURROGATE = re.compile("[\ud800-\udfff]")  # half of a pair, or a byte that could not be decoded


def decoded(text: str) -> str:
    """The type of a flag for text that was decoded whole, as Latin-1 is not where UTF-8 is expected."""
    if SURROGATE.search(text):
        raise ArgumentTypeError(f"{text!r} is not text in {sys.getfilesystemencoding()}")
    return text
