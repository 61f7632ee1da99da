"""Signals that end a command: as an exception, so that whatever it has begun is put away on the way out."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Ctrl-C, what `kill`, batch systems and containers send, and the end of a terminal.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def heeded() -> Iterator[None]:
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
