"""Functions in forked processes, which have made the imports already. On a GPU's machine these take
half a minute from a cold disk; the process that forks must not have touched CUDA.
"""

import argparse
import contextlib
import json
import logging
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

FORMAT = "%(asctime)s | %(levelname)s | %(name)s | %(message)s"  # fairseq's


class Forked:
    """A process that calls a function; a SystemExit is its exit status.

    Args:
        leads: whether it leads a group of its own, which is killed as a whole.
        environment: variables that it has besides this process's.

    Attributes:
        output: what it has printed so far, stdout and stderr.
        status: None while it runs, then its exit status; negative, where a signal ended it.
        in_time: False if it was killed because its time was over.
    """

    def __init__(self, function: Callable, leads: bool = False, **environment: str):
        self.leads = leads
        self.output, self.status, self.in_time = "", None, False
        sys.stdout.flush()
        self._reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _run(function, leads, environment, writing)
        os.close(writing)

    def lines(self, seconds: float | None = None) -> Iterator[str]:
        """Its lines as they come, until it ends or, after ``seconds``, is killed."""
        end = None if seconds is None else time.monotonic() + seconds
        rest, over = b"", False
        try:
            while not over:
                left = None if end is None else max(0.0, end - time.monotonic())
                readable = select.select([self._reading], [], [], left)[0]
                content = os.read(self._reading, 65536) if readable else b""
                self.in_time, over = bool(readable), not content
                self.output += content.decode(errors="replace")
                *whole, rest = (rest + content).split(b"\n")
                yield from (line.decode(errors="replace") for line in whole)
        finally:
            if not self.in_time:
                self.kill()
            _, status = os.waitpid(self.pid, 0)
            self.status = os.waitstatus_to_exitcode(status)
            self.kill()  # what it has left of its group
            os.close(self._reading)

    def wait(self) -> str:
        """All that it printed, once it has ended.

        Raises:
            RuntimeError: its exit status is not 0; with the end of what it printed.
        """
        for _ in self.lines():
            pass
        if self.status:
            raise RuntimeError(self.output[-1500:])
        return self.output

    def kill(self) -> None:
        """Kill it, or what is left of its group; nothing happens if there is none."""
        if self.leads:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        elif self.status is None:
            os.kill(self.pid, signal.SIGKILL)


def _run(function: Callable, leads: bool, environment: dict[str, str], writing: int):
    status = 1
    try:
        if leads:
            os.setsid()
        for descriptor in (1, 2):
            os.dup2(writing, descriptor)
        os.close(writing)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        os.environ.update(environment)
        logging.basicConfig(stream=sys.stdout, level=logging.INFO, format=FORMAT, force=True)
        function()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def command(main: Callable[[], object], words: Sequence) -> Callable[[], object]:
    """The function that calls a program's ``main`` with these words after its name."""

    def call():
        with mock.patch.object(sys, "argv", [main.__module__, *map(str, words)]):
            return main()

    return call


def value(function: Callable[[], object]):
    """What a function returns in a forked process, as JSON has it.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
    """
    return json.loads(Forked(lambda: print(json.dumps(function()))).wait().splitlines()[-1])


def import_commands() -> None:
    """Import fairseq's commands and the plugin, for processes that are forked afterwards."""
    import torch

    # fairseq counts the GPUs when it is imported, which may touch CUDA.
    gpus = value(torch.cuda.device_count)
    with mock.patch.object(torch.cuda, "device_count", lambda: gpus):
        import fairseq_cli.generate
        import fairseq_cli.preprocess
        import fairseq_cli.train  # noqa: F401
    from fairseq.utils import import_user_module

    import smoe_fairseq

    import_user_module(argparse.Namespace(user_dir=os.path.dirname(smoe_fairseq.__file__)))
