"""The web server itself."""

import logging
import signal
import socket
from argparse import Namespace

import uvicorn

from smoe_fairseq.serving.engine import Engine
from smoe_fairseq.serving.listener import own_names
from smoe_fairseq.serving.web_app import Limits, WebApp


def serve(engine: Engine, args: Namespace, listener: socket.socket) -> None:
    """Answers requests until SIGINT or SIGTERM (as which SIGHUP counts) ends it, raised once more then."""
    limits = Limits(args.max_batch, args.max_queue, args.timeout)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    config = uvicorn.Config(
        WebApp(engine, limits).asgi(own_names(args.host)),
        http="h11",
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=int(limits.stopping),
    )
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        # The end of a terminal, which uvicorn does not know; it would end in the middle of an answer.
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    uvicorn.Server(config).run(sockets=[listener])
