"""When one process of a run ends early, the others end too: at once, and with a message.

Sharded experts need every process in every pass. A collective call whose partner is gone may wait for
many minutes; so each process keeps a connection to the first one, and whose connection breaks before it
has said that it is done, has crashed.
"""

import os
import secrets
import socket
import sys
import threading
import time
from urllib.parse import urlparse

import torch.distributed as dist

from smoe_fairseq.distributed.agree import from_first
from smoe_fairseq.system import lock
from smoe_fairseq.system.errors import UsageError

_DONE, _FAILED = "done", "failed"
_LONGEST = 1 << 16  # bytes of a line
_lifeline = None


def _line(connection: socket.socket, seconds: float | None = None) -> str:
    """What is there up to the end of a line, and nothing behind it: that is for the next who reads."""
    line, end = b"", time.monotonic() + (seconds or 0)
    while not line.endswith(b"\n") and len(line) < _LONGEST:
        if seconds is not None:
            connection.settimeout(max(0.01, end - time.monotonic()))
        if not (letter := connection.recv(1)):
            break
        line += letter
    return line.decode()


class Lifeline:
    """Connections from all processes to the first; a thread of each waits for news on them.

    Args:
        address: host of the first process, as the others can reach it; None: by its own name.

    Raises:
        OSError: not all processes have found the first one within a minute.
    """

    def __init__(self, rank: int, world_size: int, address: str | None):
        self.rank = rank
        self.world_size = world_size
        self.finished = False
        self.others: dict[int, socket.socket] = {}
        self.lock = threading.Lock()
        offer = None
        if rank == 0:
            server = _listening_socket(world_size)
            offer = (socket.gethostname(), server.getsockname()[1], secrets.token_hex(16))
        host, port, token = from_first(offer)
        if rank == 0:
            self._accept(server, token)
        else:
            self._connect(address or host, port, token)
        os.register_at_fork(after_in_child=self._let_go)
        for other, connection in self.others.items():
            threading.Thread(target=self._listen, args=(other, connection), daemon=True).start()

    def _accept(self, server: socket.socket, token: str) -> None:
        server.settimeout(60)
        while len(self.others) < self.world_size - 1:
            try:
                connection, _ = server.accept()
            except TimeoutError:
                missing = sorted(set(range(1, self.world_size)) - set(self.others))
                raise OSError(f"processes {missing} have not come") from None
            try:
                found, rank = _line(connection, seconds=10).split()
                known = secrets.compare_digest(found, token)
            except (OSError, ValueError, TypeError):  # the last for letters that no token has
                continue
            if known:  # anyone else who knocks is left outside
                connection.settimeout(None)
                self.others[int(rank)] = connection
        server.close()

    def _connect(self, address: str, port: int, token: str) -> None:
        connection = socket.create_connection((address, port), timeout=60)
        connection.sendall(f"{token} {self.rank}\n".encode())
        connection.settimeout(None)
        self.others[0] = connection

    def _let_go(self) -> None:
        """In a forked process, such as one that loads data: its copies would keep connections open."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        for connection in self.others.values():
            os.dup2(nowhere, connection.fileno())

    def _listen(self, other: int, connection: socket.socket) -> None:
        _notice_silence(connection)
        try:
            word, _, reason = _line(connection).strip().partition(" ")
        except (OSError, ValueError):
            word = reason = ""
        if word == _DONE:
            return
        if not reason:
            reason = f"process {other} of {self.world_size} has ended without a word"
        with self.lock:
            if self.finished:
                return
            self._tell_all(f"{_FAILED} {reason}")
            print(f"error: {reason}; process {self.rank} stops too", file=sys.stderr, flush=True)
            lock.release_all(os.getpid())  # which os._exit leaves out
            # The main thread may wait in a collective call, where no exception reaches it.
            os._exit(1)

    def _tell_all(self, line: str) -> None:
        for connection in self.others.values():
            try:
                connection.sendall(f"{line}\n".encode())
            except OSError:
                pass  # it is the one that has ended

    def close(self, reason: str = "") -> None:
        """Says that this process is done, or why it fails."""
        with self.lock:
            if not self.finished:
                self.finished = True
                self._tell_all(f"{_FAILED} {reason}" if reason else _DONE)


def _listening_socket(backlog: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        address = ("", 0)
        return socket.create_server(
            address, family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
        )
    return socket.create_server(("", 0), backlog=backlog)


def _notice_silence(connection: socket.socket) -> None:
    """A machine that has lost power closes no connection; after some seconds without an answer we do."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def start(cfg) -> None:
    """Of fairseq's ``cfg`` the way to the first process is read; once per process."""
    global _lifeline
    if _lifeline is None and dist.is_initialized() and dist.get_world_size() > 1:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        try:
            _lifeline = Lifeline(rank, world_size, _address(cfg.distributed_training))
        except OSError as error:
            raise UsageError(f"process {rank} has no way to the others: {error}") from None


def close(reason: str = "") -> None:
    """Says to the others that this process is done, or why it fails."""
    if _lifeline is not None:
        _lifeline.close(reason)


def _address(distributed) -> str | None:
    method = urlparse(distributed.distributed_init_method or "")
    if method.scheme == "tcp":
        return method.hostname
    return os.environ.get("MASTER_ADDR") or None
