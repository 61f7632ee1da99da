"""``smoe serve``: a page in the browser, and JSON for programs, before a trained model."""

import errno
import importlib.util
import logging
import signal
import socket
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from smoe_fairseq.serving.numbers import port, positive, seconds
from smoe_fairseq.system.errors import UsageError
from smoe_fairseq.system.quiet import quietly

NEEDED = ("starlette", "uvicorn")
BACKLOG = 1024  # connections that wait to be accepted


def add_arguments(parser: ArgumentParser) -> None:
    """The run, where to listen, and limits."""
    parser.add_argument("run_", metavar="RUN", type=Path, help="folder of a run, or a checkpoint")
    parser.add_argument(
        "--checkpoint", metavar="NAME", help="of the folder's; default: the best, or else the last"
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="with its dictionaries, if they are elsewhere now"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; others than 127.0.0.1 let other machines in. Default: 127.0.0.1",
    )
    parser.add_argument(
        "--port", type=port, default=8000, help="0: any that is free; default: 8000"
    )
    parser.add_argument(
        "--max-tokens",
        type=positive,
        default=200,
        metavar="N",
        help="of a text, in subwords; default: 200",
    )
    parser.add_argument(
        "--max-batch",
        type=positive,
        default=32,
        metavar="N",
        help="texts that are translated together; default: 32",
    )
    parser.add_argument(
        "--max-queue",
        type=positive,
        default=512,
        metavar="N",
        help="texts that may wait; more are refused for the moment. Default: 512",
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=60.0,
        metavar="SECONDS",
        help="from a request to its answer; default: 60",
    )
    parser.add_argument("--cpu", action="store_true", help="even where there is a GPU")


def run(args: Namespace) -> None:
    """Listens until a signal ends it; the exit status is then 128 and the signal's number, as a shell's."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"smoe serve needs {' and '.join(missing)}: pip install 'smoe-fairseq[serve]'"
        )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    with _listening(args.host, args.port) as listener:  # before the model, which takes longer
        with quietly():
            from smoe_fairseq.serving.engine import Engine

            engine = Engine.of_run(
                args.run_, args.checkpoint, args.data, max_tokens=args.max_tokens, cpu=args.cpu
            )
        _serve(engine, args, listener)


def _serve(engine, args: Namespace, listener: socket.socket) -> None:
    import uvicorn

    from smoe_fairseq.serving.guards import is_loopback, own_names
    from smoe_fairseq.serving.web_app import Limits, WebApp

    limits = Limits(args.max_batch, args.max_queue, args.timeout)
    config = uvicorn.Config(
        WebApp(engine, limits).asgi(own_names(args.host)),
        http="h11",
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(limits.stopping),
    )
    if not is_loopback(args.host):
        print(
            f"warning: --host {args.host} lets other machines in: whoever reaches them can translate, "
            "and nothing is encrypted",
            file=sys.stderr,
        )
    address = f"[{args.host}]" if ":" in args.host else args.host
    print(f"{engine.name}: http://{address}:{listener.getsockname()[1]}/ (Ctrl-C ends it)")
    sys.stdout.flush()
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    uvicorn.Server(config).run(sockets=[listener])


def _end(number: int, frame) -> None:
    raise SystemExit(128 + number)


def _listening(host: str, port: int) -> socket.socket:
    """A socket that has its address, so that nobody else takes it while the model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise UsageError(
            f"--host {host}: {error.strerror}; expected an address of this machine, such as 127.0.0.1"
        ) from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"--port {port} is in use: name another, or 0 for any that is free"
            ) from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(
                f"--host {host} is no address of this machine: expected one, such as 127.0.0.1"
            ) from None
        raise UsageError(f"--host {host} --port {port}: {error.strerror}") from None
    return listener
