"""Zip and tar archives with any compression: their members, read one after the other."""

import os
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from lzma import LZMAError
from pathlib import Path, PurePosixPath
from typing import IO

from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import check_plain
from smoe_fairseq.recipes.data.compression import BLOCK, COMPRESSED, compression_of

MAX_READ_BYTES = 1 << 30  # of a member that is read into memory; LibreOffice's have 2 MB
_DAMAGE = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, LZMAError, EOFError, OSError, RuntimeError),
    *(struct.error, ValueError),  # from invalid headers
)


def read_members(
    archive: Path, wanted: Callable[[PurePosixPath], bool]
) -> Iterator[tuple[PurePosixPath, bytes]]:
    """Yield name and content of the wanted regular files, in the archive's order."""
    with naming_archive(archive):
        for name, regular, size, opened in _members(archive):
            path = PurePosixPath(name)
            if regular and wanted(path):
                if size > MAX_READ_BYTES:
                    large = f"{archive} holds {name!r} of {size:,} bytes"
                    raise UsageError(f"{large}: expected at most {MAX_READ_BYTES:,}")
                with opened() as content:
                    yield path, content.read()


def extract(archive: Path, wanted: Mapping[str, Path]) -> int:
    """Write the wanted members; returns their number.

    Args:
        wanted: the file to write for each name. A member matches a name that is the end of its path.

    Raises:
        UsageError: the archive is missing, damaged or has a password; or a wanted member is not a plain file,
            exceeds the free space, or occurs twice or in another archive before.
    """
    members = {}
    with naming_archive(archive, os.path.commonpath(wanted.values()) if wanted else None):
        for name, regular, size, opened in _members(archive):
            parts = PurePosixPath(name.replace("\\", "/")).parts
            endings = ("/".join(parts[i:]) for i in range(len(parts)))
            output = next((wanted[ending] for ending in endings if ending in wanted), None)
            if output is None:
                continue
            if not regular:
                raise UsageError(f"{archive} holds {name!r}, which is not a plain file")
            if output in members or output.exists():
                other = repr(members[output]) if output in members else "another archive"
                raise UsageError(f"{archive} holds {name!r} for one file, as does {other}")
            members[output] = name
            output.parent.mkdir(parents=True, exist_ok=True)
            if size > shutil.disk_usage(output.parent).free:
                large = f"{archive} holds {name!r} of {size:,} bytes"
                raise UsageError(f"{large}, for which {output.parent} has no room")
            with opened() as content, open(output, "wb") as copy:
                shutil.copyfileobj(content, copy)
    return len(members)


@contextmanager
def naming_archive(archive: Path, folder: str | None = None) -> Iterator[None]:
    """Turn errors into a UsageError that names the archive, and the ``folder`` to extract to."""
    try:
        yield
    except _DAMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:  # bz2's for damage has no errno
            what = f"unpacked to {folder}" if folder else "read"
            raise UsageError(f"{archive} cannot be {what}: {error.strerror}") from None
        reason = " ".join(str(error).split())
        expected = "expected a zip or tar without a password, by deflate, gzip, bzip2 or xz"
        advice = f"{expected}; if it is one, delete it and get it again"
        raise UsageError(f"{archive} cannot be unpacked ({reason}): {advice}") from None


def _members(archive: Path) -> Iterator[tuple[str, bool, int, Callable[[], IO[bytes]]]]:
    """Yield all members except folders, in the archive's order; each has to be read before the next.

    A member is its name, whether it is a regular file, its size, and a function that opens it.
    """
    check_plain(archive)
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as content:
            for info in content.infolist():
                kind = stat.S_IFMT(info.external_attr >> 16)  # 0 if not packed on Unix
                if not info.is_dir():
                    regular = kind in (0, stat.S_IFREG)
                    yield info.filename, regular, info.file_size, partial(content.open, info)
    else:
        with open(archive, "rb") as file:
            kind = compression_of(file.read(BLOCK))
        with (
            COMPRESSED[kind](archive) as stream,
            tarfile.open(fileobj=stream, mode="r|") as content,
        ):
            for info in content:
                if not info.isdir():
                    yield info.name, info.isreg(), info.size, partial(content.extractfile, info)
            while stream.read(BLOCK):  # to the end, for the compression's checksum
                pass
