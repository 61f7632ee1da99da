"""Progress of long work: a bar at a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable, Collection, Iterator, Sized
from contextlib import contextmanager

from tqdm import tqdm

_REPORT_SECONDS = 30  # between two lines


@contextmanager
def progress(step: str, total: int, unit: str = "B") -> Iterator[Callable[[int], None]]:
    """Yield ``advance(number)``: it shows a bar at a terminal, and prints a line now and then elsewhere."""
    start = reported = time.monotonic()
    done, size, name = 0, *((1e6, "MB") if unit == "B" else (1, unit))
    with tqdm(
        total=total,
        desc=step,
        unit=f" {unit}" if size == 1 else unit,
        unit_scale=size > 1,
        leave=False,
        disable=not sys.stderr.isatty(),
    ) as bar:

        def advance(number: int) -> None:
            nonlocal done, reported
            done += number
            bar.update(number)
            if bar.disable and (now := time.monotonic()) - reported >= _REPORT_SECONDS:
                reported, rest = now, duration((now - start) * (total - done) / max(done, 1))
                words = f"{step}: {done / size:,.0f} of {total / size:,.0f} {name} | {rest} left"
                print(words, file=sys.stderr, flush=True)

        yield advance


def with_progress(step: str, batches: Collection[Sized]) -> Iterator[Sized]:
    """The batches of sentences, with the progress of what is done with them."""
    with progress(step, sum(map(len, batches)), "sentences") as advance:
        for batch in batches:
            yield batch
            advance(len(batch))


def duration(seconds: float) -> str:
    """Such as 40 s, 3 min 20 s or 5 h 07 min."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    minutes, seconds = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"
