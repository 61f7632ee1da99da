"""The page of ``smoe serve`` and its JSON interface."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from smoe_fairseq.errors import UsageError
from smoe_fairseq.serve.engine import (
    MAX_TEXTS,
    Engine,
    MalformedRequest,
    QueueClosed,
    QueueFull,
    RequestQueue,
    Search,
    Texts,
    read,
)

# The page uses only its own files: no other host, no inline script or style, no frame around it.
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}


_HOST = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^\[\]:]+))(?::[0-9]*)?")


class Guard:
    """ASGI middleware: refuses other host names, and adds `HEADERS` to each answer.

    Another site can resolve its name to 127.0.0.1 (DNS rebinding), and its pages then have the same origin as
    this server. The browser still sends that name, which is not in ``hosts``.

    Args:
        hosts: allowed host names; None: any.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None):
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        scope["path"] = re.sub(r"^http://[^/]*", "", scope["path"])  # a proxy's requests have it
        headers = Request(scope).headers
        match = _HOST.fullmatch(headers.get("host", ""))
        host = (match[1] or match[2] or "").lower() if match else ""
        if self.hosts is not None and host not in self.hosts:
            names = ", ".join(sorted(self.hosts))
            answer = refusal(403, f"this server answers only to {names}; --allow-host adds a name")
            await answer(scope, receive, send_with_headers)
            return
        if headers.get("transfer-encoding") and headers.get("content-length"):
            # Proxies may disagree about where the body ends and the next request begins (RFC 9112, 6.1).
            sentence = "expected the header Content-Length or Transfer-Encoding, not both"
            await refusal(400, sentence, Connection="close")(scope, receive, send_with_headers)
            return
        await self.app(scope, receive, send_with_headers)


def refusal(status: int, sentence: str, **headers: str) -> JSONResponse:
    """The answer to a refused request: one sentence."""
    return JSONResponse({"error": sentence}, status, headers)


async def body_of(request: Request, limit: int) -> bytes | None:
    """The body; None if it has more than ``limit`` bytes."""
    body = bytearray()
    if int(request.headers.get("content-length", 0)) > limit:
        with suppress(TimeoutError):  # a client may read the answer only after it has sent its body
            async with asyncio.timeout(DISCARD_SECONDS):
                async for _ in request.stream():
                    pass
        return None
    async for part in request.stream():
        body += part
        if len(body) > limit:
            return None
    return bytes(body)


PAGE = Path(__file__).with_name("page")
MAX_BODY = 1 << 18  # bytes
BODY_SECONDS = 10  # until the body must be complete
DISCARD_SECONDS = 1  # for reading the rest of a body that is too long
RETRY_AFTER = "1"  # seconds
LINGER = 0.005  # seconds that a text waits for others
LAST_BATCH = 1.0  # seconds for a batch whose results are no longer needed
CLIENT_CLOSED = Response(status_code=499)  # never sent


