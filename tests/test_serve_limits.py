"""``smoe serve``: what it takes no more of, who waits too long, what fails, and how it ends."""

import asyncio
import json
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from programs import HANGS, wait_until
from serving import JSON, Serving
from test_serve import GOOD

from smoe_fairseq.serve.app import WebApp
from smoe_fairseq.serve.engine import Engine


class Broken(Engine):
    """An engine whose model fails at one text."""

    def stop(self):
        pass

    def __init__(self):
        self.name = "broken"

    def check(self, texts, search):
        pass

    def translate(self, texts, search):
        if "bad" in texts:
            raise RuntimeError("out of memory")
        return [{"text": text} for text in texts]


def test_a_failure_is_one_sentence_and_the_next_text_is_translated():
    app = WebApp(Broken(), max_batch=4, max_waiting=8, timeout=60).asgi(None)

    async def ask_both():
        async with app.app.router.lifespan_context(app):
            with pytest.raises(RuntimeError, match="out of memory"):  # which the server logs
                await ask(app, GOOD | {"text": "bad"}, answers)
            await ask(app, GOOD, answers)

    answers = []
    asyncio.run(ask_both())
    (failed, error), (status, found) = answers
    assert failed == 500 and error["error"].startswith("the translation failed")
    assert error["headers"]["x-content-type-options"] == "nosniff"
    assert status == 200 and found["translations"] == [{"text": GOOD["text"]}]


async def ask(app, asked, answers, stays=True):
    """One request by the words of ASGI, or one without its body; adds status and JSON to the answers."""
    messages = [] if stays else [{"type": "http.disconnect"}]
    messages += [{"type": "http.request", "body": json.dumps(asked).encode()}] if asked else []
    sent = []

    async def receive():
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message):
        sent.append(message)
        if message["type"] == "http.response.body":
            headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
            content = json.loads(message["body"] or "{}")
            answers.append((sent[0]["status"], content | {"headers": headers}))

    scope = {"type": "http", "method": "POST", "path": "/translate", "query_string": b""}
    headers = [(name.lower().encode(), value.encode()) for name, value in JSON.items()]
    await app(scope | {"headers": headers}, receive, send)


class Slow(Broken):
    """An engine that takes its time, until it is told to go on."""

    def __init__(self):
        super().__init__()
        self.go_on = threading.Event()

    def translate(self, texts, search):
        self.go_on.wait(HANGS)
        return super().translate(texts, search)


def test_what_the_queue_has_no_room_for_or_the_server_no_time_is_refused():
    """In words, and without waiting for the model once more."""
    engine, answers = Slow(), []
    web = WebApp(engine, max_batch=1, max_waiting=1, timeout=60, stopping=0.2)
    app = web.asgi(None)

    async def ask_and_stop():
        async with app.app.router.lifespan_context(app):
            asked = []
            for number in ("translating", "waiting"):
                asked.append(asyncio.ensure_future(ask(app, GOOD, answers)))
                while not getattr(web.queue, number):
                    await asyncio.sleep(0.01)
            await ask(app, GOOD, answers)
            web.stop()
            await asyncio.gather(*asked)
            assert not engine.go_on.is_set()

    asyncio.run(ask_and_stop())
    engine.go_on.set()
    assert [status for status, _ in answers] == [503, 503, 503]
    full, *stopping = (content["error"] for _, content in answers)
    assert "1 of at most 1 texts" in full and set(stopping) == {"the server is stopping"}
    assert all(content["headers"]["retry-after"] == "1" for _, content in answers)


@pytest.mark.soak
def test_a_connection_by_which_nothing_is_asked_is_closed(tiny_run):
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with (
        Serving(tiny_run) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=HANGS) as idle,
        socket.create_connection(("127.0.0.1", server.port), timeout=HANGS) as connection,
    ):
        idle.sendall(request[:20])
        connection.sendall(request)
        answer = b""
        while not answer.endswith(b"}"):
            answer += connection.recv(1 << 16)
        connection.sendall(request[:20])
        assert idle.recv(1) == connection.recv(1) == b""


def posted(length: int, body: bytes = b"") -> bytes:
    """The bytes of a request that declares a length."""
    head = f"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: {JSON['Content-Type']}"
    return f"{head}\r\nContent-Length: {length}\r\n\r\n".encode() + body


def test_who_has_gone_is_not_translated_for():
    engine, answers = Slow(), []
    web = WebApp(engine, max_batch=1, max_waiting=8, timeout=60)
    app = web.asgi(None)

    async def ask_and_go():
        async with app.app.router.lifespan_context(app):
            asked = asyncio.ensure_future(ask(app, GOOD, answers))
            while not web.queue.translating:
                await asyncio.sleep(0.01)
            await ask(app, GOOD, answers, stays=False)
            engine.go_on.set()
            await asked
            await ask(app, GOOD, answers)
            assert web.queue.translated == 2

    asyncio.run(ask_and_go())
    assert [status for status, _ in answers] == [499, 200, 200]


def test_who_sends_too_slowly_is_told(monkeypatch):
    async def ask_slowly():
        async with app.app.router.lifespan_context(app):
            await ask(app, None, answers)

    monkeypatch.setattr("smoe_fairseq.serve.app.BODY_SECONDS", 0.01)
    app, answers = WebApp(Broken(), max_batch=1, max_waiting=8, timeout=60).asgi(None), []
    asyncio.run(ask_slowly())
    ((status, _),) = answers
    assert status == 408


def test_who_waits_too_long_or_would_send_too_much_is_told(tiny_run):
    with Serving(tiny_run, "--timeout", 0.001) as serving:
        with socket.create_connection(("127.0.0.1", serving.port), timeout=HANGS) as connection:
            connection.sendall(posted(300_000))  # it is refused before the body
            assert connection.recv(12) == b"HTTP/1.1 413"
        status, content = serving.post(**GOOD)
        assert status == 504 and "no translation within 0.001 s" in content["error"]
        assert serving.get("/health")["status"] == "ok"


def test_a_second_signal_ends_it_at_once(tiny_run):
    long = {"texts": ["1 2 3 4 5 6 7 8 9 " * 6] * 64, "beam": 20, "source": "en", "target": "fr"}
    with Serving(tiny_run) as serving, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(serving.post, **long)
        wait_until(lambda: serving.get("/health")["translating"])
        os.kill(serving.program.pid, signal.SIGINT)
        wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", serving.port)))
        assert serving.stop(signal.SIGINT) == 128 + signal.SIGINT
        status, content = asked.result()
        assert status == 503 and "stopping" in content["error"]
        assert "Traceback" not in serving.output and "rror" not in serving.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_when_all_is_answered(tiny_run, number):
    with Serving(tiny_run) as serving, ThreadPoolExecutor(1) as pool:
        idle = socket.create_connection(("127.0.0.1", serving.port))
        asked = pool.submit(serving.post, **GOOD, beam=20, routing=True)
        while not any(list(serving.get("/health").values())[1:]):
            pass
        assert serving.stop(number) == 128 + signal.SIGTERM
        assert asked.result()[0] == 200
        assert "Traceback" not in serving.output and "rror" not in serving.output
        idle.close()
