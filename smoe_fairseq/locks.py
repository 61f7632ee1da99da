"""Locks: one run at a time in a folder. A process holds the lock on a file until it ends.

It is a POSIX record lock (``fcntl.lockf``). The kernel releases it however the process ends, NFS servers
support it across machines, and forked data-loading processes do not inherit it, so a killed run leaves no
lock behind. (``flock`` guarantees neither of the last two.) Closing any descriptor of the file releases the
lock, so the file is opened in one place, once.
"""

import atexit
import errno
import fcntl
import os
import socket
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import open_descriptor

TRAINING, RECIPE, EVALUATION = "training.lock", "recipe.lock", "evaluation.lock"
PREPARATION = "preparation.lock"
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class InUse(UsageError):
    """Another process holds the lock of the folder."""


_held: dict[Path, int] = {}  # lock files that this process holds, with their descriptors


def lock_folder(folder: Path, name: str = TRAINING) -> None:
    """Hold the lock of a folder until this process ends; calling it again changes nothing.

    Raises:
        InUse: another process holds it; the message names the process.
        UsageError: the folder cannot be locked.
    """
    file = folder.resolve() / name
    if file in _held:
        return
    opened = _lock(file)
    if opened is None:
        return
    if not _held:
        atexit.register(release_all, os.getpid())
    _held[file] = opened
    since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    with suppress(OSError):  # the lock also holds on a full disk
        os.ftruncate(opened, 0)
        holder = f"process {os.getpid()} on {socket.gethostname()}, since {since}"
        os.write(opened, holder.encode())


def tell(note: str) -> None:
    """Add a note to what this process's locks say of it."""
    for opened in _held.values():
        with suppress(OSError):
            os.write(opened, f", {note}".encode())


def check_free(folder: Path, name: str = TRAINING) -> None:
    """Raise InUse if another process holds the lock of the folder; does not acquire it."""
    file = folder.resolve() / name
    if file not in _held and os.path.lexists(file):
        opened = _lock(file)
        if opened is not None:
            os.close(opened)


def _lock(file: Path) -> int | None:
    """The locked file's descriptor; None, with a warning, if the file system has no locks."""
    while True:
        try:
            opened = open_descriptor(file, os.O_RDWR)
        except OSError as error:
            raise UsageError(f"{file} cannot be written: {error.strerror}") from None
        try:
            fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(opened, 1000, 0).decode("utf-8", "replace").strip()
            os.close(opened)
            if error.errno in _UNSUPPORTED:
                print(
                    f"warning: {file.parent} is on a file system without locks: make sure that no "
                    "other run saves there",
                    file=sys.stderr,
                    flush=True,
                )
                return None
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise UsageError(f"{file} cannot be locked: {error.strerror}") from None
            raise InUse(
                f"{file.parent} is in use by another run ({holder or 'it does not say which'}): wait "
                "for it or stop it, or choose another folder (--save-dir of fairseq-train, --run-dir or "
                "--data-dir of the scripts)"
            ) from None
        # A process that ends removes its lock file, perhaps after we opened it.
        if _is_same(opened, file):
            return opened
        os.close(opened)


def _is_same(opened: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(opened), file.stat())
    except FileNotFoundError:
        return False


def unlock_folder(folder: Path, name: str = TRAINING) -> None:
    """Release a lock before this process ends; does nothing if it does not hold it."""
    file = folder.resolve() / name
    if file in _held:
        _release(file, _held.pop(file))


def _release(file: Path, opened: int) -> None:
    if _is_same(opened, file):
        with suppress(OSError):  # such as a file system that has become read-only
            file.unlink(missing_ok=True)
    os.close(opened)


def release_all(owner: int) -> None:
    """Remove the lock files at exit. A killed process leaves its file, which locks nothing."""
    if os.getpid() != owner:
        return  # a forked process holds no lock
    for file, opened in _held.items():
        _release(file, opened)
    _held.clear()
