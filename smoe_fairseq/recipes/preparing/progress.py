"""How far a step is: a bar at a terminal, now and then a line in a log."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

_SECONDS = 30  # between two lines of a log


@contextmanager
def progress(step: str, total: int) -> Iterator[Callable[[int], None]]:
    """Gives ``advance(bytes)``, of ``total`` bytes of work; shown on standard error."""
    if sys.stderr.isatty():
        with tqdm(total=total, desc=step, unit="B", unit_scale=True, leave=False) as bar:
            yield bar.update
        return
    done, said = 0, time.monotonic()

    def advance(size: int) -> None:
        nonlocal done, said
        done += size
        if time.monotonic() - said >= _SECONDS:
            said = time.monotonic()
            print(
                f"{step}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB", file=sys.stderr, flush=True
            )

    yield advance
