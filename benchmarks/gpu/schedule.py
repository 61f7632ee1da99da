"""Runs parts, each in a forked process, until the time is over: the right ones side by side first.

Results are printed and written to a file of JSON lines as soon as they are there: an interruption keeps
them.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks.forked import Forked
from benchmarks.gpu.parts import Part
from benchmarks.gpu.report import line_of

MARK = "gpu-check-result "  # a line of a part's output that is one of its results
CORES_EACH = 2  # of parts that run side by side


def rounds(parts: Sequence[Part], cores: int | None = None) -> list[list[Part]]:
    """What runs side by side: the right parts, as many as the cores allow, then each other part alone."""
    width = max(1, (cores or os.cpu_count()) // CORES_EACH)
    right = [part for part in parts if not part.alone]
    together = [right[i : i + width] for i in range(0, len(right), width)]
    return together + [[part] for part in parts if part.alone]


def plan(parts: Sequence[Part], seconds: float, cores: int | None = None) -> Iterator[tuple]:
    """(part, seconds set aside for it), at most ``seconds`` one after the other in total.

    0 for a part that runs only in the time that the others leave.
    """
    for round_ in rounds(parts, cores):
        limits = [min(part.seconds, seconds) for part in round_]
        limits = [0 if n < part.least else n for part, n in zip(round_, limits, strict=True)]
        yield from zip(round_, limits, strict=True)
        seconds -= max(limits)


def announce(parts: Sequence[Part], seconds: float, cores: int | None = None) -> str:
    """What will run and for how long at most, a line per part."""
    lines = []
    for part, limit in plan(parts, seconds, cores):
        time_of = f"at most {limit:.0f} s" if limit else "in the time that the others leave"
        lines.append(f"  {part.name}: {part.about} ({time_of})")
    return "\n".join(lines)


def run_all(
    parts: Sequence[Part],
    seconds: float,
    results: Path,
    run: Callable[[Part, float], Iterator[dict]],
    cores: int | None = None,
) -> list[dict]:
    """Runs the parts within ``seconds``; their results, and one of each part, also go to ``results``.

    The result of a part itself has ``status``: "done", "failed" (its process ended with an error),
    "time limit" or "no time" (not started).

    Args:
        run: yields the results of a part that has so many seconds, in a process of its own.
    """
    end = time.monotonic() + seconds
    found, lock = [], threading.Lock()
    with results.open("w") as file:

        def keep(result: dict) -> None:
            with lock:
                found.append(result)
                file.write(json.dumps(result) + "\n")
                file.flush()
                os.fsync(file.fileno())
                print(line_of(result), flush=True)

        for round_ in rounds(parts, cores):
            started = []
            for part in round_:
                limit = min(part.seconds, end - time.monotonic())
                if limit < part.least:
                    keep({"part": part.name, "status": "no time"})
                    continue
                # Forked before any thread of this round begins.
                call = partial(_print_results, run, part, limit)
                started.append((part, Forked(call, leads=True), limit, keep))
            try:
                threads = [threading.Thread(target=_follow, args=args) for args in started]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            finally:  # after an interruption, too
                for _, forked, *_ in started:
                    forked.kill()
    return found


def _print_results(run: Callable, part: Part, seconds: float) -> None:
    for result in run(part, seconds):
        print(MARK + json.dumps(result), flush=True)


def _follow(part: Part, forked: Forked, limit: float, keep: Callable[[dict], None]) -> None:
    """Keep the results of a part's process as they come, and then that of the part."""
    start = time.monotonic()
    others = []
    for line in forked.lines(limit):
        if line.startswith(MARK):
            keep({"part": part.name, **json.loads(line.removeprefix(MARK))})
        else:
            others.append(line)
    status = "time limit" if not forked.in_time else "failed" if forked.status else "done"
    took = round(time.monotonic() - start, 1)
    output = {} if status == "done" else {"output": "\n".join(others)[-1500:]}
    keep({"part": part.name, "status": status, "seconds": took, **output})
