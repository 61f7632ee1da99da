"""The lines of standard input, some at a time."""

from collections.abc import Iterator
from itertools import islice
from typing import BinaryIO

from smoe_fairseq.system.errors import UsageError


def text_lines(stream: BinaryIO, at_once: int) -> Iterator[list[str]]:
    """Lists of ``at_once`` lines, the last one shorter; without their ends (``\\n`` or ``\\r\\n``).

    Raises:
        UsageError: a line is not UTF-8.
    """
    first = 1
    while lines := list(islice(stream, at_once)):
        yield [_decoded(line, first + i) for i, line in enumerate(lines)]
        first += len(lines)


def _decoded(line: bytes, number: int) -> str:
    line = line.removesuffix(b"\n").removesuffix(b"\r")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"line {number} of standard input is not UTF-8: byte {line[error.start]:#04x} at position "
            f"{error.start + 1}; expected text in UTF-8"
        ) from None
