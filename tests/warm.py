"""A process that programs and ranks are forked from: it has made their imports, which takes seconds.

A child runs what a client (programs.py) asks for, with the client's arguments, environment, folder and
open files. Beyond imports of other packages nothing is there before it starts, neither of fairseq's commands
nor of the plugin, and at its end it is gone: no run can tell what others did.
"""

import argparse
import atexit
import gc
import importlib.util
import inspect
import json
import logging
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import warnings
from pathlib import Path

PLUGIN = Path(__file__).parents[1] / "smoe_fairseq"


def import_torch() -> None:
    """What takes long of what fairseq imports, and nothing of fairseq."""
    import hydra.core.plugins
    import numpy
    import torch._dynamo  # which every optimizer imports
    import torch.utils.tensorboard  # noqa: F401

    hydra.core.plugins.Plugins.instance()
    os.register_at_fork(
        after_in_child=numpy.random.seed
    )  # Python's own generator does so by itself


def import_fairseq() -> None:
    """What all of its commands import."""
    import_torch()
    import fairseq.trainer  # noqa: F401
    import pytest  # noqa: F401  (for functions of test files)
    from fairseq.dataclass.utils import override_module_args
    from hydra.core.override_parser.overrides_parser import OverridesParser

    # The parser of every command's options keeps what it has found out about their grammar.
    OverridesParser.create().parse_overrides(override_module_args(argparse.Namespace())[0])
    inspect.stack()  # which hydra asks for, and which keeps the files of all modules
    # One of fairseq's tasks sets up the log, which a command does before it imports fairseq.
    for handler in logging.root.handlers[:]:
        logging.root.removeHandler(handler)
    logging.root.setLevel(logging.WARNING)


def import_plugin() -> None:
    """The plugin too, as ``--user-dir`` does before anything else."""
    import_fairseq()
    import fairseq.utils

    fairseq.utils.import_user_module(argparse.Namespace(user_dir=str(PLUGIN)))


class Server:
    """Forks the children that clients ask for, and tells each client how its child has ended."""

    def __init__(self, listener: socket.socket, control: int):
        self.children: dict[int, tuple[int, socket.socket]] = {}  # (pid, client), by descriptor
        self.ready = selectors.DefaultSelector()
        self.ready.register(listener, selectors.EVENT_READ, self.start)
        self.ready.register(control, selectors.EVENT_READ, self.close)
        self.request = None
        self.closed = False

    def serve(self) -> dict | None:
        """In each child: what it has to do. In this process: None, at its end."""
        while True:
            for key, _ in self.ready.select():
                key.data(key.fileobj)
                if self.request or self.closed:
                    return self.request

    def start(self, listener: socket.socket) -> None:
        client, _ = listener.accept()
        request, files = _received(client)
        if pid := os.fork():
            client.sendall(f"{pid}\n".encode())
            child = os.pidfd_open(pid)
            self.children[child] = (pid, client)
            self.ready.register(child, selectors.EVENT_READ, self.tell)
            self.ready.register(client, selectors.EVENT_READ, self.abandon)
        else:
            self.request = request
            for number, file in enumerate(files):
                os.dup2(file, number)
            inherited = [key.fileobj for key in self.ready.get_map().values()]
            self.ready.close()
            for file in (*inherited, client):
                os.close(file) if isinstance(file, int) else file.close()
        for file in files:
            os.close(file)

    def tell(self, child: int) -> None:
        pid, client = self.children.pop(child)
        self.ready.unregister(child)
        os.close(child)
        if client in self.ready.get_map():
            self.ready.unregister(client)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        try:
            client.sendall(f"{status}\n".encode())
        except OSError:
            pass  # it has not waited
        client.close()

    def abandon(self, client: socket.socket) -> None:
        """After its request a client says nothing more, so it is gone: what it has asked for ends."""
        self.ready.unregister(client)
        self._kill([pid for pid, other in self.children.values() if other is client])

    def close(self, control: int) -> None:
        self._kill([pid for pid, _ in self.children.values()])
        self.closed = True

    def _kill(self, pids: list[int]) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


def _received(client: socket.socket) -> tuple[dict, list[int]]:
    content, files, _, _ = socket.recv_fds(client, 2**16, 3)
    while not content.endswith(b"\n"):
        content += client.recv(2**16)
    return json.loads(content), files


def _status_of(request: dict) -> int:
    """Does what is asked for; the exit status, once the last words are said, as Python does it."""
    try:
        _run(**request)
        return 0
    except SystemExit as ended:
        if isinstance(ended.code, int | None):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1


def _run(arguments: list, environment: dict, folder: str, function: list | None) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for setting in filter(None, environment.get("PYTHONWARNINGS", "").split(",")):
        warnings._setoption(setting)
    if function is not None:
        file, name = function
        sys.path[0] = str(Path(file).parent)
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        getattr(module, name)(*arguments)
    elif arguments[0] == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path[0] = str(Path(arguments[0]).parent)
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def _end(status: int) -> None:
    """As Python ends, but for taking apart all modules."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main(imports: str, listener: str) -> None:
    """Listens at a socket of this descriptor for as long as standard input is open."""
    control = os.dup(0)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    {"torch": import_torch, "fairseq": import_fairseq, "plugin": import_plugin}[imports]()
    gc.collect()
    gc.freeze()  # children do not touch, and so not copy, the memory of all these modules
    request = Server(socket.socket(fileno=int(listener)), control).serve()
    if request is not None:
        _end(_status_of(request))


if __name__ == "__main__":
    main(*sys.argv[1:])
