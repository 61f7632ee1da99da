"""Errors of bad input, and how commands print them."""

import codecs
import ctypes
import difflib
import errno
import logging
import os
import re
import signal
import struct
import sys
import threading
import traceback
import warnings
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn, TextIO

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # these have sentences of their own


class UsageError(Exception):
    """What was given cannot be used: one sentence that names it, and what would be accepted.

    The building blocks in ``modules`` raise ``ValueError`` instead.
    """


# The one handler around fairseq's commands and ours.

# What bad input raises in fairseq and the libraries below it. Others, such as a RuntimeError of torch, keep
# their stack traces.
_OF_INPUT = (OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
_OF_INPUT += (ArithmeticError, ImportError, EOFError, struct.error)
_LIBRARIES = ("omegaconf", "hydra", "sentencepiece")  # whose errors are about settings or files
# How RuntimeErrors of bad input begin: torch's for other shapes, and fairseq's about its flags.
_MISFITS = ("Error(s) in loading state_dict", "--")
_OF_PROCESSES = {  # torch's words in a RuntimeError, and what is said in their place
    "^DataLoader worker": "a process that loads data was killed, as for lack of memory; --num-workers 0 "
    "needs none",
    "(closed|reset) by peer|remote process exited": "another rank has ended: see what is said of it",
    r"port: (\d+).*EADDRINUSE": "MASTER_PORT {} is in use by another program on this machine: choose another "
    "one (MASTER_PORT, or torchrun --master-port), the same for all processes",
}
_NULL = re.compile(r"override \w+\.(\w+)=null")  # hydra's words for an option without a value
_SETTING = re.compile(r"--([\w-]+) (?:\S+|'[^']*'): ")  # how a sentence about a flag's value begins
_LONGEST = 300  # letters of a word, and of another program's message


def one_line(error: BaseException) -> str | None:
    """The line that ends a command for an error of a kind that bad input causes; else None.

    A UsageError is its own sentence, an OSError of a file names that, and what fairseq raises as a plain
    Exception is its own sentence too. Any other line is the exception's own, with its type and the source
    line, since it may be a mistake of the program's.
    """
    said = " ".join(str(error).split())
    if isinstance(error, UsageError):
        return printable(str(error))
    if isinstance(error, OSError) and error.strerror and (error.errno in NO_ROOM or error.filename):
        if error.errno in NO_ROOM:
            return f"{error.filename or _place()} cannot be written: {error.strerror}"
        return printable(f"{error.filename}: {error.strerror}")
    if isinstance(error, FileNotFoundError) and not error.errno:  # fairseq's, such as of --user-dir
        return printable(f"{said}: No such file or directory")
    if said and type(error).__name__ in ("Exception", "ProcessExitedException"):
        return printable(said)
    for words, sentence in _OF_PROCESSES.items() if isinstance(error, RuntimeError) else ():
        if found := re.search(words, said):
            return sentence.format(*found.groups())
    if not _is_of_input(error):
        return None
    if missing := _NULL.search(said):  # what a value that has to be given is, where it is not
        return f"--{missing[1].replace('_', '-')} is missing"
    if long := re.search(r"should not exceed max_tokens=(\d+)", said):
        return f"--max-tokens {long[1]}: expected as many as the longest sentence has"
    if "Original Traceback" in said:  # in a process that loads data, whose words torch hands on
        said = str(error).strip().splitlines()[-1]
    said = said.removeprefix(f"{type(error).__name__}: ")[:_LONGEST]
    if re.search(r"(^|\s)--\w", said):  # a sentence of fairseq's that names its flag
        return printable(said)
    words = f"{type(error).__name__}: {said}" if said else type(error).__name__
    trace = traceback.extract_tb(error.__traceback__)
    if trace := [frame for frame in trace if not frame.filename.startswith("<")]:
        folder, name = os.path.split(trace[-1].filename)
        log = next(iter(_log_files()), None)
        where = f"{log} has the stack trace" if log else "SMOE_DEBUG=1 shows the stack trace"
        words += f" ({os.path.basename(folder)}/{name}, line {trace[-1].lineno}; {where})"
    return printable(words)


def _place() -> str:
    """Where a command is told to write, for a failed write that names no file."""
    flags = dict(zip(sys.argv, sys.argv[1:]))
    places = {"--destdir", "--results-path", "--save-dir"} & flags.keys()
    return next((f"{flag} {flags[flag]}" for flag in places), "a file")


def _is_of_input(error: BaseException) -> bool:
    """Whether bad input causes errors of this kind, in the modules that it was raised in."""
    *_, (frame, _) = [(None, 0), *traceback.walk_tb(error.__traceback__)]
    raised_in = frame.f_globals.get("__name__", "") if frame else ""
    of_library = {n.partition(".")[0] for n in (type(error).__module__, raised_in)} & {*_LIBRARIES}
    misfit = isinstance(error, RuntimeError) and str(error).startswith(_MISFITS)
    return isinstance(error, _OF_INPUT) or bool(of_library) or misfit


@contextmanager
def naming_file(path: os.PathLike | str, what: str = "its settings") -> Iterator[None]:
    """What is made of a file's content: an error of a kind that bad input causes names the file.

    Raises:
        UsageError: ``PATH: its settings cannot be used (KeyError 'nope')``, also for a UsageError about
            the value of a flag, which is the file's. An OSError or EOFError, what fairseq raises as a plain
            Exception, and any other UsageError pass as they are.
    """
    try:
        yield
    except Exception as error:
        said = " ".join(str(error).split())[:_LONGEST]
        if isinstance(error, UsageError):
            passes = not _SETTING.match(said)
        else:
            of_file = isinstance(error, OSError | EOFError) or not _is_of_input(error)
            passes = of_file or type(error) is Exception
            said = f"{type(error).__name__} {said}".strip()
        if passes:
            raise
        raise UsageError(f"{path}: {what} cannot be used ({said})") from error


def printable(words: str) -> str:
    """Without characters that a terminal would act on, and with long words shortened."""
    words = "".join(c if c.isprintable() else repr(c)[1:-1] for c in words)
    half = _LONGEST // 2
    return re.sub(rf"\S{{{_LONGEST},}}", lambda m: f"{m[0][:half]}...{m[0][-half:]}", words)


@contextmanager
def ends_with_sentence() -> Iterator[None]:
    """An error of a kind that bad input causes ends a command with one line and exit status 1.

    The stack trace of any error is written to the log files that are open.
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
    """Those of all loggers, such as fairseq's ``--log-file``, by path."""
    loggers = (logging.root, *logging.root.manager.loggerDict.values())
    handlers = (handler for each in loggers for handler in getattr(each, "handlers", ()))
    return {h.baseFilename: h for h in handlers if isinstance(h, logging.FileHandler)}


def show_trace(error: BaseException) -> None:
    """Prints the stack trace where ``SMOE_DEBUG=1`` asks for it."""
    if os.environ.get("SMOE_DEBUG", "0") not in ("", "0"):
        traceback.print_exception(error)


# Names that are mistyped.


def nearest(word: str, names: Iterable[str], cutoff: float = 0.8) -> str | None:
    """The name that ``word`` seems to be meant for; ``cutoff`` is the least similarity, of 1."""
    return next(iter(difflib.get_close_matches(word, names, 1, cutoff)), None)


def end_parsing(parser: ArgumentParser, message: str) -> NoReturn:
    """In place of argparse's ``error``: one line, with the flag that an unknown one is nearly like."""
    flags = [flag for action in parser._actions for flag in action.option_strings]
    for word in message.split() if message.startswith("unrecognized") else ():
        near = nearest(word.partition("=")[0], flags) if word.startswith("--") else None
        message += f"; did you mean {near}?" if near else ""
    help_ = f"{parser.prog} --help lists all flags"
    parser.exit(2, f"{parser.prog}: error: {printable(message)}; {help_}\n")


# fairseq without its log messages, so that standard output holds only a command's own.


@contextmanager
def quietly() -> Iterator[None]:
    """Leave out INFO messages, which fairseq writes to standard output, and its libraries' warnings."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# Signals that end a command raise an exception, so that temporary files are removed.

# Ctrl-C, what `kill`, batch systems and containers send, and the end of a terminal.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Each of `ENDING` raises SystemExit with a shell's status for it, 128 + n.

    What is ignored (nohup, a shell's background jobs) stays so.
    """
    if threading.current_thread() is not threading.main_thread():  # who alone may say what they do
        yield
        return
    plain = (signal.SIG_DFL, signal.default_int_handler)
    before = {n: action for n in ENDING if (action := signal.getsignal(n)) in plain}
    try:
        for number in before:
            signal.signal(number, _end)
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, action)


