"""What a long translation has finished, in a file, so that the same command continues after it."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import open_plain


class Journal:
    """A file with a line of JSON for each finished part.

    Leaving the context keeps it, unless it has no part; `finish` deletes it.

    Args:
        file: parts that an earlier process left there are kept.
        key: what the parts depend on, as JSON.
        called: the name for the file in an error message.

    Raises:
        UsageError: the file cannot be written, is in use, is damaged, or has parts with another key.
    """

    def __init__(self, file: Path, key: Any = "", called: str | None = None):
        self.file, self.called = file, called or str(file)
        with self._writing():
            self.output = open_plain(file, append=True)
            try:
                fcntl.flock(self.output, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"{file} is in use by another process") from None
            with open(file, "rb") as lines:  # of which the last one may be cut off
                self.output.truncate(sum(len(line) for line in lines if line.endswith(b"\n")))
        if (first := next(self._lines(), None)) is None:
            self.append(key)
        elif first != key:
            raise UsageError(
                f"{file} is unfinished, by another model or other flags: repeat that command, or delete it"
            )

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_) -> None:
        if self.file.exists() and next(iter(self), None) is None:
            self.finish()
        self.output.close()

    def __iter__(self) -> Iterator[Any]:
        """The parts so far."""
        lines = self._lines()
        next(lines)  # the key
        return lines

    def _lines(self) -> Iterator[Any]:
        with open(self.file, "rb") as lines:
            try:
                yield from map(json.loads, lines)
            except ValueError:
                raise UsageError(f"{self.file} is damaged: delete it") from None

    def append(self, part: Any) -> None:
        with self._writing():
            self.output.write(json.dumps(part).encode() + b"\n")
            self.output.flush()

    def finish(self) -> None:
        """Delete the file, since its content is in other files now."""
        self.file.unlink()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            kept = "what was finished is kept"
            raise UsageError(f"{self.called} cannot be saved: {error.strerror}; {kept}") from None
