"""Errors of bad input, and how commands print them."""

import difflib
import errno
import logging
import os
import re
import struct
import sys
import traceback
import warnings
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NoReturn

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UsageError(Exception):
    """Bad input: the message is one sentence that names it and says what is expected.

    The building blocks in ``modules`` raise ``ValueError`` instead.
    """


# One handler for the errors of fairseq's commands and ours.

# Raised for bad input by fairseq and its libraries. Other errors, such as most RuntimeErrors of torch, keep
# their stack traces.
_INPUT_ERRORS = (OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
_INPUT_ERRORS += (ArithmeticError, ImportError, EOFError, NotImplementedError, struct.error)
_LIBRARIES = ("omegaconf", "hydra", "sentencepiece", "yaml")  # all about settings or files
# RuntimeErrors for bad input begin like this: torch's for other shapes, and fairseq's about its flags.
_INPUT_MESSAGES = ("Error(s) in loading state_dict", "--")
_PROCESS_MESSAGES = {  # pattern of torch's message in a RuntimeError: our message
    "^DataLoader worker": "a process that loads data was killed, as for lack of memory; --num-workers 0 "
    "needs none",
    "(closed|reset) by peer|remote process exited": "another rank has ended: see its messages",
    r"Unable to find address for: (\S+)": "GLOO_SOCKET_IFNAME {}: no interface of this machine",
    r"port: (\d+).*EADDRINUSE": "MASTER_PORT {} is in use by another program on this machine: choose another "
    "one (MASTER_PORT, or torchrun --master-port), the same for all processes",
}
# hydra's and omegaconf's messages for an option without a value
_MISSING = re.compile(r"(?:override \w+\.(?=\w+=null)|Missing mandatory value: )(\w+)")
_REASONS = {FileNotFoundError: "No such file or directory", FileExistsError: "exists already"}
_FLAG_VALUE = re.compile(r"--([\w-]+) (?:\S+|'[^']*'): ")  # begins a sentence about a flag's value
_MAX_LENGTH, _HALF = 300, 150  # characters of a word, and of another program's message


def one_line(error: BaseException) -> str | None:
    """The message with which a command ends if bad input can cause this error; else None.

    The message of a UsageError is shown as it is, as is that of a plain Exception, which fairseq raises for
    its own checks; an OSError names its file. All other messages include the exception's type and source
    line, since the cause may be a bug.
    """
    message = " ".join(str(error).split())
    if isinstance(error, UsageError):
        return printable(str(error))
    if isinstance(error, OSError) and error.strerror and (error.errno in NO_ROOM or error.filename):
        if error.errno in NO_ROOM:
            return f"{error.filename or _output()} cannot be written: {error.strerror}"
        reason, file = error.strerror, error.filename
        missing = isinstance(error, FileNotFoundError | FileExistsError) and not os.path.exists(
            file
        )
        if missing and os.path.islink(file):
            reason = f"it is a link to {os.readlink(file)}, which is missing"
        return printable(f"{file}: {reason}")
    if (reason := _REASONS.get(type(error))) and not error.errno:  # fairseq's, with a path alone
        return printable(f"{message}: {reason}")
    if message and type(error).__name__ in ("Exception", "ProcessExitedException"):
        return printable(message)
    for pattern, sentence in _PROCESS_MESSAGES.items() if isinstance(error, RuntimeError) else ():
        if match := re.search(pattern, message):
            return sentence.format(*match.groups())
    if not _is_input_error(error):
        return None
    if missing := _MISSING.search(message):
        return f"--{missing[1].replace('_', '-')} is missing"
    if limit := re.search(r"should not exceed max_tokens=(\d+)", message):
        valid = "-valid" * (("--max-tokens-valid", limit[1]) in zip(sys.argv, sys.argv[1:]))
        return f"--max-tokens{valid} {limit[1]}: expected at least the longest sentence's length"
    if "Original Traceback" in message:  # forwarded by torch from a process that loads data
        message = str(error).strip().splitlines()[-1]
    message = message.removeprefix(f"{type(error).__name__}: ")[:_MAX_LENGTH]
    if re.search(r"(^|\s)--\w", message):  # fairseq's message names its flag
        return printable(message)
    message = f"{type(error).__name__}: {message}" if message else type(error).__name__
    trace = traceback.extract_tb(error.__traceback__)
    if trace := [frame for frame in trace if not frame.filename.startswith("<")]:
        folder, name = os.path.split(trace[-1].filename)
        log = next(iter(_log_files()), None)
        where = f"{log} has the stack trace" if log else "SMOE_DEBUG=1 shows the stack trace"
        message += f" ({os.path.basename(folder)}/{name}, line {trace[-1].lineno}; {where})"
    return printable(message)


def _output() -> str:
    """The command's output folder, for a failed write that names no file."""
    flags = dict(zip(sys.argv, sys.argv[1:]))
    outputs = {"--destdir", "--results-path", "--save-dir"} & flags.keys()
    return next((f"{flag} {flags[flag]}" for flag in outputs), "a file")


def _is_input_error(error: BaseException) -> bool:
    """Whether bad input causes errors of this type, or from this module."""
    *_, (frame, _) = [(None, 0), *traceback.walk_tb(error.__traceback__)]
    raised_in = frame.f_globals.get("__name__", "") if frame else ""
    packages = {name.partition(".")[0] for name in (type(error).__module__, raised_in)}
    known = isinstance(error, RuntimeError) and str(error).startswith(_INPUT_MESSAGES)
    return isinstance(error, _INPUT_ERRORS) or not packages.isdisjoint(_LIBRARIES) or known


@contextmanager
def naming_file(path: os.PathLike | str, what: str = "its content") -> Iterator[None]:
    """Errors that a file's content causes name the file.

    Raises:
        UsageError: ``PATH: its content cannot be used (KeyError 'nope')``, also for a UsageError about
            the value of a flag, since the value is the file's. An OSError or EOFError, a plain Exception
            of fairseq, and any other UsageError are raised unchanged.
    """
    try:
        yield
    except Exception as error:
        message = " ".join(str(error).split())[:_MAX_LENGTH]
        if isinstance(error, UsageError):
            unchanged = not _FLAG_VALUE.match(message)
        else:
            names_file = isinstance(error, OSError | EOFError) or not _is_input_error(error)
            unchanged = names_file or type(error) is Exception
            message = f"{type(error).__name__} {message}".strip()
        if unchanged:
            raise
        raise UsageError(f"{path}: {what} cannot be used ({message})") from error


def printable(message: str) -> str:
    """The message with control characters escaped and long words shortened."""
    message = "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)
    return re.sub(rf"\S{{{_MAX_LENGTH},}}", lambda m: f"{m[0][:_HALF]}...{m[0][-_HALF:]}", message)


@contextmanager
def ends_with_sentence() -> Iterator[None]:
    """End a command with one line and exit status 1 if bad input can cause the error.

    The stack trace of any error is written to the open log files.
    """
    try:
        try:
            os.getcwd()
        except FileNotFoundError:  # torch's libraries would end the process
            raise UsageError("the current folder was deleted: change to another one") from None
        yield
    except Exception as error:
        trace = (type(error), error, error.__traceback__)
        record = logging.LogRecord(__name__, logging.ERROR, "", 0, "ended by", None, trace)
        for handler in _log_files().values():
            handler.handle(record)
        if (words := one_line(error)) is None:
            raise
        show_trace(error)
        raise SystemExit(f"error: {words}") from None


def _log_files() -> dict[str, logging.FileHandler]:
    """The handlers of all loggers that write to a file, such as fairseq's ``--log-file``, by path."""
    loggers = (logging.root, *logging.root.manager.loggerDict.values())
    handlers = (h for logger in loggers for h in getattr(logger, "handlers", ()))
    return {h.baseFilename: h for h in handlers if isinstance(h, logging.FileHandler)}


def show_trace(error: BaseException) -> None:
    """Print the stack trace if ``SMOE_DEBUG=1`` is set."""
    if os.environ.get("SMOE_DEBUG", "0") not in ("", "0"):
        traceback.print_exception(error)


# Mistyped names.


def nearest(word: str, names: Iterable[str], cutoff: float = 0.8) -> str | None:
    """The name most similar to ``word``, with a similarity from ``cutoff`` to 1; None if there is none."""
    return next(iter(difflib.get_close_matches(word, names, 1, cutoff)), None)


def end_parsing(parser: ArgumentParser, message: str) -> NoReturn:
    """Replaces argparse's ``error``: one line, which suggests a flag in place of an unknown one."""
    flags = [flag for action in parser._actions for flag in action.option_strings]
    unknown = message.startswith("unrecognized")
    for word in message.split() if unknown else ():
        near = nearest(word.partition("=")[0], flags) if word.startswith("--") else None
        message += f"; did you mean {near}?" if near else ""
    for flag, word in pairwise(getattr(parser, "words", sys.argv[1:]) if unknown else ()):
        action = parser._option_string_actions.get(flag)
        if action and action.nargs == 0 and word in message and not re.match(r"-\D", word):
            message = f"{flag} {word}: the flag takes no value"
    message = re.sub(r"^argument \S+: (?=--)", "", message)  # that names its flag itself
    help_ = f"{parser.prog} --help lists all flags"
    parser.exit(2, f"{parser.prog}: error: {printable(message)}; {help_}\n")


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress INFO messages, which fairseq writes to standard output, and warnings of its libraries."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
