"""Text files in parts of whole lines, so that a long file keeps as many processes busy as many short ones."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from smoe_fairseq.system.errors import UsageError

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
