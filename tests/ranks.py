"""Runs of several processes, as torchrun makes them, within a second instead of ten.

A server process imports fairseq once; every rank is forked from it, and runs ``fairseq-train``, or a
function of a test file, with torchrun's environment. Unlike under torchrun nobody ends the other ranks
when one has failed, so what a test sees is our own doing. A few tests use torchrun itself.
"""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

from smoe_fairseq.system import lock

PLUGIN = Path(__file__).parents[1] / "smoe_fairseq"


class Run:
    """One rank's process each: ``pids``, and ``logs`` with what they print."""

    def __init__(self, pids: list[int], logs: list[Path]):
        self.pids = pids
        self.logs = logs
        self.started = time.monotonic()

    def output(self, rank: int | None = None) -> str:
        logs = self.logs if rank is None else [self.logs[rank]]
        return "\n".join(log.read_text() for log in logs)

    def statuses(self) -> list[int | None]:
        """Exit status of each rank, -9 where SIGKILL ended it; None where it still runs."""
        files = [log.with_suffix(".status") for log in self.logs]
        return [int(f.read_text() or "0") if f.exists() else None for f in files]

    def wait(self, seconds: float = 120) -> list[int]:
        """The exit statuses once all have ended; kills them and fails at the deadline."""
        deadline = time.monotonic() + seconds
        while None in (statuses := self.statuses()):
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"{statuses} after {seconds} s:\n{self.output()[-4000:]}")
            time.sleep(0.01)
        return statuses

    def finish(self) -> "Run":
        statuses = self.wait()
        assert set(statuses) == {0}, f"{statuses}\n{self.output()[-6000:]}"
        return self

    def kill(self, ranks=None) -> None:
        for rank in range(len(self.pids)) if ranks is None else ranks:
            if self.statuses()[rank] is None:
                os.kill(self.pids[rank], signal.SIGKILL)


class Server:
    """The process that ranks are forked from."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, folder: Path, world_size: int, *arguments, function=None, one=False) -> Run:
        """``fairseq-train`` with ``arguments`` on so many ranks, or ``function(*arguments)``.

        ``one``: without torchrun's environment, a run of one process.
        """
        folder.mkdir(parents=True, exist_ok=True)
        number = len(list(folder.glob("*.rank0.log")))
        logs = [folder / f"{number}.rank{rank}.log" for rank in range(world_size)]
        request = {
            "arguments": [str(a) if function is None else a for a in arguments],
            "function": function and [function.__code__.co_filename, function.__name__],
            "logs": [str(log) for log in logs],
            "port": None if one else free_port(),
        }
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return Run(json.loads(self.process.stdout.readline()), logs)

    def train(self, folder: Path, world_size: int, *flags, **options) -> Run:
        return self.start(folder, world_size, *flags, **options).finish()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(60)  # on a busy machine Python takes its time to end


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _rank(request: dict, rank: int) -> int:
    """In a forked process: becomes one rank, and returns its exit status."""
    with open(request["logs"][rank], "w", buffering=1) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if request["port"]:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(request["port"]))
        os.environ.update(
            WORLD_SIZE=str(len(request["logs"])), RANK=str(rank), LOCAL_RANK=str(rank)
        )
    try:
        if request["function"] is None:
            from fairseq_cli.train import cli_main

            sys.argv = ["fairseq-train", *request["arguments"]]
            cli_main()
        else:
            file, name = request["function"]
            sys.path.insert(0, str(Path(file).parent))
            spec = importlib.util.spec_from_file_location(Path(file).stem, file)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            getattr(module, name)(*request["arguments"])
        return 0
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return 1 if isinstance(ended.code, str) else ended.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        lock.release_all(os.getpid())  # os._exit leaves out what Python does at the end
        sys.stdout.flush()
        sys.stderr.flush()


def _watch(request: dict, rank: int) -> None:
    """In a forked process: runs one rank in a child, and writes down how it ended."""
    child = os.fork()
    if child == 0:
        os._exit(_rank(request, rank))
    os.write(3, f"{child}\n".encode())
    os.close(3)
    _, status = os.waitpid(child, 0)
    file = Path(request["logs"][rank]).with_suffix(".status")
    file.with_suffix(".partial").write_text(str(os.waitstatus_to_exitcode(status)))
    os.replace(file.with_suffix(".partial"), file)


def _serve() -> None:
    from argparse import Namespace

    import fairseq.utils
    import fairseq_cli.train  # noqa: F401

    fairseq.utils.import_user_module(Namespace(user_dir=str(PLUGIN)))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        request = json.loads(line)
        pids = []
        for rank in range(len(request["logs"])):
            reading, writing = os.pipe()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                if writing != 3:
                    os.dup2(writing, 3)
                os.set_inheritable(3, False)
                _watch(request, rank)
                os._exit(0)
            os.close(writing)
            with os.fdopen(reading) as pipe:
                pids.append(int(pipe.readline()))
        print(json.dumps(pids), flush=True)


if __name__ == "__main__":
    _serve()