def _end(number: int, _frame) -> None:
    raise SystemExit(128 + number)


_prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux only


def end_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent ends in any way (Linux)."""
    if _prctl is not None:
        _prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


# Standard output that cannot be written: one sentence for a full disk, none for a closed pipe.
#
# Python flushes a command's output after its last line, where an error cannot be caught any more. Here it
# is flushed before.


class _Watched:
    """Standard output that remembers its last failed write, also if the writer ignores it."""

    problem: OSError | None = None

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except OSError as error:
            self.problem = error
            raise

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


@contextmanager
def flush_stdout() -> Iterator[None]:
    """All that a command prints is written when it returns.

    Raises:
        UsageError: standard output is closed, or cannot be written.
        SystemExit: its reader has ended (``| head``), with a shell's status for that, 128 + SIGPIPE.
    """
    if sys.stderr is None:  # closed: what is printed to it would go to standard output
        sys.stderr = open(os.devnull, "w")
    if sys.stdout is None:  # closed, and the next file that is opened would take its place
        raise UsageError("standard output is closed: expected a terminal, file or /dev/null")
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    if codecs.lookup(encoding).name != "utf-8" and hasattr(sys.stdout, "reconfigure"):
        with suppress(OSError):  # of a stream that says more of itself than is true
            sys.stdout.reconfigure(errors="backslashreplace")  # spells letters that it lacks
    output = sys.stdout = _Watched(sys.stdout)
    try:
        yield
    finally:
        sys.stdout = output.stream
        try:
            sys.stdout.flush()
        except OSError as error:
            output.problem = error
        if output.problem is not None:
            _give_up(output.problem)


def _give_up(problem: OSError) -> NoReturn:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())  # for what is still in Python's buffer
    os.close(nowhere)
    if isinstance(problem, BrokenPipeError):
        raise SystemExit(128 + signal.SIGPIPE) from None
    raise UsageError(f"standard output cannot be written: {problem.strerror}") from None
