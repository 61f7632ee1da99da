"""A file that appears under its name only when it is complete.

Kept free of torch and of fairseq, as is all that the mends share with the rest of the package.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from smoe_fairseq.system.errors import UsageError


@contextmanager
def whole_file(path: Path | str) -> Iterator[str]:
    """The name to write to, beside ``path``; at the end it takes the place of ``path`` in one step.

    Raises:
        UsageError: it cannot be written (disk full, say): one sentence. What ``path`` was before, it is
            still, and nothing is left beside it.
    """
    partial = f"{path}.tmp"  # as fairseq calls it
    try:
        yield partial
        with open(partial, "rb") as file:
            os.fsync(file.fileno())  # a renamed file without its content is worse than none
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:
        reason = reason_of(error)
        if reason is None:
            raise
        raise UsageError(
            f"{path} cannot be saved: {reason}; files saved before are as they were"
        ) from None
    finally:
        with suppress(OSError):
            os.unlink(partial)


def reason_of(error: BaseException | None) -> str | None:
    """What the system says of a file; torch hides it behind a RuntimeError about its own archive."""
    while error is not None:
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        error = error.__cause__ or error.__context__
    return None
