"""Large text files: chunks of lines, and worker processes."""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from smoe_fairseq.ending import deferring_signals
from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import check_plain
from smoe_fairseq.progress import progress

CHUNK = 1 << 20  # bytes; a few tenths of a second of work
_AHEAD = 4  # maximum number of results per process that wait for an earlier one, to bound memory
_function: Callable[[Any], Any]  # of a worker process


@dataclass(frozen=True)
class Chunk:
    """Bytes ``start`` to ``stop`` of a file: whole lines."""

    file: Path
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def lines(self) -> list[str]:
        """Lines without their line feeds; raises UsageError if they are not UTF-8."""
        with open(self.file, "rb") as file:
            file.seek(self.start)
            content = file.read(self.size)
        try:
            lines = content.decode("utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise UsageError(f"{self.file} is not UTF-8 text: {error.reason}") from None
        if not lines[-1]:  # after the last line feed
            lines.pop()
        return lines


def chunks(file: Path) -> Iterator[Chunk]:
    """The file in chunks of at least `CHUNK` bytes, up to the end of a line; none for an empty file."""
    check_plain(file)
    size = file.stat().st_size
    stop = 0
    with open(file, "rb") as content:
        while stop < size:
            start = stop
            content.seek(start + CHUNK)
            content.readline()
            stop = min(content.tell(), size)
            yield Chunk(file, start, stop)


def count_lines(file: Path) -> int:
    """The number of lines, including a last one without a line feed."""
    check_plain(file)
    with open(file, "rb") as lines:
        return sum(1 for _ in lines)


@contextmanager
def map_chunks(
    step: str, function: Callable[[Chunk], Any], files: Iterable[Path], workers: int
) -> Iterator[Iterator[tuple[Path, Iterator]]]:
    """Yield, with progress, each file and an iterator over ``function(chunk)`` for its chunks."""
    parts = [(file, list(chunks(file))) for file in files]
    size = sum(chunk.size for _, part in parts for chunk in part)
    with progress(step, size) as advance, parallel_map(function, workers, size) as apply:
        results = apply(chunk for _, part in parts for chunk in part)

        def results_of(part: list[Chunk]) -> Iterator:
            for chunk in part:
                yield next(results)
                advance(chunk.size)

        yield ((file, results_of(part)) for file, part in parts)


@contextmanager
def parallel_map(
    function: Callable[[Any], Any], workers: int, size: int
) -> Iterator[Callable[[Iterable], Iterator]]:
    """Yield ``apply``: ``apply(units)`` computes ``function(unit)`` in parallel, in the units' order.

    The function is sent once to each of up to ``workers`` processes (1: it runs in this one). They end with
    the context, or with this process. ``size``: bytes of all units; each process gets at least a `CHUNK`.
    """
    workers = min(workers, -(-size // CHUNK))
    if workers < 2:
        yield partial(map, function)
        return
    with workers_for(partial, function, count=workers) as submit:
        yield partial(_apply, submit, _AHEAD * workers)


def _apply(submit: Callable[[Any], Future], ahead: int, units: Iterable) -> Iterator:
    waiting = deque()
    for unit in units:
        waiting.append(submit(unit))
        if len(waiting) == ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


@contextmanager
def workers_for(make: Callable, *arguments: Any, count: int) -> Iterator[Callable[[Any], Future]]:
    """Yield ``submit(unit)``, which computes ``make(*arguments)(unit)`` in one of the processes.

    Each process calls ``make`` once. They end with the context, or with this process. Raises UsageError if a
    process was killed.
    """
    spawn = multiprocessing.get_context("spawn")  # a fork would copy the libraries' threads
    pool = ProcessPoolExecutor(count, spawn, _start_worker, (make, *arguments))

    def submit(unit: Any) -> Future:
        with deferring_signals():  # else one that starts would be left with half of what it is sent
            return pool.submit(_work, unit)

    try:
        yield submit
    except BrokenProcessPool:
        killed = "a worker process was killed, as the system does where memory runs out"
        fewer = "repeat with fewer (--workers; of an evaluation, --jobs)"
        raise UsageError(f"{killed}: {fewer}") from None
    except BaseException:  # do not wait for the current units, which may take hours
        for process in (pool._processes or {}).copy().values():
            process.terminate()
        # The pool would wait for the rest of a result, for which its own end of the pipe stays open.
        pool._result_queue._writer.close()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(make: Callable, *arguments: Any) -> None:
    global _function
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _function = make(*arguments)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _work(unit: Any) -> Any:
    return _function(unit)
