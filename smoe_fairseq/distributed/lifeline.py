"""When one process of a run ends early, the others end too: at once, and with a message.

Sharded experts need every process in every pass. A collective call whose partner is gone may wait for
many minutes; so each process keeps a connection to the first one, and whose connection breaks before it
has said that it is done, has crashed.
"""

import functools
import os
import secrets
import socket
import sys
import threading
from types import ModuleType
from urllib.parse import urlparse

import torch.distributed as dist

from smoe_fairseq.distributed.options import check_options

_DONE, _FAILED = "done", "failed"
_lifeline = None


class Lifeline:
    """Connections from all processes to the first; a thread of each waits for news on them.

    Args:
        address: host of the first process, as the others can reach it.
    """

    def __init__(self, rank: int, world_size: int, address: str):
        self.rank = rank
        self.world_size = world_size
        self.finished = False
        self.others: dict[int, socket.socket] = {}
        self.lock = threading.Lock()
        offer = [None]
        if rank == 0:
            server = socket.create_server(("", 0), backlog=world_size)
            offer = [(server.getsockname()[1], secrets.token_hex(16))]
        dist.broadcast_object_list(offer, src=0)
        port, token = offer[0]
        if rank == 0:
            self._accept(server, token)
        else:
            self._connect(address, port, token)
        for other, connection in self.others.items():
            threading.Thread(target=self._listen, args=(other, connection), daemon=True).start()

    def _accept(self, server: socket.socket, token: str) -> None:
        server.settimeout(60)
        while len(self.others) < self.world_size - 1:
            connection, _ = server.accept()
            connection.settimeout(10)
            try:
                found, rank = connection.makefile().readline().split()
            except (OSError, ValueError):
                continue
            if secrets.compare_digest(found, token):  # anyone else who knocks is left outside
                connection.settimeout(None)
                self.others[int(rank)] = connection
        server.close()

    def _connect(self, address: str, port: int, token: str) -> None:
        connection = socket.create_connection((address, port), timeout=60)
        connection.sendall(f"{token} {self.rank}\n".encode())
        connection.settimeout(None)
        self.others[0] = connection

    def _listen(self, other: int, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        try:
            word, _, reason = connection.makefile().readline().strip().partition(" ")
        except OSError:
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


def start(cfg) -> None:
    """Of fairseq's ``cfg`` the way to the first process is read; once per process."""
    global _lifeline
    if _lifeline is None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        try:
            _lifeline = Lifeline(rank, world_size, _address(cfg.distributed_training))
        except OSError as error:
            raise SystemExit(f"error: process {rank} cannot reach process 0: {error}") from None


def _address(distributed) -> str:
    method = urlparse(distributed.distributed_init_method or "")
    if method.scheme == "tcp":
        return method.hostname
    return os.environ.get("MASTER_ADDR", "localhost")


def end_together(utils: ModuleType) -> None:
    """Closes the lifeline when ``fairseq-train`` ends in this process, well or not."""
    original = utils.distributed_main

    @functools.wraps(original)
    def distributed_main(*arguments, **options):
        reason = ""
        cfg = options.get("cfg", arguments[2] if len(arguments) > 2 else None)
        if getattr(getattr(cfg, "model", None), "expert_parallel", False):
            check_options(cfg)  # before fairseq wraps anything
        try:
            return original(*arguments, **options)
        except BaseException as error:
            words = str(error).strip().partition("\n")[0].removeprefix("error: ")
            reason = f"process {dist.get_rank() if dist.is_initialized() else '?'} has ended: "
            reason += words or type(error).__name__
            raise
        finally:
            if _lifeline is not None:
                _lifeline.close(reason)

    utils.distributed_main = distributed_main
