"""The parts of a check, most important first, and how they run: each in a forked process until the time is
over, the right ones side by side first. Results are printed and written as JSON lines as soon as they are
there, so an interruption keeps them.
"""

import importlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.forked import Forked
from benchmarks.gpu.report import line_of

MARK = "gpu-check-result "  # a line of a part's output that is one of its results
CORES_EACH = 2  # of parts that run side by side


@dataclass(frozen=True)
class Part:
    """A part runs in its own process, which is ended after ``seconds``.

    Attributes:
        function: ``module:name`` of a generator function of this package. It takes a `Context` and
            yields a dict per result: ``case``, ``ok`` (None if it only measures) and measurements.
        least: the part is not started with fewer seconds left than this.
    """

    name: str
    function: str
    seconds: int
    about: str
    least: int = 5

    @property
    def group(self) -> str:
        return self.name.split("-")[0]

    @property
    def alone(self) -> bool:
        """Whether it measures times and has to run alone."""
        return self.group != "right"

    def run(self, context: "Context") -> Iterator[dict]:
        module, name = self.function.split(":")
        return getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name)(context)


@dataclass(frozen=True)
class Context:
    """Where a part runs: ``device`` is "cuda", or "cpu" for a rehearsal with tiny sizes."""

    device: str
    folder: str  # of its own, for data and checkpoints
    out: str = ""  # the check's folder, for files beside the report

    @property
    def tiny(self) -> bool:
        return self.device == "cpu"


PARTS = (
    Part("right-block", "right:block", 90, "block with every gate and option against plain loops"),
    Part("right-precision", "training:precision", 90, "fp16, bf16, --amp with a forced overflow"),
    Part("right-options", "training:options", 60, "a CPU's update, activation checkpointing"),
    Part("right-generate", "training:generate", 60, "translations equal to the CPU's"),
    Part("right-compile", "right:compiled", 90, "torch.compile against the block as it is"),
    Part("right-ranks", "training:ranks", 120, "one and two ranks: equal, resumed, resharded"),
    Part("fast-update", "update:update", 120, "updates of smoe_transformer_base, and their phases"),
    Part("fast-block", "fast:block", 90, "block over its bare products: time, memory, host waits"),
    Part("fast-decode", "update:decode", 60, "tokens per second of fairseq-generate"),
    Part("fast-peers", "fast:peers", 60, "other packages' layers that are installed, and ours"),
    Part("whole-demo", "training:demo", 240, "the training of `make demo`", least=20),
    Part("whole-study", "training:study", 86400, "Multi30k's study at base size", least=60),
)


def choose(names: Iterable[str]) -> tuple[Part, ...]:
    """The parts with these names or of these groups ("right"); all for none.

    Raises:
        ValueError: a name fits no part.
    """
    names = set(names)
    known = {name for part in PARTS for name in (part.name, part.group)}
    for name in sorted(names - known):
        parts = ", ".join(part.name for part in PARTS)
        raise ValueError(f"--parts {name}: no such part or group; there are {parts}")
    return tuple(p for p in PARTS if not names or {p.name, p.group} & names)


def rounds(parts: Sequence[Part], cores: int | None = None) -> list[list[Part]]:
    """What runs side by side: the right parts, as many as the cores allow, then each other part alone."""
    width = max(1, (cores or os.cpu_count()) // CORES_EACH)
    right = [part for part in parts if not part.alone]
    together = [right[i : i + width] for i in range(0, len(right), width)]
    return together + [[part] for part in parts if part.alone]


def plan(parts: Sequence[Part], seconds: float, cores: int | None = None) -> Iterator[tuple]:
    """Each part with its seconds, 0 if it only runs in the time that others leave."""
    for round_ in rounds(parts, cores):
        limits = [min(part.seconds, seconds) for part in round_]
        limits = [0 if n < part.least else n for part, n in zip(round_, limits, strict=True)]
        yield from zip(round_, limits, strict=True)
        seconds -= max(limits)


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
    run: Callable[[Part], Iterator[dict]],
    cores: int | None = None,
) -> list[dict]:
    """Runs the parts within ``seconds``; their results, and one of each part, also go to ``results``.

    The result of a part itself has a ``status``: "done", "failed" (its process ended with an error),
    "time limit" or "no time" (not started).

    Args:
        run: yields a part's results; called in the part's process.
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
                call = partial(_print_results, run, part)
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


def _print_results(run: Callable, part: Part) -> None:
    for result in run(part):
        print(MARK + json.dumps(result), flush=True)


def _follow(part: Part, forked: Forked, limit: float, keep: Callable[[dict], None]) -> None:
    """Keep the results of a part's process as they come, then the part's status."""
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
