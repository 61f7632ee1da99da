"""What a long translation has finished, in a file, so that the same command continues after it."""

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import open_plain

_HEAD = "unfinished"  # key of the first line, by which a file is known as a journal


class Journal:
    """A file with a line of JSON for each finished part, after a line for what they depend on.

    Leaving the context keeps the file, unless it has no part; `finish` deletes it.

    Args:
        file: parts that an earlier process left there are kept.
        key: what the parts depend on, as JSON.
        called: the name for the file in an error message.

    Raises:
        UsageError: the file cannot be written, is in use, is damaged or no journal, or has parts with another
            key.
    """

    def __init__(self, file: Path, key: Any = "", called: str | None = None):
        self.file, self.called, self.parts = file, called or str(file), 0
        with self._writing():
            self.output = open_plain(file, append=True)
            try:
                fcntl.flock(self.output, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:  # or the file system has no locks
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    raise UsageError(f"{file} is in use by another process") from None
            with open(file, "rb") as lines:
                first = next(lines, b"")
                # The last one may be cut off.
                rest = [len(line) for line in lines if line.endswith(b"\n")]
        head = json.dumps({_HEAD: key}).encode() + b"\n"
        if first and not first.startswith(f'{{"{_HEAD}": '.encode()):
            raise UsageError(f"{file} exists and is no unfinished translation: rename it")
        if rest and first != head:
            raise UsageError(
                f"{file} is unfinished, by another model or other flags: repeat that command, or delete it"
            )
        with self._writing():
            self.output.truncate(len(first) + sum(rest) if first == head else 0)
        if first != head:
            self._write(head)
        self.parts = len(rest)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_) -> None:
        if not self.parts:
            self.finish()
        self.output.close()

    def __iter__(self) -> Iterator[Any]:
        """The parts so far."""
        with open(self.file, "rb") as lines:
            next(lines)
            try:
                yield from map(json.loads, lines)
            except ValueError:
                raise UsageError(f"{self.file} is damaged: delete it") from None

    def append(self, part: Any) -> None:
        self._write(json.dumps(part).encode() + b"\n")
        self.parts += 1

    def finish(self) -> None:
        """Delete the file, since its content is in other files now."""
        self.file.unlink(missing_ok=True)

    def _write(self, line: bytes) -> None:
        with self._writing():
            while line:  # unbuffered: nothing is left to write when the disk is full
                line = line[os.write(self.output.fileno(), line) :]

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            kept = "; what was finished is kept" * bool(self.parts)
            raise UsageError(f"{self.called} cannot be saved: {error.strerror}{kept}") from None
