"""Files and folders that appear under their names only when they are complete, or not at all.

Kept free of torch and of fairseq, as is all that the mends share with the rest of the package.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from smoe_fairseq.system.errors import UsageError

_OURS = ".smoe"  # in the names of what is beside a file or folder for a while: nobody else's


def _beside(path: str) -> str:
    """Where to write: beside the file, or to what is no file that could be replaced, such as /dev/null."""
    return path if _is_special(path) else f"{path}{_OURS}.tmp"  # ends as fairseq's


def _is_special(path: str) -> bool:
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


@contextmanager
def whole_files(paths: Iterable[Path | str], called: str | None = None) -> Iterator[list[str]]:
    """The names to write to, beside ``paths``; at the end they take the places of all of them.

    Args:
        called: how the sentence of an error calls them, such as ``--output out``; by default the first one's
            name.

    Raises:
        UsageError: they cannot be written (disk full, say): one sentence. What was there before is there
            still, and nothing is left beside it.
    """
    pairs = [(_beside(path), path) for path in map(os.fspath, paths)]
    partials = [partial for partial, _ in pairs]
    replacing = [(partial, path) for partial, path in pairs if partial != path]
    try:
        yield partials
        for partial, _ in replacing:
            _bring_to_disk(partial)
        for partial, path in replacing:
            os.replace(partial, path)
    except (OSError, RuntimeError) as error:
        raise _refusal(error, called or pairs[0][1], partials) from None
    finally:
        for partial, _ in replacing:
            with suppress(OSError):
                os.unlink(partial)


@contextmanager
def whole_file(path: Path | str, called: str | None = None) -> Iterator[str]:
    """The same of one file."""
    with whole_files([path], called) as (partial,):
        yield partial


def write_whole(path: Path | str, content: str | bytes, called: str | None = None) -> None:
    """Puts a file of this content (UTF-8) in the place of ``path``; raises as `whole_files` does."""
    with whole_file(path, called) as partial, open(partial, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)


def put_in_place(partial: Path, path: Path) -> None:
    """Of a file that is kept for another attempt as long as it is not complete; an OSError passes."""
    _bring_to_disk(partial)
    os.replace(partial, path)


@contextmanager
def whole_folder(folder: Path, replace: bool = False, called: str | None = None) -> Iterator[Path]:
    """A folder to write to, beside ``folder``; at the end it is ``folder``, after an error it is gone.

    Args:
        replace: whether there may be a folder already, which stays until the new one is complete.
        called: as in `whole_files`.

    Raises:
        UsageError: it is there already, or cannot be written.
    """
    called = called or str(folder)
    if not replace:
        refuse_existing(folder, called)
    if folder.is_symlink():  # which it stays
        folder = Path(os.path.realpath(folder))
    partial, old = (
        folder.with_name(f"{folder.name}{_OURS}.{suffix}") for suffix in ("partial", "old")
    )
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        for file in partial.rglob("*"):
            if file.is_file():
                _bring_to_disk(file)
        _exchange(partial, folder, old)
    except (OSError, RuntimeError) as error:
        raise _refusal(error, called, [str(partial)]) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _exchange(partial: Path, folder: Path, old: Path) -> None:
    """A folder can take the place of another one, unlike a file, only when that has been moved away."""
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    try:
        os.replace(partial, folder)
    except OSError:
        if old.exists():
            os.replace(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def refuse_existing(folder: Path, called: str) -> None:
    """One sentence before the work, rather than after it."""
    if folder.exists():
        raise UsageError(f"{called} exists already: name a folder that does not")


def reason_of(error: BaseException | None) -> str | None:
    """What the system says of a file; torch hides it behind a RuntimeError about its own archive."""
    while error is not None:
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        error = error.__cause__ or error.__context__
    return None


def _bring_to_disk(path: Path | str) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())  # a renamed file without its content is worse than none


def _refusal(error: Exception, called: str, partials: list[str]) -> Exception:
    """The sentence; or the error itself where it is no file of ours that the system speaks of."""
    reason = reason_of(error)
    if reason is None or not _speaks_of(error, partials):
        return error
    return UsageError(f"{called} cannot be saved: {reason}; files saved before are as they were")


def _speaks_of(error: Exception, partials: list[str]) -> bool:
    """Whether an error names one of these, or a folder of theirs; a failed write names no file at all."""
    names = {getattr(error, name, None) for name in ("filename", "filename2")} - {None}
    if not names:
        return True
    named = [Path(os.path.abspath(name)) for name in names if isinstance(name, str | os.PathLike)]
    for partial in (Path(os.path.abspath(partial)) for partial in partials):
        for name in named:
            if name == partial or name in partial.parents or partial in name.parents:
                return True
    return False
