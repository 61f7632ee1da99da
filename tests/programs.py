"""Programs forked from a warm process (warm.py): as in a process of their own, seconds sooner.

As a program, this file starts one for bash: ``programs.py ADDRESS PROGRAM [ARGUMENT...]``; it passes signals
on.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WARM = Path(__file__).with_name("warm.py")
HANGS = 300  # seconds after which a test says that something hangs; a busy machine needs a tenth


def wait_until(happens, process=None) -> None:
    """Until ``happens()``; fails at once if ``process``, which is to cause it, has ended."""
    deadline = time.monotonic() + HANGS
    while not happens():
        assert process is None or process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def started(command, folder: Path, environment=None, **more) -> subprocess.Popen:
    """A program whose outputs are read together, as text."""
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(list(map(str, command)), cwd=folder, env=environment, **both, **more)


def path_with(folder: Path, bodies: dict[str, str]) -> str:
    """PATH in which programs in bash, made in ``folder``, stand before this environment's."""
    folder.mkdir()
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)
    return os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])


class Program:
    """One that has been started: its ``pid``. Where nobody refers to it any more, it is killed.

    Args:
        request: what ``warm.py`` is to run; paths in it are sent as text.
        files: descriptors of its standard input, output, error output, and of more that it is to hold.

    Raises:
        ConnectionError: the process that it is forked from has ended.
    """

    def __init__(self, address: str, request: dict, files: tuple[int, ...]):
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(address)
        content = json.dumps(request, default=str).encode() + b"\n"
        sent = socket.send_fds(self.connection, [content], files)
        self.connection.sendall(content[sent:])
        self.received = b""
        self.status: int | None = None
        self.pid = self._number(None)

    def wait(self, seconds: float | None = None) -> int | None:
        """Its exit status, negative where a signal ended it; None where it has not ended by then."""
        if self.status is None:
            self.status = self._number(seconds)
        return self.status

    def _number(self, seconds: float | None) -> int | None:
        while b"\n" not in self.received:
            if not select.select([self.connection], [], [], seconds)[0]:
                return None
            content = self.connection.recv(100)
            if not content:
                raise ConnectionError("the process that programs are forked from has ended")
            self.received += content
        line, _, self.received = self.received.partition(b"\n")
        return int(line)


class Server:
    """A warm process, there from the first program on.

    Args:
        parent: the one that it is forked from; None: it is the first.
        function: name of what it does in ``warm.py`` before it forks programs.
    """

    def __init__(self, parent: "Server | None", function: str):
        self.parent = parent
        self.function = function
        self.folder: tempfile.TemporaryDirectory | None = None

    @property
    def address(self) -> str:
        if self.folder is None:
            self._open()
        return f"{self.folder.name}/socket"

    def start(self, arguments, environment, folder, files, function=None) -> Program:
        """A program by its path, ``-c`` and what Python is to do, or a function: (file, name).

        What Python reads from the environment at its start it has read: that has to be the same.

        Raises:
            ConnectionError: the process has ended; with its last words.
        """
        address = self.address
        request = {"arguments": arguments, "environment": environment, "folder": str(folder)}
        try:
            return Program(address, request | {"function": function}, files)
        except ConnectionError:
            raise ConnectionError(Path(f"{self.folder.name}/log").read_text()) from None

    def _open(self) -> None:
        if self.parent is not None:
            self.parent.address  # noqa: B018  (so that it is closed after this one)
        self.folder = tempfile.TemporaryDirectory(prefix="warm-")
        reading, self.control = os.pipe()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (
            open(f"{self.folder.name}/log", "w+") as log,
            open(reading) as control,
            socket.socket(socket.AF_UNIX) as listener,
        ):
            listener.bind(f"{self.folder.name}/socket")
            listener.listen(64)
            if self.parent is None:
                self.process = subprocess.Popen(
                    [sys.executable, str(WARM), str(listener.fileno())],
                    env=environment,
                    stdin=control,
                    stdout=log,
                    stderr=log,
                    pass_fds=[listener.fileno()],
                )
            else:
                files = (control.fileno(), log.fileno(), log.fileno(), listener.fileno())
                function = (str(WARM), self.function)
                self.process = self.parent.start([], environment, os.getcwd(), files, function)
        atexit.register(self.close)

    def close(self) -> None:
        os.close(self.control)
        self.process.wait()
        self.folder.cleanup()


def main(address: str, *arguments: str) -> int:
    request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    program = Program(address, request | {"function": None}, (0, 1, 2))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(program.pid, number))
    status = program.wait()
    return 128 - status if status < 0 else status  # as shells say which signal it was


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
