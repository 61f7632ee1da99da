"""Several fairseq-generate side by side."""

import functools
import json
import os
import queue
import re
import selectors
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from smoe_fairseq.errors import UsageError
from smoe_fairseq.host_memory import machine_memory
from smoe_fairseq.recipes.processes import (
    command,
    cores,
    environment,
    launch,
    report,
    visible_gpus,
    whole_number,
)

DONE = "done"


def serve() -> None:
    """Until there are no more lines."""
    # The pipes are for jobs and answers alone: all that is printed goes to the log, and the processes that
    # are forked to load data close standard input, which they could not do while a thread waits at it.
    lines, nowhere = os.fdopen(os.dup(0)), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        jobs: queue.SimpleQueue[list[str] | None] = queue.SimpleQueue()
        threading.Thread(target=_receive, args=(lines, jobs), daemon=True).start()
        from fairseq import checkpoint_utils
        from fairseq_cli import generate

        checkpoint_utils.load_model_ensemble = _once(checkpoint_utils.load_model_ensemble)
        while (arguments := jobs.get()) is not None:
            sys.argv = ["fairseq-generate", *arguments]
            generate.cli_main()
            print(DONE, file=answers, flush=True)


def _receive(lines: TextIO, jobs: queue.SimpleQueue) -> None:
    for line in lines:
        if not line.strip():
            jobs.put(None)
            return
        jobs.put(json.loads(line))
    os._exit(1)  # Nobody is there to take what a long translation would end in.


def _once(load: Callable) -> Callable:
    """fairseq's ``load_model_ensemble``, which for the same files gives the same models again.

    What generation does to a model, half precision, the GPU, ``prepare_for_inference_``, it does once: a
    second time changes nothing. Of the task, which is new for every direction, loading sets the state.
    """
    loaded = {}

    @functools.wraps(load)
    def load_model_ensemble(filenames, arg_overrides=None, task=None, *more, **options):
        key = repr((filenames, arg_overrides, more, sorted(options.items())))
        if key not in loaded:
            found = load(filenames, arg_overrides, task, *more, **options)
            loaded[key] = (found, task and task.state_dict())
        found, state = loaded[key]
        if state:
            task.load_state_dict(state)
        return found

    return load_model_ensemble


# Processes that translate one direction after another: one per GPU, or ``JOBS`` of them.

POLL_SECONDS = 0.5
_IMPORTS = 1 << 29  # bytes that a process has before it loads a checkpoint, in round numbers

_SENTENCE = re.compile(r"(?:fairseq-generate: )?error: (.*)")  # argparse's and ours


@dataclass(frozen=True)
class Job:
    """A direction and the arguments of ``fairseq-generate`` for it."""

    direction: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """``processes`` of ``threads`` each, on ``gpus`` in turn or, without, on the CPU."""

    processes: int
    gpus: tuple[str, ...]
    threads: int

    def __str__(self) -> str:
        each = "1 process" if self.processes == 1 else f"{self.processes} processes"
        if self.gpus:
            return f"{each} on {len(self.gpus)} GPU{'s' if len(self.gpus) > 1 else ''}"
        return f"{each} on the CPU, {self.threads} thread{'s' if self.threads > 1 else ''} each"

    def environment(self, number: int) -> dict[str, str]:
        """Of one of the processes."""
        threads = {"OMP_NUM_THREADS": str(self.threads)}
        gpu = self.gpus[number % len(self.gpus)] if self.gpus else ""
        return threads | environment() | {"CUDA_VISIBLE_DEVICES": gpu}


