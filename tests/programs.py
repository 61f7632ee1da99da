"""Programs forked from a warm process (warm.py): as in a process of their own, seconds sooner.

As a program, this file starts one for bash: ``programs.py ADDRESS PROGRAM [ARGUMENT...]``.
"""

import atexit
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

WARM = Path(__file__).with_name("warm.py")


class Program:
    """One that has been started: its ``pid``. Where nobody refers to it any more, it is killed.

    Args:
        request: what ``warm.py`` is to run.
        files: descriptors of its standard input, output and error output.
    """

    def __init__(self, address: str, request: dict, files: tuple[int, int, int]):
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(address)
        content = json.dumps(request).encode() + b"\n"
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
    """A warm process, there from the first program on, which has imported "torch" or "fairseq"."""

    def __init__(self, imports: str):
        self.imports = imports
        self.process = None
        self.folder = None

    @property
    def address(self) -> str:
        if self.process is None:
            self._open()
        return f"{self.folder.name}/socket"

    def start(self, arguments, environment, folder, files, function=None) -> Program:
        """A program by its path, ``-c`` and what Python is to do, or a function: (file, name)."""
        request = {"arguments": arguments, "environment": environment, "folder": str(folder)}
        address = self.address
        try:
            # What Python reads from the environment at its start, it has read: so it has to be the same.
            return Program(address, request | {"function": function}, files)
        except ConnectionError as error:
            raise AssertionError(Path(f"{self.folder.name}/log").read_text()) from error

    def _open(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="warm-")
        atexit.register(self.close)
        log = open(f"{self.folder.name}/log", "w")
        with log, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{self.folder.name}/socket")
            listener.listen(64)
            self.process = subprocess.Popen(
                [sys.executable, str(WARM), self.imports, str(listener.fileno())],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[listener.fileno()],
            )

    def close(self) -> None:
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()
        self.folder.cleanup()


def main(address: str, *arguments: str) -> int:
    request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    status = Program(address, request | {"function": None}, (0, 1, 2)).wait()
    return 128 - status if status < 0 else status  # as shells say which signal it was


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
