"""Text and binarised text as files: chunks, workers, progress."""

import multiprocessing
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from smoe_fairseq.errors import UsageError

CHUNK = 1 << 20  # bytes: some tenths of a second of work


@dataclass(frozen=True)
class Chunk:
    """Bytes ``start`` to ``stop`` of a file, which are whole lines."""

    file: Path
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def lines(self) -> list[str]:
        """Without the line feeds, which alone separate them; a `UsageError` where they are not UTF-8."""
        with open(self.file, "rb") as file:
            file.seek(self.start)
            content = file.read(self.size)
        try:
            lines = content.decode("utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise UsageError(f"{self.file} is not UTF-8 text: {error.reason}") from None
        if not lines[-1]:  # what is behind the last line feed
            lines.pop()
        return lines


def count_lines(file: Path) -> int:
    """One that no line feed ends counts too."""
    with open(file, "rb") as lines:
        return sum(1 for _ in lines)


def chunks(file: Path) -> Iterator[Chunk]:
    """The file's parts in order: `CHUNK` bytes and the rest of the last line each; none of an empty file."""
    size = file.stat().st_size
    stop = 0
    with open(file, "rb") as content:
        while stop < size:
            start = stop
            content.seek(start + CHUNK)
            content.readline()
            stop = min(content.tell(), size)
            yield Chunk(file, start, stop)


# Binarised text as ``fairseq-preprocess`` writes it (``--dataset-impl mmap``), without importing
# fairseq.
#
# The format is fairseq 0.12.2's ``MMapIndexedDataset``: a ``.bin`` file of all token numbers, and
# an ``.idx`` file with the sentences' lengths and the places where they begin.

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # what every dictionary of fairseq begins with
EOS, UNKNOWN = SPECIAL.index("</s>"), SPECIAL.index("<unk>")
_HEADER = struct.Struct("<9sQBQ")  # magic, version, code of the numbers' type, sentences
_MAGIC = b"MMIDIDX\0\0"
_CODES = {np.dtype(np.uint16): 8, np.dtype(np.uint32): 9}


def number_type(words: int) -> np.dtype:
    """What the numbers of a dictionary of so many words, the special ones included, are kept as."""
    return np.dtype(np.uint16 if words < 65500 else np.uint32)


def index_bytes(lengths: np.ndarray, kind: np.dtype) -> bytes:
    """The content of an ``.idx`` file for sentences of these ``lengths`` (int32) of numbers of a ``kind``."""
    starts = np.zeros(len(lengths), dtype=np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=starts[1:])
    header = _HEADER.pack(_MAGIC, 1, _CODES[kind], len(lengths))
    return header + lengths.tobytes() + (starts * kind.itemsize).tobytes()


def count_sentences(index: Path) -> int:
    """Of an ``.idx`` file; a `UsageError` where it is none, or cut off."""
    with open(index, "rb") as file:
        header = file.read(_HEADER.size)
    if len(header) == _HEADER.size and header.startswith(_MAGIC):
        sentences = _HEADER.unpack(header)[-1]
        if index.stat().st_size == _HEADER.size + 12 * sentences:  # int32 and int64 of each
            return sentences
    raise UsageError(f"{index} is cut off, or not an index of fairseq-preprocess")


class Vocabulary(dict[str, int]):
    """The number of each word of a dictionary; that of ``<unk>`` for all others."""

    def __missing__(self, _word: str) -> int:
        return UNKNOWN


def read_dictionary(file: Path) -> Vocabulary:
    """From fairseq's format: a word and its count on each line, numbered from the special words on.

    Raises:
        UsageError: it is not in this format, or has a word twice.
    """
    words = Vocabulary({word: number for number, word in enumerate(SPECIAL)})
    try:
        with open(file, encoding="utf-8") as lines:
            for line in lines:
                word, separator, count = line.rstrip().rpartition(" ")
                if not separator or not count.lstrip("-").isdecimal() or word in words:
                    raise UsageError(
                        f"{file} is not a dictionary: expected a word that no other line has, a space and a "
                        f"count, not {line.rstrip()!r}"
                    )
                words[word] = len(words)
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text: {error.reason}") from None
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None
    return words


# How far a step is: a bar at a terminal, now and then a line in a log.

_SECONDS = 30  # between two lines of a log


@contextmanager
def progress(step: str, total: int) -> Iterator[Callable[[int], None]]:
    """Gives ``advance(bytes)``, of ``total`` bytes of work; shown on standard error."""
    if sys.stderr.isatty():
        with tqdm(total=total, desc=step, unit="B", unit_scale=True, leave=False) as bar:
            yield bar.update
        return
    done, said = 0, time.monotonic()

    def advance(size: int) -> None:
        nonlocal done, said
        done += size
        if time.monotonic() - said >= _SECONDS:
            said = time.monotonic()
            print(
                f"{step}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB", file=sys.stderr, flush=True
            )

    yield advance


# Processes that share the work of a step and live as long as it does; results come in the work's
# order.

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
