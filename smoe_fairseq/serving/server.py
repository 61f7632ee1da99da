"""The web server itself."""

import logging
import socket
from argparse import Namespace

import uvicorn

from smoe_fairseq.serving.engine import Engine
from smoe_fairseq.serving.listener import own_names
from smoe_fairseq.serving.web_app import Limits, WebApp


def serve(engine: Engine, args: Namespace, listener: socket.socket) -> None:
    """Answers requests until a signal ends it, which is then raised once more."""
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
    uvicorn.Server(config).run(sockets=[listener])
