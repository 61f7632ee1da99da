"""How a process forks others for its clients: the part of warm.py that knows nothing of fairseq."""

import ctypes
import gc
import json
import os
import selectors
import signal
import socket
import sys
import weakref
from contextlib import suppress

PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


def serve(listener: int) -> dict | None:
    """From now on this process only forks; in each child the call returns what a client has asked for.

    In the process itself it returns at its end: None, once its own input has ended and all children have.

    Args:
        listener: descriptor of the socket that clients connect to. A client sends one line of JSON and,
            with it, the child's files: standard input, output, error output, and what it is to hold besides.
            It is told the child's pid and how it ended; where the client is gone, the child is killed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    control = os.dup(0)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    # Each child would take back at its end what modules have set up, torch 175 libraries, for most of what a
    # small program computes.
    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False
    gc.collect()
    gc.freeze()  # so that children do not touch, and the system not copy, the memory of all modules
    gc.enable()
    return _Server(socket.socket(fileno=listener), control).serve()


class _Server:
    def __init__(self, listener: socket.socket, control: int):
        self.children: dict[int, tuple[int, socket.socket]] = {}  # (pid, client), by descriptor
        self.ready = selectors.DefaultSelector()
        self.listener = listener
        self.ready.register(listener, selectors.EVENT_READ, self.start)
        self.ready.register(control, selectors.EVENT_READ, self.close)
        self.request = None
        self.closed = False

    def serve(self) -> dict | None:
        while not self.closed or self.children:
            for key, _ in self.ready.select():
                key.data(key.fileobj)
                if self.request is not None:
                    return self.request
        return None

    def start(self, listener: socket.socket) -> None:
        client, _ = listener.accept()
        try:
            request, files = _received(client)
        except ConnectionError:
            client.close()
            return
        if pid := os.fork():
            with suppress(OSError):  # the client was killed meanwhile, which `abandon` will hear
                client.sendall(f"{pid}\n".encode())
            child = os.pidfd_open(pid)
            self.children[child] = (pid, client)
            self.ready.register(child, selectors.EVENT_READ, self.tell)
            self.ready.register(client, selectors.EVENT_READ, self.abandon)
        else:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # so none is left behind
            for number in range(3):
                os.dup2(files[number], number)
            inherited = [key.fileobj for key in self.ready.get_map().values()]
            self.ready.close()
            for file in (*inherited, client):
                os.close(file) if isinstance(file, int) else file.close()
            self.request = request | {"held": files[3:]}
            files = files[:3]
        for file in files:
            os.close(file)

    def tell(self, child: int) -> None:
        pid, client = self.children.pop(child)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self.ready.unregister(child)
        os.close(child)
        if client in self.ready.get_map():
            self.ready.unregister(client)
        try:
            client.sendall(f"{status}\n".encode())
        except OSError:
            pass  # it has not waited
        client.close()

    def abandon(self, client: socket.socket) -> None:
        """After its request a client says nothing more, so it has gone."""
        if client.fileno() < 0:
            return  # its program has ended too, which `tell` heard in the same moment
        self.ready.unregister(client)
        for pid, other in self.children.values():
            if other is client:
                os.kill(pid, signal.SIGKILL)

    def close(self, control: int) -> None:
        self.closed = True
        self.ready.unregister(control)
        self.ready.unregister(self.listener)
        os.close(control)
        self.listener.close()


def _received(client: socket.socket) -> tuple[dict, list[int]]:
    """What a client asks for.

    Raises:
        ConnectionError: it has gone before it said it all, as some do that a test kills.
    """
    content, files, _, _ = socket.recv_fds(client, 2**16, 4)
    while not content.endswith(b"\n"):
        more = client.recv(2**16)
        if not more:
            for file in files:
                os.close(file)
            raise ConnectionError
        content += more
    return json.loads(content), files
