"""Zip and tar archives of any compression: the files in them that are wanted, and nothing else."""

import gzip
import os
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from lzma import LZMAError
from pathlib import Path, PurePosixPath
from typing import IO

from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import check_plain

_DAMAGE = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, LZMAError, EOFError, gzip.BadGzipFile),
    *(struct.error, ValueError),  # from headers of nonsense
)


@dataclass(frozen=True)
class _Member:
    """A member of an archive; ``open`` gives the content of a regular file."""

    name: str
    regular: bool
    size: int
    open: Callable[[], IO[bytes]]


def read_members(
    archive: Path, wanted: Callable[[PurePosixPath], bool]
) -> Iterator[tuple[PurePosixPath, bytes]]:
    """Yield name and content of the wanted regular files, in the archive's order.

    Raises:
        UsageError: the archive is missing, damaged, or has a password.
    """
    with _named(archive):
        for member in _members(archive):
            path = PurePosixPath(member.name)
            if member.regular and wanted(path):
                with member.open() as content:
                    yield path, content.read()


def extract(archive: Path, wanted: Mapping[str, Path]) -> int:
    """Write the wanted members; returns how many there were.

    Args:
        wanted: the file to write for each name. A member matches if this is its name, or the end of it from
            some folder on.

    Raises:
        UsageError: the archive is missing, damaged, or has a password or a name that leads out of a folder;
            or a wanted member is a link or a device, is larger than the disk, or comes twice.
    """
    found = {}
    with _named(archive, os.path.commonpath(wanted.values()) if wanted else None):
        for member in _members(archive):
            path = PurePosixPath(member.name.replace("\\", "/"))
            if path.is_absolute() or ".." in path.parts:
                raise UsageError(f"{archive} holds {member.name!r}, outside of it: do not trust it")
            endings = ("/".join(path.parts[i:]) for i in range(len(path.parts)))
            name = next((ending for ending in endings if ending in wanted), None)
            if name is None:
                continue
            if not member.regular:
                raise UsageError(f"{archive} holds {member.name!r}, which is not a plain file")
            if name in found:
                raise UsageError(
                    f"{archive} holds {found[name]!r} and {member.name!r} for one file"
                )
            found[name] = member.name
            output = wanted[name]
            output.parent.mkdir(parents=True, exist_ok=True)
            if member.size > shutil.disk_usage(output.parent).free:
                raise UsageError(
                    f"{archive} holds {member.name!r} of {member.size:,} bytes, for which "
                    f"{output.parent} has no room"
                )
            with member.open() as content, open(output, "wb") as copy:
                shutil.copyfileobj(content, copy)
    return len(found)


@contextmanager
def _named(archive: Path, folder: str | None = None) -> Iterator[None]:
    """Turn errors into a UsageError that names the archive and, if a write failed, the ``folder``."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # bz2's error for damage
            raise _damaged(archive, error) from None
        what = f"unpacked to {folder}" if folder else "read"
        raise UsageError(f"{archive} cannot be {what}: {error.strerror}") from None
    except _DAMAGE as error:
        raise _damaged(archive, error) from None
    except RuntimeError as error:  # zipfile's, for a password or an unknown method
        raise UsageError(
            f"{archive} cannot be unpacked ({error}): expected an archive without a password, zip or tar, "
            "compressed by deflate, gzip, bzip2 or xz"
        ) from None


def _damaged(archive: Path, error: Exception) -> UsageError:
    reason = " ".join(str(error).split())  # tarfile's has a line for each compression
    return UsageError(f"{archive} cannot be unpacked ({reason}): delete it and get it again")


def _members(archive: Path) -> Iterator[_Member]:
    """All members but folders, in the archive's order; each has to be read before the next."""
    check_plain(archive)
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as content:
            for info in content.infolist():
                kind = stat.S_IFMT(info.external_attr >> 16)  # 0 if it was not packed on Unix
                if not info.is_dir():
                    regular = kind in (0, stat.S_IFREG)
                    read = partial(content.open, info)
                    yield _Member(info.filename, regular, info.file_size, read)
    else:
        with tarfile.open(archive) as content:
            for info in content:
                if not info.isdir():
                    read = partial(content.extractfile, info)
                    yield _Member(info.name, info.isreg(), info.size, read)
            while content.fileobj.read(2**20):  # to the end, where the compression's checksum is
                pass
