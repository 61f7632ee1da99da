"""``smoe serve``: the web server."""

import errno
import ipaddress
import logging
import os
import re
import signal
import socket
import sys
import warnings
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from smoe_fairseq.errors import UsageError
from smoe_fairseq.flags import add_flag, filled, port, positive, seconds
from smoe_fairseq.serve.engine import Engine
from smoe_fairseq.translate.command import add_model_arguments, load_model, requested_direction

try:
    import h11
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    from smoe_fairseq.serve.app import HEADERS, WebApp, refusal
except ImportError:
    raise UsageError("smoe serve needs: pip install starlette uvicorn") from None


BACKLOG = 1024  # connections that wait to be accepted


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, so that no other program can use the port while the model is loaded.

    Raises:
        UsageError: the port is in use, or the address is not this machine's.
    """
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = infos[0]
        both = family == socket.AF_INET6  # "::" includes IPv4
        return socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except (socket.gaierror, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "not a host name"
        raise UsageError(
            f"--host {host}: {reason}; expected an address such as 127.0.0.1"
        ) from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(f"--port {port} is in use: choose another") from None
        raise UsageError(f"--host {host} --port {port}: {os.strerror(error.errno)}") from None


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to a host name or address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def allowed_hosts(host: str, more: Iterable[str]) -> frozenset[str] | None:
    """The names of a server; None, any, without ``more`` for an address that other machines reach."""
    if not (more or is_loopback(host)):
        return None
    return frozenset({"127.0.0.1", "::1", "localhost", host.lower(), *more})


HEADER_SECONDS = 10  # until the headers of a request must be complete


class IdleTimeoutProtocol(H11Protocol):
    """Closes idle connections, and refuses in JSON what is no request.

    uvicorn's own time limit for idle connections starts with the first request, and its limit of their number
    refuses all clients.
    """

    def send_400_response(self, msg: str) -> None:
        """As uvicorn's, but for JSON."""
        answer = refusal(400, msg, Connection="close", **HEADERS)
        response = h11.Response(status_code=400, headers=answer.raw_headers)
        for event in (response, h11.Data(data=answer.body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self._expect_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_request()

    def _expect_request(self) -> None:
        """Close the connection unless headers arrive in time, with which uvicorn starts a cycle."""
        self.loop.call_later(HEADER_SECONDS, self._close_if_idle, self.cycle)

    def _close_if_idle(self, before) -> None:
        if self.cycle is before and (before is None or before.response_complete):
            self.transport.close()


class Server(uvicorn.Server):
    """Prints that it is ``ready``, and informs the application at the start of a shutdown, as uvicorn does
    after all answers.
    """

    def __init__(self, config: uvicorn.Config, web: WebApp, ready: str):
        super().__init__(config)
        self.web, self.ready = web, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self.ready, flush=True)

    def handle_exit(self, sig: int, frame) -> None:
        """A second signal refuses pending requests at once; uvicorn would drop them and the queue."""
        if self.should_exit:
            self.web.too_late.set()
        super().handle_exit(sig, frame)
        self.force_exit = False

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.web.stop()
        await super().shutdown(sockets)


def serve(engine: Engine, args: Namespace, listener: socket.socket) -> None:
    """Answer requests until SIGINT, SIGTERM or SIGHUP; then the signal is raised again."""
    # For all threads, unlike `quietly`, which would also disable the log of requests.
    logging.getLogger().setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    if args.access_log:
        access = logging.getLogger("uvicorn.access")
        access.setLevel(logging.INFO)
        access.addHandler(logging.StreamHandler())  # standard error
        access.propagate = False  # else other handlers may repeat it
    web = WebApp(engine, args.max_batch, args.max_queue, args.timeout)
    config = uvicorn.Config(
        web.asgi(allowed_hosts(args.host, args.allow_host)),
        http=IdleTimeoutProtocol,
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=args.access_log,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=int(web.stopping) + 1,
    )
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        # Sent when a terminal closes. uvicorn does not handle it, so answers would be cut off.
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    address = f"[{args.host}]" if ":" in args.host else args.host
    url = f"http://{address}:{listener.getsockname()[1]}/"
    Server(config, web, f"{engine.name}: open {url} (Ctrl-C ends it)").run(sockets=[listener])


PORT = 8000


def _host_name(text: str) -> str:
    if not re.fullmatch(r"[\w.-]+", text):
        raise ArgumentTypeError(f"{text}: expected a host's name alone, such as translate.example")
    return text.lower()


def add_serve_arguments(parser: ArgumentParser) -> None:
    words = "folder of a run, or a checkpoint"
    parser.add_argument("path", metavar="RUN", type=filled, help=words)
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; with 0.0.0.0 other machines can connect (default: 127.0.0.1)",
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        type=_host_name,
        default=[],
        metavar="NAME",
        help="also answer requests for this host name, such as that of a reverse proxy; may be repeated",
    )
    parser.add_argument("--access-log", action="store_true", help="log requests to standard error")
    add = partial(add_flag, parser)
    add("--port", "N", "port; 0: any free one", port, PORT)
    add("--max-tokens", "N", "maximum length of a text in subwords", positive, 200)
    add("--max-batch", "N", "maximum number of texts per batch", positive, 32)
    add("--max-queue", "N", "maximum number of waiting texts; others get a 503", positive, 512)
    add("--timeout", "SECONDS", "time limit of a request", seconds, 60.0)
    add_model_arguments(parser)


def run_serve(args: Namespace) -> None:
    """Serve until a signal, with a shell's exit status for it, 128 + n."""
    with listen(args.host, args.port) as listener:  # before the model is loaded
        path = Path(args.path).resolve()
        name = path.parent.name if path.is_file() else path.name
        model = load_model(args)
        only = requested_direction(model, args) if args.source or args.target else None
        engine = Engine(model, name, args.max_tokens, only)
        if not is_loopback(args.host):
            print(
                f"warning: with --host {args.host} other machines can connect and translate text, without "
                "encryption",
                file=sys.stderr,
            )
        serve(engine, args, listener)
