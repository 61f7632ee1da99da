"""Runs of several processes, as torchrun makes them, within a second instead of ten.

Every rank is forked (programs.py), and runs ``fairseq-train``, or a function of a test file, with torchrun's
environment. Unlike under torchrun nobody ends the other ranks when one has failed, so what a test sees is our
own doing. A few tests use torchrun itself.
"""

import os
import signal
import socket
import sys
import time
from pathlib import Path

from commands import SCRIPTS, TORCH, WITH_PLUGIN, server_of
from programs import HANGS, Program, Server


class Run:
    """One rank's process each: ``pids``, and ``logs`` with what they print."""

    def __init__(self, programs: list[Program], logs: list[Path]):
        self.programs = programs
        self.pids = [program.pid for program in programs]
        self.logs = logs

    def output(self, rank: int | None = None) -> str:
        logs = self.logs if rank is None else [self.logs[rank]]
        return "\n".join(log.read_text() for log in logs)

    def statuses(self) -> list[int | None]:
        """Exit status of each rank, -9 where SIGKILL ended it; None where it still runs."""
        return [program.wait(0) for program in self.programs]

    def wait(self, seconds: float = HANGS) -> list[int]:
        """The exit statuses once all have ended; kills them and fails at the deadline."""
        deadline = time.monotonic() + seconds
        for program in self.programs:
            program.wait(max(0, deadline - time.monotonic()))
        statuses = self.statuses()
        if None in statuses:
            self.kill()
            raise AssertionError(f"{statuses} after {seconds} s:\n{self.output()[-4000:]}")
        return statuses

    def finish(self) -> "Run":
        statuses = self.wait()
        assert set(statuses) == {0}, f"{statuses}\n{self.output()[-6000:]}"
        return self

    def refused(self, *named) -> str:
        """The first rank's last line: all have ended with status 1, it by one sentence with these words."""
        assert set(self.wait()) == {1} and "Traceback" not in self.output(), self.output()[-4000:]
        last = self.output(0).strip().splitlines()[-1]
        assert last.startswith("error: ") and all(str(each) in last for each in named), last
        return last

    def kill(self) -> None:
        for program in self.programs:
            if program.wait(0) is None:
                os.kill(program.pid, signal.SIGKILL)


class Ranks:
    """Starts runs."""

    def start(
        self,
        folder: Path,
        world_size: int,
        *arguments,
        command="fairseq-train",
        function=None,
        program=None,
        one=False,
    ) -> Run:
        """A command with ``arguments`` on so many ranks, ``function(*arguments)``, or ``python -c``.

        program: what Python is to do, before which nothing of fairseq has been imported.
        one: without torchrun's environment, a run of one process.
        """
        folder.mkdir(parents=True, exist_ok=True)
        number = len(list(folder.glob("*.rank0.log")))
        logs = [folder / f"{number}.rank{rank}.log" for rank in range(world_size)]
        environments = [{**os.environ, "OMP_NUM_THREADS": "1"} for _ in logs]
        if not one:
            port = str(free_port())
            for rank, environment in enumerate(environments):
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                environment |= {"WORLD_SIZE": str(world_size), "RANK": str(rank)}
                environment |= {"LOCAL_RANK": str(rank)}
        if function is not None:
            function = (function.__code__.co_filename, function.__name__)
            return _run(WITH_PLUGIN, logs, environments, arguments, function)
        words = [str(word) for word in arguments]
        if program is not None:
            return _run(TORCH, logs, environments, ["-c", program, *words])
        words = [str(SCRIPTS / command), *words]
        return _run(server_of(words), logs, environments, words)

    def train(self, folder: Path, world_size: int, *flags, **options) -> Run:
        return self.start(folder, world_size, *flags, **options).finish()


def fairseq_train(arguments: list) -> None:
    """``fairseq-train`` in this process, where a test has changed what it is to change."""
    from fairseq_cli.train import cli_main

    sys.argv = ["fairseq-train", *map(str, arguments)]
    cli_main()


def train_with(before_batch, arguments: list) -> None:
    """``fairseq-train`` in which ``before_batch(updates)`` is called before each batch of training."""
    from fairseq.tasks.translation import TranslationTask

    original = TranslationTask.train_step

    def train_step(self, *others, **options):
        before_batch(options["update_num"])
        return original(self, *others, **options)

    TranslationTask.train_step = train_step
    fairseq_train(arguments)


def _run(server: Server, logs, environments, arguments, function=None) -> Run:
    programs = []
    for log, environment in zip(logs, environments, strict=True):
        with open(os.devnull) as nothing, open(log, "w") as output:
            files = (nothing.fileno(), output.fileno(), output.fileno())
            programs.append(server.start(arguments, environment, os.getcwd(), files, function))
    return Run(programs, logs)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
