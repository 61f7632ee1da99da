"""Bad input: an exception for Python programs, one sentence and exit status 1 for people at a command."""

import errno
import functools
import logging
import sys
from collections.abc import Callable

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # these have sentences of their own
logger = logging.getLogger(__name__)


class UsageError(Exception):
    """What was given cannot be used: one sentence that names it, and what would be accepted.

    The building blocks in ``modules`` raise ``ValueError`` instead.
    """


class UsageErrorOfAll(UsageError):
    """One that every process of a run comes to by itself, so that none has to tell the others."""


Sentence = Callable[
    [BaseException], str | None
]  # for an error; None where it is to show its stack trace


def of_usage(error: BaseException) -> str | None:
    """The sentence of a UsageError."""
    return str(error) if isinstance(error, UsageError) else None


def of_command(error: BaseException) -> str | None:
    """The sentence of whatever ends a command of ours or of fairseq's on purpose.

    Beside a UsageError: files that the system does not hand out, the plain exceptions that fairseq raises
    with a sentence ("The dataset is empty ..."), and its sentences about a flag. With ``LOGLEVEL=DEBUG``
    their stack traces are shown all the same.
    """
    if words := of_usage(error):
        return words
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return None
    said = " ".join(str(error).split())
    if isinstance(error, OSError) and error.filename and error.strerror:
        words = f"{error.filename}: {error.strerror}"
    elif isinstance(
        error, FileExistsError
    ):  # of fairseq-preprocess, whose words are the path alone
        words = f"{said} is there already; remove it, or name another folder"
    elif isinstance(error, FileNotFoundError) or type(error) in (Exception, OSError):
        words = said
    elif isinstance(error, ValueError) and said.startswith("--"):
        words = said
    if words:
        logger.debug("where it comes from:", exc_info=error)
    return words


def ends_with_sentence(command: Callable, sentence: Sentence = of_usage) -> Callable:
    """The command; an error that has a sentence ends it with that and exit status 1."""

    @functools.wraps(command)
    def run(*arguments, **options):
        try:
            return command(*arguments, **options)
        except Exception as error:
            if (words := sentence(error)) is None:
                raise
            raise SystemExit(f"error: {words}") from None

    return run


def checks_first(command: Callable, check: Callable) -> Callable:
    """The command; ``check`` is called before it with its first argument, and may raise."""

    @functools.wraps(command)
    def run(first, *arguments, **options):
        check(first)
        return command(first, *arguments, **options)

    return run


def print_sentences(sentence: Sentence) -> None:
    """The same for errors that nobody catches; those without a sentence keep their stack traces."""
    previous = sys.excepthook

    def print_sentence(kind, error, trace):
        if (words := sentence(error)) is None:
            previous(kind, error, trace)
        else:
            print(f"error: {words}", file=sys.stderr)

    sys.excepthook = print_sentence
