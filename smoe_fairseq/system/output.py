"""Standard output that takes no more: a full disk is one sentence, a reader that has gone is none.

Python writes what is left of a command's output after its last line, where it can only print words of its
own about it and nobody can catch them. Here that is done before.
"""

import codecs
import functools
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from smoe_fairseq.system.errors import UsageError


class _Watched:
    """Standard output, and the first reason why something was not written, even if nobody else looks."""

    def __init__(self, stream: TextIO):
        self.stream = stream
        self.problem: OSError | None = None

    def write(self, text: str) -> int:
        return self._try(self.stream.write, text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, function: Callable, *arguments):
        try:
            return function(*arguments)
        except OSError as error:
            self.problem = self.problem or error
            raise

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


def writes_all(command: Callable) -> Callable:
    """The command, with all that it prints written when it returns.

    Raises:
        UsageError: standard output cannot be written.
        SystemExit: its reader has ended (``| head``), with a shell's status for that, 128 + SIGPIPE.
    """

    @functools.wraps(command)
    def run(*arguments, **options):
        if sys.stderr is None:  # closed: what is printed to it would go to standard output
            sys.stderr = open(os.devnull, "w")
        if sys.stdout is None:  # closed, which Python takes for nowhere
            return command(*arguments, **options)
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        if codecs.lookup(encoding).name != "utf-8" and hasattr(sys.stdout, "reconfigure"):
            with suppress(OSError):  # of a stream that says more of itself than is true
                sys.stdout.reconfigure(
                    errors="backslashreplace"
                )  # letters that it lacks are spelt out
        output = sys.stdout = _Watched(sys.stdout)
        try:
            return command(*arguments, **options)
        finally:
            sys.stdout = output.stream
            with suppress(OSError):
                output.flush()
            if output.problem is not None:
                _give_up(output)

    return run


def _give_up(output: _Watched) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, output.fileno())  # for what is still in Python's buffer
    os.close(nowhere)
    if isinstance(output.problem, BrokenPipeError):
        raise SystemExit(128 + signal.SIGPIPE) from None
    raise UsageError(f"standard output cannot be written: {output.problem.strerror}") from None
