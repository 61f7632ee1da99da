"""How commands end: by a signal, together with their parent, or with an output that cannot be written."""

import codecs
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn, TextIO

from smoe_fairseq.errors import UsageError

# Signals that end a command raise an exception, so that temporary files are removed.

# Sent by Ctrl-C; by `kill`, batch systems and containers; by a closing terminal.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Each signal of `ENDING` raises SystemExit with a shell's status for it, 128 + n.

    Ignored signals (nohup, a shell's background jobs) stay ignored.
    """
    default = (signal.SIG_DFL, signal.default_int_handler)
    with _handled(_exit, lambda action: _in_main_thread() and action in default):
        yield


def _exit(number: int, _frame) -> None:
    raise SystemExit(128 + number)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Signals of `ENDING` end this process at once, also in a long call of a library; nothing is removed."""
    ignored = signal.SIG_IGN
    with _handled(signal.SIG_DFL, lambda action: _in_main_thread() and action is not ignored):
        yield


@contextmanager
def deferring_signals() -> Iterator[None]:
    """Have the signals of `ENDING` take effect when the context ends; only in the main thread.

    A process that starts in the context never receives SIGINT: Ctrl-C is for the parent, which ends it.
    """
    received: list[int] = []
    try:
        with _handled(lambda number, _: received.append(number)):
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # is inherited
            try:
                yield
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    finally:
        for number in received:
            signal.raise_signal(number)


@contextmanager
def _handled(
    handler: Callable | int | None, applies: Callable = lambda action: True
) -> Iterator[None]:
    """In the context, ``handler`` handles those of `ENDING` to whose present action it ``applies``.

    None: whatever is set in the context; the present actions are restored at its end, too.
    """
    before = {n: action for n in ENDING if applies(action := signal.getsignal(n))}
    try:
        for number in before if handler is not None else ():
            signal.signal(number, handler)
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, action)


@contextmanager
def restoring_signals() -> Iterator[None]:
    """Restore the actions of the signals of `ENDING`, and who is told of them, when the context ends."""
    if not _in_main_thread():
        yield
        return
    told = signal.set_wakeup_fd(-1)
    try:
        with _handled(None):
            yield
    finally:
        signal.set_wakeup_fd(told)


def _in_main_thread() -> bool:
    """Only there can handlers be set."""
    return threading.current_thread() is threading.main_thread()


_prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux only


def end_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent ends in any way (Linux)."""
    if _prctl is not None:
        _prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


# Errors in writing to standard output: a message if the disk is full, none for a closed pipe.
#
# Python flushes the output at exit, when an error can no longer be caught, so it is flushed before.


class _ErrorRecorder:
    """Standard output that records its last failed write, even if the writer ignores the error."""

    error: OSError | None = None

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except OSError as error:
            self.error = error
            raise

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


@contextmanager
def flush_stdout() -> Iterator[None]:
    """Flush standard output before the command returns, so that errors are reported.

    Raises:
        UsageError: standard output is closed, or cannot be written.
        SystemExit: its reader has ended (``| head``), with a shell's status for that, 128 + SIGPIPE.
    """
    if sys.stderr is None:  # closed: Python would print errors to standard output
        sys.stderr = open(os.devnull, "w")
    if sys.stdout is None:  # closed: the next opened file would get its descriptor
        raise UsageError("standard output is closed: expected a terminal, file or /dev/null")
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    if codecs.lookup(encoding).name != "utf-8" and hasattr(sys.stdout, "reconfigure"):
        with suppress(OSError):  # some streams have the method but do not support it
            sys.stdout.reconfigure(errors="backslashreplace")
    output = sys.stdout = _ErrorRecorder(sys.stdout)
    try:
        yield
    finally:
        sys.stdout = output.stream
        try:
            sys.stdout.flush()
        except OSError as error:
            output.error = error
        if output.error is not None:
            _exit_unwritten(output.error)


def _exit_unwritten(error: OSError) -> NoReturn:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())  # Python flushes its buffer there at exit
    os.close(null)
    if isinstance(error, BrokenPipeError):
        raise SystemExit(128 + signal.SIGPIPE) from None
    raise UsageError(f"standard output cannot be written: {error.strerror}") from None
