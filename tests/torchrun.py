"""In torchrun's place: forks the ranks of one machine from a warm process (programs.py), seconds sooner.

``torchrun.py ADDRESS SCRIPTS [OPTION...] --nproc-per-node N --no-python PROGRAM [ARGUMENT...]``. Like
torchrun it passes on what it is sent, and ends all ranks when one has failed.
"""

import os
import signal
import socket
import sys
from contextlib import suppress

sys.path.insert(0, os.path.dirname(__file__))

from programs import Program


def main(address: str, scripts: str, *words: str) -> int:
    count = int(words[words.index("--nproc-per-node") + 1])
    program, *arguments = words[words.index("--no-python") + 1 :]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
    request = {"arguments": [f"{scripts}/{program}", *arguments], "function": None}
    request["folder"] = os.getcwd()
    ranks: list[Program] = []

    def end_all(number: int, _frame=None) -> None:
        for rank in ranks:
            with suppress(ProcessLookupError):
                if rank.status is None:
                    os.kill(rank.pid, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end_all)
    for rank in range(count):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        environment = {**os.environ, **common, **own}
        ranks.append(Program(address, request | {"environment": environment}, (0, 1, 2)))
    failed = 0
    while None in (statuses := [rank.wait(0.02) for rank in ranks]):
        if not failed and any(statuses):
            failed = 1
            end_all(signal.SIGTERM)
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
