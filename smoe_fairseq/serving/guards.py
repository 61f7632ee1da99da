"""What stands before each request: who may ask, how much may be sent, what a browser may do then."""

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# The page is its own files and nothing else: no other host, no inline script or style, no frame around it.
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


class TooLarge(Exception):
    """A body above the limit."""


class Guard:
    """ASGI middleware: refuses other hosts' names, and adds `HEADERS` to each answer.

    A page elsewhere can have its own name resolve to 127.0.0.1 (DNS rebinding) and would then be of the same
    origin as this server. The browser still says the name, which is none of ours.

    Args:
        hosts: names by which the server may be asked for; None: any.
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

        host = host_of(Request(scope).headers.get("host", ""))
        if self.hosts is not None and host not in self.hosts:
            answer = refusal(403, f"this server answers to {', '.join(sorted(self.hosts))} alone")
            await answer(scope, receive, send_with_headers)
            return
        await self.app(scope, receive, send_with_headers)


def refusal(status: int, sentence: str, **headers: str) -> JSONResponse:
    """The answer to what cannot be done: one sentence."""
    return JSONResponse({"error": sentence}, status, headers)


def host_of(header: str) -> str:
    """The name or address in a Host header, without the port."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


async def body_of(request: Request, limit: int) -> bytes:
    """The body, up to ``limit`` bytes.

    Raises:
        TooLarge: there are more; they are not read.
    """
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise TooLarge
    return bytes(body)
