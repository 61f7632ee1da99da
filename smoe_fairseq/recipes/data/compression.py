"""Compressed files: read to their last byte, so that one which is cut off or damaged is noticed."""

import bz2
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import check_plain

BLOCK = 1 << 14  # bytes that are read or decompressed at once


class _Decompressed(io.RawIOBase):
    """The content of a compressed file, to its last byte: of all streams in it, with zeros between them.

    Unlike the readers of Python and zstandard, it notices if a file is cut off or a later stream is damaged.
    """

    def __init__(self, path: Path, new: Callable[[], Any]):
        self.file, self.content = open(path, "rb"), memoryview(b"")
        self.blocks = self._blocks(new)

    def _blocks(self, new: Callable[[], Any]) -> Iterator[bytes]:
        data = self.file.read(BLOCK)
        while data:
            stream = new()
            # zlib and zstandard, which lack this, expand a block by far less.
            most = (BLOCK << 6,) if hasattr(stream, "needs_input") else ()
            while not stream.eof:
                if not data and (not most or stream.needs_input):
                    data = self.file.read(BLOCK)
                    if not data:
                        raise EOFError("it is cut off")
                yield stream.decompress(data, *most)
                data = b""
            data = stream.unused_data.lstrip(b"\0")
            while not data and (data := self.file.read(BLOCK)):
                data = data.lstrip(b"\0")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        try:
            while not self.content:
                self.content = memoryview(next(self.blocks))
        except StopIteration:
            return 0
        except (OSError, EOFError):
            raise
        except Exception as error:  # zlib's, lzma's or zstandard's own
            raise OSError(str(error)) from None  # without errno, as bz2's
        part, self.content = self.content[: len(buffer)], self.content[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        self.file.close()
        super().close()


def _decompressed(new: Callable[[], Any], path: Path) -> IO[bytes]:
    return io.BufferedReader(_Decompressed(path, new), BLOCK)


def _zstandard(path: Path) -> IO[bytes]:
    try:
        import zstandard
    except ImportError:
        raise UsageError(f"{path}: `pip install zstandard` to read it, or decompress it") from None
    return _decompressed(zstandard.ZstdDecompressor().decompressobj, path)


COMPRESSED: dict[str, Callable[[Path], IO[bytes]]] = {
    "": lambda path: open(path, "rb"),
    ".gz": partial(_decompressed, partial(zlib.decompressobj, 31)),  # 31: with gzip's header
    ".xz": partial(_decompressed, lzma.LZMADecompressor),
    ".bz2": partial(_decompressed, bz2.BZ2Decompressor),
    ".zst": _zstandard,
}
MAGIC = {".gz": b"\x1f\x8b", ".xz": b"\xfd7zXZ", ".bz2": b"BZh", ".zst": b"\x28\xb5\x2f\xfd"}


def compression_of(beginning: bytes) -> str:
    """The key of `COMPRESSED` for a file that begins with these bytes."""
    return next((kind for kind, magic in MAGIC.items() if beginning.startswith(magic)), "")


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A file's bytes, decompressed; raises UsageError, also on reading, if it is no plain file or damaged."""
    check_plain(path)
    with open(path, "rb") as file:
        beginning = file.read(6)
    if path.suffix in MAGIC and beginning and compression_of(beginning) != path.suffix:
        ending = compression_of(beginning)
        expected = f"expected the ending {ending}" if ending else f"remove {path.suffix} from it"
        raise UsageError(f"{path} is not compressed as its name says: {expected}")
    try:
        with COMPRESSED.get(path.suffix, COMPRESSED[""])(path) as content:
            yield content
    except (OSError, EOFError) as error:
        if reason := getattr(error, "strerror", None):  # the system's
            raise UsageError(f"{path} cannot be read: {reason}") from None
        raise UsageError(f"{path} is damaged ({error}): delete it and get it again") from None
