"""Is a checkpoint file sound? Asked before anything is made of it, by fairseq's commands and by ``smoe``.

Kept free of torch and of fairseq: the mends and ``smoe_fairseq.checkpoint`` both open files by it.
"""

import os
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from smoe_fairseq.system.errors import UsageError

_CHUNK = 1 << 20  # bytes
_ARCHIVE = b"PK"  # how a zip archive begins: torch's format since 1.6
_LEGACY = b"\x80"  # how a pickle begins: the one before, which has no checksums
# How torch names a type that it refuses, since 2.6.
_REFUSED = re.compile(
    r"GLOBAL (\S+) was not an allowed|GLOBAL (\S+) whose module|got <class '([^']+)'>"
)
_LONGEST = 100  # letters of a type's name that are shown
_sound = set()  # files that this process has found to be so, by path and state


class UnreadableCheckpoint(UsageError):
    """One sentence that names the file and says what is wrong with it."""


class CutOffCheckpoint(UnreadableCheckpoint):
    """The file is of no use to anyone."""


class InaccessibleCheckpoint(UnreadableCheckpoint):
    """The system does not hand the file out; it may well be sound."""


class RefusedCheckpoint(UnreadableCheckpoint):
    """It holds more than data, and building that could run a program of the file's."""


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Checks a checkpoint, then lets it be read; whatever is wrong with it is an UnreadableCheckpoint.

    A missing file stays a FileNotFoundError.
    """
    try:
        if Path(path).exists():  # not one that fairseq fetches from elsewhere
            check_sums(path)
        yield
    except FileNotFoundError:
        raise
    except pickle.UnpicklingError as error:
        raise RefusedCheckpoint(_refusal(path, str(error))) from None
    except (EOFError, OSError, RuntimeError, zipfile.BadZipFile) as error:
        if isinstance(error, OSError) and error.strerror:
            raise InaccessibleCheckpoint(f"{path} cannot be read: {error.strerror}") from None
        raise CutOffCheckpoint(f"{path} is cut off or not a checkpoint") from None


def check_content(path: Path | str, state) -> None:
    """Raise UnreadableCheckpoint unless the parts that every checkpoint of fairseq has are of their kinds."""
    kinds = {"model": Mapping, "optimizer_history": list, "extra_state": Mapping, "cfg": Mapping}
    if not isinstance(state, Mapping) or "model" not in state:
        raise UnreadableCheckpoint(f"{path} is not a checkpoint of fairseq")
    for part, kind in kinds.items():
        if part == "cfg" and state.get(part) is None:
            continue  # older ones have args in its place
        if part in state and not isinstance(state[part], kind):
            raise UnreadableCheckpoint(
                f"{path} is not a checkpoint of fairseq: {part} in it is of another kind"
            )
    position = state.get("extra_state", {}).get("train_iterator", {})
    epoch = position.get("epoch", 1) if isinstance(position, Mapping) else None
    if not isinstance(epoch, int) or epoch < 1:
        raise UnreadableCheckpoint(
            f"{path} is not a checkpoint of fairseq: train_iterator in it is of another kind"
        )
    if state.get("cfg") is None and state.get("args") is None:
        raise UnreadableCheckpoint(
            f"{path} does not say of what model it is: neither cfg nor args is in it"
        )


def _refusal(path: Path | str, words: str) -> str:
    """One sentence for torch's several, which go on to say how to have the file run its program."""
    found = _REFUSED.search(words)
    name = next(filter(None, found.groups())) if found else ""
    name = name.removeprefix("builtins.")  # which torch 2.6 says and newer ones leave out
    if name.isprintable() and 0 < len(name) <= _LONGEST:  # else it is made to be printed
        what = f"{name} (a type or function)"
    else:
        what = "more than data"
    return (
        f"{path} holds {what}, which is not loaded since it could run a program; expected tensors, "
        "numbers, text, and lists and dictionaries of them"
    )


def is_archive(path: Path | str) -> bool:
    """Whether it is in torch's format since 1.6, which has checksums and can be left on disk."""
    with open(path, "rb") as file:
        return file.read(len(_ARCHIVE)) == _ARCHIVE


def check_sums(path: Path | str) -> None:
    """Compares each part of a checkpoint with the checksum (CRC-32) that torch has written beside it.

    torch does not look at these: changed bytes of a tensor (a failing disk or memory, a broken
    transfer) would be trained on and copied without a word. It costs reading the file once more, at
    1 to 2 GB/s beside the disk's own time, and once in a process for a file that stays as it is.
    """
    state = os.stat(path)
    known = (os.path.realpath(path), state.st_ino, state.st_size, state.st_mtime_ns)
    if known in _sound:
        return
    with open(path, "rb") as file:
        start = file.read(2)
        if start[:1] == _LEGACY:
            return
        if start != _ARCHIVE:
            raise zipfile.BadZipFile
        part = None
        try:
            with zipfile.ZipFile(file) as archive:
                for part in archive.infolist():
                    with archive.open(part) as content:
                        while content.read(_CHUNK):
                            pass
        except OSError:
            raise
        except (
            Exception
        ):  # what the archive's tables lead to once they are damaged is of many kinds
            if part is None:
                raise zipfile.BadZipFile from None
            raise UnreadableCheckpoint(
                f"{path} is damaged: {part.filename} in it does not match its checksum; take another copy "
                "of the file, or another checkpoint"
            ) from None
    _sound.add(known)