class WebApp:
    """Answers requests, with one queue and one model.

    Args:
        max_batch: maximum number of texts per batch.
        max_waiting: maximum number of texts in the queue.
        timeout: seconds from a request to its answer.
        stopping: seconds for pending requests when the server stops; new ones are refused.
    """

    def __init__(
        self, engine: Engine, max_batch: int, max_waiting: int, timeout: float, stopping: float = 8
    ):
        self.engine, self.max_batch, self.max_waiting = engine, max_batch, max_waiting
        self.timeout, self.stopping = timeout, stopping
        self.max_texts = min(MAX_TEXTS, max_waiting)
        self.queue: RequestQueue
        self.too_late = asyncio.Event()

    def asgi(self, hosts: frozenset[str] | None) -> Guard:
        """The application; its lifespan is the queue's.

        Args:
            hosts: see `Guard`.
        """
        files = {"/" if p.stem == "index" else f"/{p.name}": p for p in PAGE.iterdir()}
        routes = [
            Route("/languages", self.languages),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/translate", self.translate, methods=["POST"]),
            *(Route(name, partial(_file, path)) for name, path in files.items()),
        ]
        app = Starlette(
            routes=routes,
            exception_handlers={HTTPException: _http_error, Exception: _internal_error},
            lifespan=self._lifespan,
        )
        app.router.redirect_slashes = False  # its redirection has no body, and may lose https
        return Guard(app, hosts)  # outermost, so that errors also get the headers

    def stop(self) -> None:
        """Begin to stop: pending requests have ``stopping`` seconds from now on."""
        asyncio.get_running_loop().call_later(self.stopping, self.too_late.set)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        limits = self.max_batch, self.max_waiting, LINGER
        self.queue = RequestQueue(self.engine.translate, *limits, self.engine.stop)
        try:
            yield
        finally:
            self.queue.close(LAST_BATCH)

    async def languages(self, request: Request) -> Response:
        """Directions, strata and limits."""
        return JSONResponse(self.engine.description() | {"max_texts": self.max_texts})

    async def health(self, request: Request) -> Response:
        """Numbers of texts and batches."""
        return JSONResponse({"status": "ok", **self._numbers()})

    async def metrics(self, request: Request) -> Response:
        """The same numbers in the text format of Prometheus."""
        lines = []
        for name, value in self._numbers().items():
            is_total = name in ("translated", "batches")
            shown = f"smoe_{'' if name == 'batches' else 'texts_'}{name}{'_total' * is_total}"
            kind = "counter" if is_total else "gauge"
            lines += [f"# TYPE {shown} {kind}", f"{shown} {value}"]
        return Response("\n".join([*lines, ""]), media_type="text/plain; version=0.0.4")

    def _numbers(self) -> dict[str, int]:
        names = ("waiting", "translating", "translated", "batches")
        return {name: getattr(self.queue, name) for name in names}

    async def translate(self, request: Request) -> Response:
        """Translations of one text or several, in their order; an error is one sentence."""
        # Required, since pages of other sites can send other types without a preflight request.
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            return refusal(415, "expected the header Content-Type: application/json")
        if "content-encoding" in request.headers:
            return refusal(415, "expected a body without the header Content-Encoding")
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await body_of(request, MAX_BODY)
            if body is None:  # the rest of the body makes the connection unusable
                sentence = f"the body has more than {MAX_BODY} bytes: expected less text"
                return refusal(413, sentence, Connection="close")
            texts, search = read(body, self.max_texts)
            # In a thread, since splitting text into subwords would delay other requests.
            await asyncio.to_thread(self.engine.check, texts.parts, search)
            futures = self.queue.submit(texts.parts, search)
            return await self._answer(request, texts, search, futures)
        except TimeoutError:
            sentence = f"the body did not arrive within {BODY_SECONDS} s"
            return refusal(408, sentence, Connection="close")
        except ClientDisconnect:
            return CLIENT_CLOSED
        except MalformedRequest as error:
            return refusal(400, str(error))
        except UsageError as error:
            return refusal(422, str(error))
        except QueueFull:
            waiting, most = self.queue.waiting, self.max_waiting
            sentence = f"{waiting} of at most {most} texts are waiting: try again in a moment"
            return refusal(503, sentence, **{"Retry-After": RETRY_AFTER})
        except QueueClosed:
            return refusal(503, "the server is stopping", **{"Retry-After": RETRY_AFTER})

    async def _answer(
        self, request: Request, texts: Texts, search: Search, futures: list
    ) -> Response:
        """Wait for all futures; they are cancelled if the client disconnects.

        Raises:
            QueueClosed: the server stops before they are complete.
            UsageError: a text cannot be translated.
        """
        results = asyncio.gather(*map(asyncio.wrap_future, futures))
        # Otherwise asyncio would log that the error of a cancelled request was never retrieved.
        results.add_done_callback(lambda done: done.cancelled() or done.exception())
        disconnect = asyncio.ensure_future(_disconnect(request))
        too_late = asyncio.ensure_future(self.too_late.wait())
        try:
            await asyncio.wait(
                {results, disconnect, too_late},
                timeout=self.timeout,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if results.done():
                asked = {"source": search.source, "target": search.target}
                answer = {"model": self.engine.name, "translations": texts.answers(await results)}
                return JSONResponse(asked | answer)
            if disconnect.done():
                return CLIENT_CLOSED
            if too_late.done():
                raise QueueClosed
            sentence = f"no translation within {self.timeout:g} s: try again, with less text"
            return refusal(504, sentence)
        finally:
            disconnect.cancel()
            too_late.cancel()
            for future in futures:
                future.cancel()
            results.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _file(path: Path, request: Request) -> Response:
    """A file of the page."""
    return FileResponse(path)


async def _http_error(request: Request, error: HTTPException) -> Response:
    if error.status_code == 404:
        paths = "/, /languages, /health, /metrics or /translate"
        return refusal(404, f"{request.url.path} does not exist: expected {paths}")
    allowed = (error.headers or {}).get("Allow", "")
    expected = f": expected {allowed}" if allowed else ""
    return refusal(error.status_code, f"{error.detail}{expected}", **(error.headers or {}))


async def _internal_error(request: Request, error: Exception) -> Response:
    return refusal(500, "the translation failed: see the server's log")
