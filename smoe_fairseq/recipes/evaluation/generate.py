"""Several processes of fairseq-generate side by side, each of which translates one direction after another.

A process is the step ``generator``: it reads lines of standard input, each a JSON list of arguments of
``fairseq-generate``, and prints `DONE` after each. It loads the model once.
"""

import functools
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes.processes import environment, report, step, whole_number
from smoe_fairseq.recipes.training.launcher import divide_cpu, launch, visible_gpus

DONE = "done"
POLL_SECONDS = 0.5
_IMPORTS = 1 << 29  # bytes that a process takes without a checkpoint
_SENTENCE = re.compile(r"(?:fairseq-generate: )?error: (.*)")  # argparse's and ours


def serve() -> None:
    """The step ``generator``, until standard input ends."""
    # Only jobs and answers go through the pipes; what fairseq prints goes to standard error, the log.
    # Forked data-loading processes close standard input, which would block while a thread reads it.
    lines, nowhere = os.fdopen(os.dup(0)), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        jobs: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        threading.Thread(target=_receive, args=(lines, jobs), daemon=True).start()
        from fairseq import checkpoint_utils
        from fairseq_cli import generate

        checkpoint_utils.load_model_ensemble = _once(checkpoint_utils.load_model_ensemble)
        while True:
            sys.argv = ["fairseq-generate", *jobs.get()]
            generate.cli_main()
            print(DONE, file=answers, flush=True)


def _receive(lines: TextIO, jobs: queue.SimpleQueue) -> None:
    for line in lines:
        jobs.put(json.loads(line))
    os._exit(1)  # the parent has closed the pipe, or has ended


def _once(load: Callable) -> Callable:
    """fairseq's ``load_model_ensemble`` with a cache: the same files give the same models.

    Generation changes a model (half precision, the GPU, ``prepare_for_inference_``), but doing so again has
    no effect. Loading also sets the state of the task, and every direction has a new task.
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


@dataclass(frozen=True)
class Place:
    """``processes`` with ``threads`` each, spread over ``gpus`` or, without any, on the CPU."""

    processes: int
    gpus: tuple[str, ...]
    threads: int

    def __str__(self) -> str:
        each = "1 process" if self.processes == 1 else f"{self.processes} processes"
        if self.gpus:
            return f"{each} on {len(self.gpus)} GPU{'s' if len(self.gpus) > 1 else ''}"
        return f"{each} on the CPU, {self.threads} thread{'s' if self.threads > 1 else ''} each"

    def environment(self, number: int) -> dict[str, str]:
        """The environment variables of a process."""
        threads = {"OMP_NUM_THREADS": str(self.threads)}
        gpu = self.gpus[number % len(self.gpus)] if self.gpus else ""
        return threads | environment() | {"CUDA_VISIBLE_DEVICES": gpu}


def place(checkpoint: Path, jobs: int, left: int, extra: Sequence[str]) -> Place:
    """Where to translate, by ``GPUS`` and ``JOBS``, when ``left`` of all ``jobs`` are not done.

    On the CPU there are as many processes as cores and memory allow, and the cores are divided among them
    unless ``OMP_NUM_THREADS`` is set. The number of threads is that for all jobs, since the last digits of
    a score may depend on it.

    Raises:
        UsageError: ``GPUS`` or ``JOBS`` is no number, or there are fewer GPUs.
    """
    where = launch(extra)
    if not where.cpu:
        gpus = tuple(visible_gpus(where.gpus))
        return Place(min(left, whole_number("JOBS", least=1) or len(gpus)), gpus, 1)
    processes, threads = divide_cpu(2 * (_IMPORTS + checkpoint.stat().st_size), most=jobs)
    return Place(min(left, processes), (), threads)


def translated(where: Place, folder: Path, jobs: dict[str, Sequence[str]]) -> Iterator[str | None]:
    """Yield each direction as soon as it is translated, and None twice a second in between.

    Args:
        folder: gets the processes' output as ``process-N.log``.
        jobs: the arguments of ``fairseq-generate`` by direction, in the order in which to start them.

    Raises:
        UsageError: a process failed; with its own error message if it had one.
    """
    workers, idle = [], queue.SimpleQueue()

    def translate(direction: str) -> tuple[str, _Worker, bool]:
        worker = idle.get()
        done = worker.translate(jobs[direction])
        idle.put(worker)
        return direction, worker, done

    threads = ThreadPoolExecutor(where.processes)
    try:
        for number in range(where.processes):
            log = folder / f"process-{number}.log"
            workers.append(_Worker(where.environment(number), log))
            idle.put(workers[-1])
        running = {threads.submit(translate, direction) for direction in jobs}
        while running:
            ended, running = wait(running, POLL_SECONDS, FIRST_COMPLETED)
            if not ended:
                yield None
            for direction, worker, done in (future.result() for future in ended):
                if not done:
                    raise worker.failure(direction)
                yield direction
        for worker in workers:
            worker.warn()
    finally:
        for worker in workers:
            worker.end()
        threads.shutdown(cancel_futures=True)


class _Worker:
    def __init__(self, variables: dict[str, str], log: Path):
        self.log = log
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                ["bash", "-c", step("generator")],
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
            )

    def translate(self, arguments: Sequence[str]) -> bool:
        """Returns whether the process did it; otherwise the process has ended."""
        with suppress(OSError, ValueError):  # its pipes are closed
            self.process.stdin.write(f"{json.dumps(arguments)}\n".encode())
            self.process.stdin.flush()
            return self.process.stdout.readline().decode().strip() == DONE
        return False

    def failure(self, direction: str) -> UsageError:
        status = self.process.wait()
        said = self.log.read_text("utf-8", "replace").splitlines()
        sentences = [found[1] for line in said if (found := _SENTENCE.match(line))]
        if sentences:
            return UsageError(sentences[-1])
        print("\n".join(said[-20:]), file=sys.stderr, flush=True)
        # A signal's number, as Python or as a shell reports it.
        number = -status if status < 0 else status - 128
        if number in set(signal.Signals):
            ended = f"was stopped by {signal.Signals(number).name}"
            if number == signal.SIGKILL:
                ended += ", as the system does where memory runs out: set JOBS to fewer processes"
        else:
            ended = f"failed with exit status {status}"
        return UsageError(
            f"the translation of {direction} {ended}; what it said last is above, and all of it in {self.log}"
        )

    def warn(self) -> None:
        """Repeat the warnings that it printed."""
        said = self.log.read_text("utf-8", "replace").splitlines()
        for line in dict.fromkeys(line for line in said if line.startswith("warning: ")):
            report(line.removeprefix("warning: "))

    def end(self) -> None:
        with suppress(BrokenPipeError):
            self.process.stdin.close()  # this ends the process, also below a shell
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
