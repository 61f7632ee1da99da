"""Bad input: an exception for Python programs, one sentence and exit status 1 for people at a command."""

import functools
import sys
from collections.abc import Callable


class UsageError(Exception):
    """What was given cannot be used: one sentence that names it, and what would be accepted.

    The building blocks in ``modules`` raise ``ValueError`` instead.
    """


class UsageErrorOfAll(UsageError):
    """One that every process of a run comes to by itself, so that none has to tell the others."""


def ends_with_sentence(command: Callable) -> Callable:
    """The command, whose UsageError becomes its last words and its exit status."""

    @functools.wraps(command)
    def run(*arguments, **options):
        try:
            return command(*arguments, **options)
        except UsageError as error:
            raise SystemExit(f"error: {error}") from None

    return run


def print_sentences_of_commands(is_command: Callable[[], bool]) -> None:
    """The same for errors that nobody catches, while ``is_command``; others keep their stack traces."""
    previous = sys.excepthook

    def print_sentence(kind, error, trace):
        if isinstance(error, UsageError) and is_command():
            print(f"error: {error}", file=sys.stderr)
        else:
            previous(kind, error, trace)

    sys.excepthook = print_sentence
