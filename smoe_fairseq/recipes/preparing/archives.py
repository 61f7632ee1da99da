"""Archives, of which only the files that are wanted are written, under names of our own.

No name inside an archive is ever used as a path.
"""

import gzip
import os
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from lzma import LZMAError
from pathlib import Path, PurePosixPath
from typing import IO

from smoe_fairseq.system.errors import UsageError

_DAMAGE = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, LZMAError, EOFError, gzip.BadGzipFile),
    *(struct.error, ValueError),  # headers of nonsense
)


@dataclass(frozen=True)
class Member:
    """A member of an archive; ``open`` gives its content and is for regular files only."""

    name: str
    regular: bool
    open: Callable[[], IO[bytes]]


def extract(archive: Path, wanted: Mapping[str, Path]) -> int:
    """Writes the members of a zip or tar archive of any compression that are wanted, and counts them.

    Args:
        wanted: the file to write for each name; a member is that whose name, or the end of it from some
            folder on, this is.

    Raises:
        UsageError: the archive is missing, damaged, or has a password or a name that leads out of a folder;
            or a link or a device is in the place of a member that is wanted.
    """
    count = 0
    try:
        for member in _members(archive):
            path = PurePosixPath(member.name.replace("\\", "/"))
            if path.is_absolute() or ".." in path.parts:
                raise UsageError(f"{archive} holds {member.name!r}, outside of it: do not trust it")
            name = next((n for n in _endings(path) if n in wanted), None)
            if name is None:
                continue
            if not member.regular:
                raise UsageError(f"{archive} holds {member.name!r}, which is not a plain file")
            output = wanted[name]
            output.parent.mkdir(parents=True, exist_ok=True)
            with member.open() as content, open(output, "wb") as copy:
                shutil.copyfileobj(content, copy)
            count += 1
    except _DAMAGE as error:
        raise _damaged(archive, error) from None
    except RuntimeError as error:
        # zipfile's, for a password, and for a method that it does not know
        raise UsageError(
            f"{archive} cannot be unpacked ({error}): expected an archive without a password, zip or tar, "
            "compressed by deflate, gzip, bzip2 or xz"
        ) from None
    except OSError as error:
        if error.errno is None:  # bzip2's word for damage
            raise _damaged(archive, error) from None
        folder = os.path.commonpath(wanted.values())
        raise UsageError(f"{archive} cannot be unpacked to {folder}: {error.strerror}") from None
    return count


def _damaged(archive: Path, error: Exception) -> UsageError:
    reason = " ".join(str(error).split())  # tarfile's has a line for each compression
    return UsageError(f"{archive} cannot be unpacked ({reason}): delete it and get it again")


def _endings(path: PurePosixPath) -> Iterator[str]:
    """``a/b/c``, ``b/c`` and ``c``: an archive may hold its files in a folder above."""
    for i in range(len(path.parts)):
        yield "/".join(path.parts[i:])


def _members(archive: Path) -> Iterator[Member]:
    """All members but folders, in the archive's order, each to be read before the next one."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as content:
            for info in content.infolist():
                kind = stat.S_IFMT(info.external_attr >> 16)  # 0 where it was not packed on Unix
                regular = kind in (0, stat.S_IFREG)
                if not info.is_dir():
                    yield Member(info.filename, regular, lambda info=info: content.open(info))
    else:
        with tarfile.open(archive) as content:
            for info in content:
                if not info.isdir():
                    yield Member(
                        info.name, info.isreg(), lambda info=info: content.extractfile(info)
                    )
            while content.fileobj.read(2**20):  # To the end, where the compression's checksum is.
                pass
