"""A folder that appears under its name only when it is complete."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from smoe_fairseq.system.errors import UsageError


def refuse_existing(folder: Path) -> None:
    """One sentence before the work, rather than after it."""
    if folder.exists():
        raise UsageError(f"--output {folder} exists already: name a folder that does not")


@contextmanager
def complete_folder(folder: Path) -> Iterator[Path]:
    """A folder to write to, which is renamed to ``folder`` at the end, or removed after an error."""
    refuse_existing(folder)
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"--output {folder} cannot be made: {error.strerror}") from None
    try:
        yield partial
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
