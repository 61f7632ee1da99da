"""Reading plain files; writing files and folders atomically."""

import errno
import functools
import hashlib
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from smoe_fairseq.errors import UsageError

_MARK = ".smoe"  # in the names of our temporary files and folders
MAX_BYTES = 1 << 28  # of a file that is read into memory at once
ABANDONED_SECONDS = 24 * 3600  # after which an unchanged temporary file of another host is removed


def read_plain(path: Path | str, largest: int = MAX_BYTES) -> bytes:
    """The content of a plain file.

    Raises:
        UsageError: it cannot be read, is a pipe or a device, or is larger than ``largest`` bytes.
    """
    check_plain(path)
    try:
        if os.stat(path).st_size > largest:
            raise UsageError(f"{path} has more than {largest:,} bytes; expected a smaller file")
        # If a pipe has replaced the file since the check, O_NONBLOCK opens it without waiting for a writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            return file.read()
    except FileNotFoundError:
        raise UsageError(f"{path} is missing") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def read_text(path: Path | str) -> str:
    """The content of a plain file in UTF-8; raises UsageError as `read_plain`, or if it is not UTF-8."""
    try:
        return read_plain(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error.reason}") from None


def _is_special(path: str) -> bool:
    """Whether ``path`` is a device or pipe, such as /dev/null, which must not be replaced."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def check_plain(path: Path | str) -> None:
    """Raise UsageError for a pipe or a device, since reading it may never end; a missing file passes."""
    if _is_special(os.fspath(path)):
        raise UsageError(f"{path} is a pipe or a device; expected a file")


@contextmanager
def whole_files(
    paths: Iterable[Path | str],
    called: str | None = None,
    parents: bool = False,
    replace: bool = True,
    follow: bool = True,
) -> Iterator[list[str]]:
    """Yield temporary files to write to; at the end they are renamed to ``paths``.

    Each temporary file is new and has a random name in the folder of its path. Temporary files that killed
    processes left for the same paths are removed.

    Args:
        called: the name for ``paths`` in an error message, such as ``--output out``; by default the
            first path.
        parents: whether to make missing folders.
        replace: whether existing files are replaced.
        follow: whether what a symbolic link points to is replaced, and not the link.

    Raises:
        UsageError: a file cannot be written (a full disk, for example), or exists although ``replace`` is
            false. Files that existed before are unchanged, and the temporary ones are removed.
    """
    paths = [os.fspath(path) for path in paths]
    called = called or paths[0]
    paths = [_target(path) for path in paths] if follow else paths
    partials, replacing, published = [], [], []
    try:
        _remove_abandoned(paths, "tmp")
        for path in paths:
            if _is_special(path):
                partials.append(path)
                continue
            if parents:
                os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            # Recorded before it is created, since a signal may end the process right after that.
            partial = _temporary(path, "tmp")
            partials.append(partial)
            replacing.append((partial, path))
            Path(partial).touch(exist_ok=False)
        yield partials
        for partial, _ in replacing:
            _sync(partial)
        for partial, path in replacing:
            os.replace(partial, path) if replace else _rename_to_new(partial, path)
            published.append(path)
    except (OSError, RuntimeError) as error:
        for path in published if not replace else ():
            _remove(path)
        raise _write_error(error, called, [*partials, *paths]) from None
    finally:
        for partial, _ in replacing:
            with suppress(OSError):
                os.unlink(partial)


def _rename_to_new(partial: str, path: str) -> None:
    """Rename a file; raises OSError if ``path`` exists."""
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    os.rename(partial, path)


def _target(path: str) -> str:
    """What a symbolic link points to, unless that is a pipe or a device."""
    return os.path.realpath(path) if os.path.islink(path) and not _is_special(path) else path


def _temporary(path: str, ending: str) -> str:
    """A random name in the same folder; fairseq's temporary files end in ``tmp``, too."""
    return f"{path}{_MARK}.{host()}-{os.getpid()}-{secrets.token_hex(4)}.{ending}"


@functools.cache
def host() -> str:
    """Eight hexadecimal digits that identify this machine or container, where process ids are unique."""
    name = socket.gethostname()
    with suppress(OSError):
        name += os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(name.encode()).hexdigest()[:8]


def _remove_abandoned(paths: Iterable[str], ending: str) -> None:
    """Remove the `_temporary` files and folders of ``paths`` whose writers were killed."""
    folders = defaultdict(set)
    for path in paths:
        folder, name = os.path.split(os.path.abspath(path))
        folders[folder].add(name)
    pattern = re.compile(
        rf"(.+){re.escape(_MARK)}\.(?:([0-9a-f]{{8}})-)?(\d+)-[0-9a-f]{{8}}\.{ending}"
    )
    for folder, names in folders.items():
        for file in Path(folder).glob(f"*{_MARK}.*.{ending}"):
            match = pattern.fullmatch(file.name)
            if match and match[1] in names:
                local = match[2] == host()
                if not _is_running(int(match[3])) if local else _is_old(file):
                    _remove(file)


