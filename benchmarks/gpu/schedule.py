"""Runs parts one after the other, each in a process of its own, until the time is over.

Results are written to a file of JSON lines as soon as they are there: an interruption keeps them.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.gpu.parts import Part

MARK = "gpu-check-result "  # a line of a part's output that is one of its results


def emit(result: dict) -> None:
    """Hands a result of a part to the schedule."""
    print(MARK + json.dumps(result), flush=True)


def command_of(part: Part, device: str, folder: Path, seconds: float) -> list[str]:
    words = ["--device", device, "--out", str(folder), "--part", part.name]
    return [sys.executable, "-m", "benchmarks.gpu", *words, "--minutes", str(seconds / 60)]


def plan(parts: Sequence[Part], seconds: float) -> list[tuple[Part, float]]:
    """The seconds set aside for each part, most important first; in total at most ``seconds``.

    0 for a part that runs only in the time that the others leave.
    """
    found = []
    for part in parts:
        limit = min(part.seconds, seconds)
        limit = 0 if limit < part.least else limit
        found.append((part, limit))
        seconds -= limit
    return found


def announce(parts: Sequence[Part], seconds: float) -> str:
    """What will run and for how long at most, a line per part."""
    lines = []
    for part, limit in plan(parts, seconds):
        time_of = f"at most {limit:.0f} s" if limit else "in the time that the others leave"
        lines.append(f"  {part.name}: {part.about} ({time_of})")
    return "\n".join(lines)


def run_all(
    parts: Sequence[Part],
    seconds: float,
    results: Path,
    command: Callable[[Part, float], list[str]],
) -> list[dict]:
    """Runs the parts within ``seconds``; their results, and one of each part, also go to ``results``.

    The result of a part itself has ``status``: "done", "failed" (its process ended with an error),
    "time limit" or "no time" (not started).
    """
    end = time.monotonic() + seconds
    found = []
    with results.open("w") as file:

        def keep(result: dict) -> None:
            found.append(result)
            file.write(json.dumps(result) + "\n")
            file.flush()
            os.fsync(file.fileno())

        for part in parts:
            left = end - time.monotonic()
            if left < part.least:
                keep({"part": part.name, "status": "no time"})
                continue
            limit = min(part.seconds, left)
            print(f"{part.name}: {part.about} (at most {limit:.0f} s)", flush=True)
            start = time.monotonic()
            status, words = run_one(part, command(part, limit), limit, keep)
            took = round(time.monotonic() - start, 1)
            said = {} if status == "done" else {"output": words[-1500:]}
            keep({"part": part.name, "status": status, "seconds": took, **said})
            print(f"  {status} after {took} s", flush=True)
    return found


def run_one(
    part: Part, command: list[str], limit: float, keep: Callable[[dict], None]
) -> tuple[str, str]:
    """Status and output of a part's process. It is ended with all that it started at ``limit``."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    over = threading.Event()

    def stop() -> None:
        over.set()
        end_group(process)

    timer = threading.Timer(limit, stop)
    timer.start()
    lines = []
    try:
        for line in process.stdout:
            if line.startswith(MARK):
                keep({"part": part.name, **json.loads(line.removeprefix(MARK))})
            else:
                lines.append(line)
        process.wait()
    finally:
        timer.cancel()
        end_group(process)
        process.wait()
    status = "time limit" if over.is_set() else "failed" if process.returncode else "done"
    return status, "".join(lines)


def end_group(process: subprocess.Popen) -> None:
    """Ends a process that leads a group, and whatever of the group is left."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
