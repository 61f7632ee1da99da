"""Processes that share the work of a step and live as long as it does; results come in the work's order."""

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from smoe_fairseq.recipes.preparing.chunks import CHUNK
from smoe_fairseq.system.errors import UsageError

_AHEAD = (
    4  # results per process that may wait for an earlier one, which bounds the memory they take
)


@contextmanager
def shared(
    function: Callable[[Any], Any], workers: int, size: int
) -> Iterator[Callable[[Iterable], Iterator]]:
    """Gives ``each``: ``each(units)`` are the results of ``function(unit)``, in the units' order.

    The function goes to each process once and the units one by one, by pickle. At the end, whatever it is,
    the processes are gone; they go by themselves where this one is killed.

    Args:
        workers: processes, at most; 1: this one does it all.
        size: bytes of all the work, of which each process gets at least a `CHUNK`.

    Raises:
        UsageError: a process was killed. What the function raises is raised here, in the order of the units.
    """
    workers = min(workers, -(-size // CHUNK))
    if workers < 2:
        yield partial(map, function)
        return
    with ExitStack() as stack:
        yield partial(_each, [stack.enter_context(_worker(function)) for _ in range(workers)])


@contextmanager
def _worker(function: Callable[[Any], Any]) -> Iterator[Connection]:
    # Spawned, not forked: libraries may have threads by now, and a connection that another process holds
    # open too would not tell of this one's end.
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(function, there), daemon=True)
    # Ctrl-C reaches all processes of a terminal; this one answers it for them, which inherit the mask. The
    # tracker would lift it while it starts.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        there.close()
    try:
        yield here
    finally:
        process.terminate()
        process.join()
        here.close()


def _work(function: Callable[[Any], Any], connection: Connection) -> None:
    while True:
        try:
            unit = connection.recv()
        except EOFError:
            return
        try:
            answer = True, function(unit)
        except Exception as error:
            error.add_note(traceback.format_exc())  # which pickle would leave behind
            answer = False, error
        try:
            connection.send(answer)
        except BrokenPipeError:
            return


def _each(connections: list[Connection], units: Iterable) -> Iterator:
    units = enumerate(units)
    idle, busy, done = list(connections), {}, {}
    turn = 0
    try:
        while True:
            while idle and len(busy) + len(done) < _AHEAD * len(connections):
                if (following := next(units, None)) is None:
                    break
                number, unit = following
                connection = idle.pop()
                connection.send(unit)
                busy[connection] = number
            if turn in done:
                well, result = done.pop(turn)
                if not well:
                    raise result
                turn += 1
                yield result
                continue
            if not busy:
                return
            for connection in wait(list(busy)):
                done[busy[connection]] = connection.recv()
                del busy[connection]
                idle.append(connection)
    except (EOFError, ConnectionError):
        raise UsageError(
            "a worker process was killed, as the system does where memory runs out: repeat with fewer WORKERS"
        ) from None