def place(checkpoint: Path, jobs: int, left: int, extra: Sequence[str]) -> Place:
    """From ``GPUS`` and ``JOBS``, for so many ``jobs``, of which some are ``left`` to do.

    Threads are as many as for all jobs, since the last digits of a score may depend on them.

    On the CPU there are as many processes as it has cores and as memory allows, the cores divided among
    them, unless ``OMP_NUM_THREADS`` says otherwise.

    Raises:
        UsageError: they are no numbers, or there are fewer GPUs.
    """
    where = launch(extra)
    asked = whole_number("JOBS", least=1, default=None)
    if not where.cpu:
        gpus = tuple(visible_gpus(where.gpus))
        return Place(min(left, asked or len(gpus)), gpus, 1)
    fit = (machine_memory() or 1 << 62) // (2 * (_IMPORTS + checkpoint.stat().st_size))
    processes = min(jobs, asked or max(1, min(cores(), fit)))
    return Place(min(left, processes), (), max(1, cores() // processes))


class Pool:
    """The processes, started at once; at the end, whatever that is, there are none left.

    What they print goes to ``process-N.log`` in ``folder``.
    """

    def __init__(self, where: Place, folder: Path):
        line = command("python", "-m", "smoe_fairseq.recipes", "generator")
        self.selector = selectors.DefaultSelector()
        self.workers = []
        for number in range(where.processes):
            worker = _Worker(line, where.environment(number), folder / f"process-{number}.log")
            self.workers.append(worker)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.selector.close()
        for worker in self.workers:
            worker.end()

    def finished(self, jobs: Sequence[Job]) -> Iterator[Job | None]:
        """Each job as soon as it is done, and None twice a second.

        Raises:
            UsageError: a process has ended before it was told to, with its own sentence where it had one.
        """
        waiting = deque(jobs)
        for worker in self.workers:
            self._give(worker, waiting)
        while self.selector.get_map():
            ready = self.selector.select(POLL_SECONDS)
            if not ready:
                yield None
            for key, _ in ready:
                job = key.data.answer()
                self._give(key.data, waiting)  # before anything else: a GPU is waiting
                yield job
        for worker in self.workers:
            worker.warn()

    def _give(self, worker: "_Worker", waiting: deque[Job]) -> None:
        """The next job, if there is one; a process without is not listened to any more."""
        output = worker.process.stdout
        if worker.job is not None:
            self.selector.unregister(output)
        worker.give(waiting.popleft() if waiting else None)
        if worker.job is not None:
            self.selector.register(output, selectors.EVENT_READ, worker)


class _Worker:
    def __init__(self, line: str, environment: dict[str, str], log: Path):
        self.log = log
        self.job: Job | None = None
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                ["bash", "-c", line],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
            )

    def give(self, job: Job | None) -> None:
        """None: there are no more, and it ends."""
        self.job = job
        line = json.dumps(job.arguments) if job else ""
        with suppress(BrokenPipeError):  # It has ended, which is what its answer will be.
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()

    def answer(self) -> Job:
        """The job that is done."""
        if self.process.stdout.readline().decode().strip() == DONE:
            return self.job
        raise self._failure(self.process.wait())

    def _failure(self, status: int) -> UsageError:
        said = self.log.read_text("utf-8", "replace").splitlines()
        sentences = [found[1] for line in said if (found := _SENTENCE.match(line))]
        if sentences:
            return UsageError(sentences[-1])
        print("\n".join(said[-20:]), file=sys.stderr, flush=True)
        # As a shell says which signal it was, or as Python does.
        number = -status if status < 0 else status - 128
        if number in set(signal.Signals):
            ended = f"was stopped by {signal.Signals(number).name}"
            if number == signal.SIGKILL:
                ended += ", as the system does where memory runs out: set JOBS to fewer processes"
        else:
            ended = f"failed with exit status {status}"
        return UsageError(
            f"the translation of {self.job.direction} {ended}; what it said "
            f"last is above, and all of it in {self.log}"
        )

    def warn(self) -> None:
        """What it said that the user should hear."""
        said = self.log.read_text("utf-8", "replace").splitlines()
        for line in dict.fromkeys(line for line in said if line.startswith("warning: ")):
            report(line.removeprefix("warning: "))

    def end(self) -> None:
        with suppress(BrokenPipeError):
            self.process.stdin.close()  # At this it ends by itself, also where it is not bash's own process.
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
