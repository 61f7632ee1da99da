"""The web server itself."""

import logging
import signal
import socket
from argparse import Namespace

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from smoe_fairseq.serving.engine import Engine
from smoe_fairseq.serving.listener import own_names
from smoe_fairseq.serving.web_app import Limits, WebApp

NEXT_REQUEST = 10  # seconds until it has to be here


class Impatient(H11Protocol):
    """Closes connections by which nothing is asked: as many as there may be would keep all others out."""

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self._expect_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_request()

    def _expect_request(self) -> None:
        """Headers to their end: with these a cycle begins."""
        self.loop.call_later(NEXT_REQUEST, self._close_without, self.cycle)

    def _close_without(self, before) -> None:
        if self.cycle is before and (before is None or before.response_complete):
            self.transport.close()


class Stoppable(uvicorn.Server):
    """Tells the application when it begins to stop, and not only when all is answered."""

    def __init__(self, config: uvicorn.Config, web: WebApp):
        super().__init__(config)
        self.web = web

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.web.stop()
        await super().shutdown(sockets)


def serve(engine: Engine, args: Namespace, listener: socket.socket) -> None:
    """Answers requests until SIGINT or SIGTERM (as which SIGHUP counts) ends it, raised once more then."""
    limits = Limits(args.max_batch, args.max_queue, args.timeout)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    web = WebApp(engine, limits)
    config = uvicorn.Config(
        web.asgi(own_names(args.host)),
        http=Impatient,
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=int(limits.stopping) + 1,
    )
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        # The end of a terminal, which uvicorn does not know; it would end in the middle of an answer.
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    Stoppable(config, web).run(sockets=[listener])
