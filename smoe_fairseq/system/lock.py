"""One run at a time in a folder: a file that a process has locked for as long as it lives.

It is a POSIX record lock (``fcntl.lockf``): the kernel gives it back however the process ends, NFS servers
know it and keep it for clients on other machines, and a process that is forked to load data does not have
it, so that a killed run leaves none behind. (``flock`` has neither of the last two everywhere.) Its one
trap is that closing any descriptor of the file loses it: here it is opened in one place, once.

Light, without torch: the recipes take one too.
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

from smoe_fairseq.system.errors import UsageError

TRAINING, RECIPE, EVALUATION = "training.lock", "recipe.lock", "evaluation.lock"
PREPARATION = "preparation.lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class InUse(UsageError):
    """Another process holds the folder."""


_held: dict[Path, int] = {}  # this process's, with their descriptors


def take(folder: Path, name: str = TRAINING) -> None:
    """Holds the folder until this process ends; a second call of the same process changes nothing.

    Raises:
        InUse: another process holds it; it is named.
        UsageError: it cannot be locked.
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
    with suppress(OSError):  # on a full disk it is locked all the same
        os.ftruncate(opened, 0)
        holder = f"process {os.getpid()} on {socket.gethostname()}, since {since}\n"
        os.write(opened, holder.encode())


def check_free(folder: Path, name: str = TRAINING) -> None:
    """Raise InUse where another process holds the folder; nothing is kept."""
    file = folder.resolve() / name
    if file not in _held and file.exists():
        opened = _lock(file)
        if opened is not None:
            os.close(opened)


def _lock(file: Path) -> int | None:
    """The locked file's descriptor; None where its file system knows no locks, which the user is told."""
    while True:
        try:
            opened = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise UsageError(f"{file} cannot be written: {error.strerror}") from None
        try:
            fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(opened, 1000, 0).decode("utf-8", "replace").strip()
            os.close(opened)
            if error.errno in _NO_LOCKS:
                print(
                    f"warning: {file.parent} is on a file system without locks: see to it that no "
                    "other run saves there",
                    file=sys.stderr,
                    flush=True,
                )
                return None
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise UsageError(f"{file} cannot be locked: {error.strerror}") from None
            raise InUse(
                f"{file.parent} is in use by another run ({holder or 'it does not say which'}): wait "
                "for it or stop it, or choose another folder (--save-dir of fairseq-train, RUN_DIR or "
                "DATA_DIR of the scripts)"
            ) from None
        # A process that ends removes its file, perhaps between our opening it and our locking it.
        if _is(opened, file):
            return opened
        os.close(opened)


def _is(opened: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(opened), file.stat())
    except FileNotFoundError:
        return False


def release(folder: Path, name: str = TRAINING) -> None:
    """What this process holds, before its end; nothing where it holds nothing."""
    file = folder.resolve() / name
    if file in _held:
        _release(file, _held.pop(file))


def _release(file: Path, opened: int) -> None:
    if _is(opened, file):
        file.unlink(missing_ok=True)
    os.close(opened)


def release_all(owner: int) -> None:
    """At the end, no file is left that looks like a lock; a killed process leaves one, without effect."""
    if os.getpid() != owner:
        return  # a forked one, which holds none
    for file, opened in _held.items():
        _release(file, opened)
    _held.clear()
