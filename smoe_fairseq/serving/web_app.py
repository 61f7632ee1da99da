"""The server's addresses: the page, and JSON for programs."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from smoe_fairseq.serving import asked
from smoe_fairseq.serving.engine import Engine
from smoe_fairseq.serving.guards import Guard, TooLarge, body_of, refusal
from smoe_fairseq.serving.request_queue import QueueClosed, QueueFull, RequestQueue
from smoe_fairseq.system.errors import UsageError

PAGE = Path(__file__).with_name("page")
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
MAX_BODY = 1 << 18  # bytes
SLOWEST_BODY = 10  # seconds until it has to be here
RETRY_AFTER = "1"  # seconds
LAST_BATCH = 1.0  # seconds for a batch that nobody waits for any more
NOBODY = Response(status_code=499)  # for a client that has gone: nothing of it is sent
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """What one server takes.

    Args:
        max_batch: texts that are translated together.
        max_waiting: texts in the queue.
        timeout: seconds from a request to its answer.
        linger: seconds that a text waits for others to come.
        stopping: seconds for what has been asked already, when the server is told to stop; the rest is
            refused then.
    """

    max_batch: int
    max_waiting: int
    timeout: float
    linger: float = 0.005
    stopping: float = 10.0


class WebApp:
    """Answers to requests, with one queue before one model."""

    def __init__(self, engine: Engine, limits: Limits):
        self.engine, self.limits = engine, limits
        self.max_texts = min(asked.MAX_TEXTS, limits.max_waiting)
        self.queue: RequestQueue
        self.too_late: asyncio.Event

    def asgi(self, hosts: frozenset[str] | None) -> Guard:
        """The application; its lifespan is the queue's.

        Args:
            hosts: see `Guard`.
        """
        routes = [
            Route("/languages", self.languages),
            Route("/health", self.health),
            Route("/translate", self.translate, methods=["POST"]),
            *(Route("/" if p.stem == "index" else f"/{p.name}", _file(p)) for p in PAGE.iterdir()),
        ]
        app = Starlette(
            routes=routes,
            exception_handlers={HTTPException: _of_starlette, Exception: _unforeseen},
            lifespan=self._lifespan,
        )
        return Guard(app, hosts)  # around all of it: what fails has the headers too

    def stop(self) -> None:
        """Begins the end: what has been asked has ``limits.stopping`` seconds from now on."""
        asyncio.get_running_loop().call_later(self.limits.stopping, self.too_late.set)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        limits = self.limits
        self.too_late = asyncio.Event()
        self.queue = RequestQueue(
            self.engine.translate, limits.max_batch, limits.max_waiting, limits.linger
        )
        try:
            yield
        finally:
            self.queue.close(LAST_BATCH)

    async def languages(self, request: Request) -> Response:
        """What can be asked for."""
        return JSONResponse(self.engine.description() | {"max_texts": self.max_texts})

    async def health(self, request: Request) -> Response:
        """Numbers of texts."""
        queue = self.queue
        return JSONResponse(
            {
                "status": "ok",
                "waiting": queue.waiting,
                "translating": queue.translating,
                "translated": queue.translated,
                "batches": queue.batches,
            }
        )

    async def translate(self, request: Request) -> Response:
        """Translations of one text or several, in their order; an error is one sentence."""
        # Asked for by name, since a page elsewhere can send any other type without asking first.
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            return refusal(415, "expected the header Content-Type: application/json")
        try:
            async with asyncio.timeout(SLOWEST_BODY):
                body = await body_of(request, MAX_BODY)
            wanted = asked.read(body, self.max_texts)
            self.engine.check(wanted.texts, wanted.search)
            futures = self.queue.submit(wanted.texts, wanted.search)
        except TooLarge:
            # The rest is not read, so that the connection is of no use any more.
            sentence = f"the body has more than {MAX_BODY} bytes: expected fewer texts"
            return refusal(413, sentence, Connection="close")
        except TimeoutError:
            sentence = f"the body was not here within {SLOWEST_BODY} s"
            return refusal(408, sentence, Connection="close")
        except ClientDisconnect:
            return NOBODY
        except asked.MalformedRequest as error:
            return refusal(400, str(error))
        except UsageError as error:
            return refusal(422, str(error))
        except QueueFull:
            waiting, most = self.queue.waiting, self.limits.max_waiting
            sentence = f"{waiting} texts are waiting, of at most {most}: try again in a moment"
            return refusal(503, sentence, **{"Retry-After": RETRY_AFTER})
        except QueueClosed:
            return refusal(503, "the server is stopping")
        return await self._answer(request, wanted, futures)

    async def _answer(self, request: Request, wanted: asked.Asked, futures: list) -> Response:
        """When all futures are there; nobody waits for those of a client that has gone."""
        results = asyncio.gather(*map(asyncio.wrap_future, futures))
        gone = asyncio.ensure_future(_disconnect(request))
        too_late = asyncio.ensure_future(self.too_late.wait())
        try:
            await asyncio.wait(
                {results, gone, too_late},
                timeout=self.limits.timeout,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if results.done():
                search = wanted.search
                said = {"source": search.source, "target": search.target}
                return JSONResponse(said | {"translations": await results})
            if gone.done():
                return NOBODY
            if too_late.done():
                raise QueueClosed
            sentence = f"no translation within {self.limits.timeout:g} s: try again, with less text"
            return refusal(504, sentence)
        except QueueClosed:
            return refusal(503, "the server is stopping")
        except UsageError as error:
            return refusal(422, str(error))
        finally:
            gone.cancel()
            too_late.cancel()
            for future in futures:
                future.cancel()
            results.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _file(path: Path):
    """An endpoint that answers with a file of the page, as it was when the server began."""
    content, kind = path.read_bytes(), KINDS[path.suffix]

    async def endpoint(request: Request) -> Response:
        return Response(content, media_type=kind)

    return endpoint


async def _of_starlette(request: Request, error: HTTPException) -> Response:
    if error.status_code == 404:
        sentence = (
            f"there is nothing at {request.url.path}: expected /, /languages, /health or /translate"
        )
        return refusal(404, sentence)
    allowed = (error.headers or {}).get("Allow", "")
    expected = f": expected {allowed}" if allowed else ""
    return refusal(error.status_code, f"{error.detail}{expected}", **(error.headers or {}))


async def _unforeseen(request: Request, error: Exception) -> Response:
    return refusal(500, "the translation failed, for a reason that the server's log has")
