"""What programs are forked from outlives them (programs.py, forking.py)."""

import os
import select
import signal
from pathlib import Path

from commands import TORCH
from programs import Server


def test_a_program_ends_while_its_client_goes(tmp_path):
    """The server hears both at once: it neither forgets its other clients nor ends."""
    server = Server(TORCH, "import_torch")
    output = os.open(tmp_path / "output", os.O_CREAT | os.O_RDWR)

    def start(code):
        return server.start(["-c", code], dict(os.environ), tmp_path, (0, output, output))

    program = start("import time; time.sleep(100)")
    os.kill(server.process.pid, signal.SIGSTOP)
    ended = os.pidfd_open(program.pid)
    os.kill(program.pid, signal.SIGKILL)
    select.select([ended], [], [])
    os.close(ended)
    program.connection.close()
    os.kill(server.process.pid, signal.SIGCONT)
    try:
        assert start("print('as before')").wait(100) == 0
    finally:
        server.close()
        os.close(output)
    assert Path(tmp_path / "output").read_text() == "as before\n"