def _is_old(file: Path) -> bool:
    """Whether a file or folder has not changed for `ABANDONED_SECONDS`."""
    try:
        changed = max(path.lstat().st_ctime for path in (file, *file.rglob("*")))
    except OSError:
        return False
    return time.time() - changed > ABANDONED_SECONDS


def _remove(path: str | Path) -> None:
    """Remove a file or a folder; errors are ignored."""
    with suppress(OSError):
        os.unlink(path)
    shutil.rmtree(path, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        with suppress(PermissionError):  # another user's process
            os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    return True


@contextmanager
def whole_file(path: Path | str, called: str | None = None, **options: bool) -> Iterator[str]:
    """`whole_files` for one path."""
    with whole_files([path], called, **options) as (partial,):
        yield partial


def write_whole(path: Path | str, content: str | bytes, called: str | None = None) -> None:
    """Write a file (text as UTF-8) as `whole_files` does."""
    with whole_file(path, called) as partial, open(partial, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)


def open_plain(path: Path, append: bool = False) -> BinaryIO:
    """Open a plain file for writing or appending; unlike `whole_file` it keeps partial content.

    A file with a second name, as in a backup by ``cp -al``, is replaced by a copy first.

    Raises:
        UsageError: the path is a symbolic link, or not a plain file.
        OSError: it cannot be opened.
    """
    if path.is_file() and path.lstat().st_nlink > 1 and not path.is_symlink():
        with whole_file(path) as partial:
            shutil.copyfile(path, partial)
    opened = open_descriptor(path, os.O_WRONLY | (os.O_APPEND if append else 0))
    if not append:
        os.ftruncate(opened, 0)
    return open(opened, "ab" if append else "wb")


def open_descriptor(path: Path, flags: int) -> int:
    """The descriptor of a plain file, which is created if it is missing; raises as `open_plain`."""
    try:
        opened = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError:
        if not path.is_symlink() and not _is_special(os.fspath(path)):
            raise
    else:
        state = os.fstat(opened)
        if stat.S_ISREG(state.st_mode) and state.st_nlink <= 1:
            return opened
        os.close(opened)
    raise UsageError(f"{path} is a link or no plain file: remove it")


def put_in_place(partial: Path, path: Path) -> None:
    """Rename a finished ``partial`` to ``path``; if that raises OSError, ``partial`` is kept."""
    _sync(partial)
    os.replace(partial, path)


@contextmanager
def whole_folder(folder: Path, replace: bool = False, called: str | None = None) -> Iterator[Path]:
    """Yield a temporary folder; at the end it is renamed to ``folder``, or removed after an error.

    Args:
        replace: whether an existing folder is replaced once the new one is complete.
        called: as in `whole_files`.

    Raises:
        UsageError: the folder cannot be written, or exists although ``replace`` is false.
    """
    called = called or str(folder)
    if not replace:
        refuse_existing(folder, called)
    folder = Path(_target(str(folder)))
    _remove_abandoned([str(folder)], "partial")
    partial = Path(_temporary(str(folder), "partial"))
    try:
        partial.mkdir(parents=True)
        yield partial
        for file in partial.rglob("*"):
            if file.is_file():
                _sync(file)
        if replace:
            _replace_folder(partial, folder)
        else:
            os.rename(partial, folder)  # replaces nothing but an empty folder
        _remove_abandoned([str(folder)], "old")
    except (OSError, RuntimeError) as error:
        raise _write_error(error, called, [str(partial), str(folder)]) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _replace_folder(partial: Path, folder: Path) -> None:
    """Rename ``partial`` to ``folder``. Unlike a file, an existing folder has to be moved away first."""
    old = Path(_temporary(str(folder), "old"))
    if folder.exists():
        os.replace(folder, old)
    try:
        os.replace(partial, folder)
    except OSError:
        if old.exists():
            os.replace(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def refuse_existing(path: Path, called: str) -> None:
    """Raise UsageError if the output exists, before any work."""
    if path.exists():
        raise UsageError(f"{called} exists already: expected a new name")


def reason_of(error: BaseException | None) -> str | None:
    """The system's reason for a failed write, also if torch raised a RuntimeError in its place."""
    while error is not None:
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        error = error.__cause__ or error.__context__
    return None


def _sync(path: Path | str) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())  # else a crash may leave a renamed file without its content


def _write_error(error: Exception, called: str, paths: list[str]) -> Exception:
    """A UsageError for the failed write, or ``error`` itself if it is about some other file."""
    reason = reason_of(error)
    if reason is None or not _is_about(error, paths):
        return error
    return UsageError(f"{called} cannot be saved: {reason}; files saved before are unchanged")


def _is_about(error: Exception, paths: list[str]) -> bool:
    """Whether an error is about one of ``paths`` or their folders. A failed write names no file."""
    names = (getattr(error, name, None) for name in ("filename", "filename2"))
    named = [Path(os.path.abspath(n)) for n in names if isinstance(n, str | os.PathLike)]
    pairs = [(a, Path(os.path.abspath(b))) for a in named for b in paths]
    return not named or any(a.is_relative_to(b) or b.is_relative_to(a) for a, b in pairs)
