"""The port over which torchrun's machines find one another: ``MASTER_ADDR`` and ``MASTER_PORT``.

Where another program has that port, torchrun takes it for the first machine's torchrun and waits for its
answer: for minutes, and a stack trace, or for ever. So it is looked at before.
"""

import os
import socket
import threading
from datetime import timedelta

from smoe_fairseq.system.errors import UsageError

PATIENCE = 5  # seconds in which a torchrun answers


def endpoint() -> tuple[str, int]:
    """Address and port, the same on all machines; a port that is none is a `UsageError`."""
    port = os.environ.get("MASTER_PORT") or "29500"
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UsageError(f"MASTER_PORT={port}: expected a port, a number from 1 to 65535")
    return os.environ.get("MASTER_ADDR") or "localhost", int(port)


def check_port() -> None:
    """Raise UsageError where a program that is no torchrun has the port on this machine."""
    address, port = endpoint()
    if _is_taken(address, port) and not _is_torchruns(address, port):
        raise_if_taken()


def raise_if_taken() -> None:
    """Raise UsageError where any program has it, when none of this run's should."""
    address, port = endpoint()
    if _is_taken(address, port):
        raise UsageError(
            f"MASTER_PORT {port} is in use by another program on this machine: set MASTER_PORT to a free "
            "port, the same on all machines"
        )


def _is_taken(address: str, port: int) -> bool:
    """Whether this machine is the one that has the address, and somebody listens on the port."""
    if not _is_here(address):
        return False
    everywhere = {"family": socket.AF_INET6, "dualstack_ipv6": True}
    try:
        with socket.create_server(("", port), **everywhere if socket.has_dualstack_ipv6() else {}):
            return False
    except OSError:
        return True


def _is_here(address: str) -> bool:
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, place in found:
        try:
            with socket.socket(family, kind, protocol) as own:
                own.bind(place)
                return True
        except OSError:
            continue
    return False


def _is_torchruns(address: str, port: int) -> bool:
    """Such as that of a second "machine" on this one, started before."""
    from torch.distributed import TCPStore

    answered, asked = [], threading.Event()

    def ask() -> None:
        try:
            limit = timedelta(seconds=PATIENCE)
            TCPStore(address, port, is_master=False, timeout=limit, wait_for_workers=False)
            answered.append(True)
        except RuntimeError:
            pass
        finally:
            asked.set()

    # torch's limit is not that of a silent program's answer: such a thread is left behind.
    threading.Thread(target=ask, daemon=True).start()
    asked.wait(PATIENCE + 1)
    return bool(answered)
