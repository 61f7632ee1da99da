"""``smoe serve``: requests to real servers, one by one and many at once."""

import itertools
import json
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from commands import run, run_python
from handmade import ROUTES, SPECIAL, class_of
from programs import HANGS
from serving import JSON, Serving
from test_model import tiny

from smoe_fairseq.models import SMoETransformerModel
from smoe_fairseq.models.transformer import moe_blocks
from smoe_fairseq.serve.app import MAX_BODY, PAGE
from smoe_fairseq.serve.engine import Engine
from smoe_fairseq.serve.server import allowed_hosts
from smoe_fairseq.translate.text import BatchTranslator, Options

TEXTS = [f"{' '.join(str(number))} is a number" for number in range(100, 130)]


@pytest.fixture(scope="module")
def server(tiny_run):
    with Serving(tiny_run) as serving:
        yield serving


@pytest.fixture(scope="module")
def translator(tiny_run):
    return SMoETransformerModel.from_pretrained(tiny_run)


def expected(translator, source, target, texts, **options):
    return translator.translate(texts, source_lang=source, target_lang=target, **options)


def test_translations_are_those_of_python(server, translator):
    for source, target in (("en", "fr"), ("fr", "en"), ("fr", "de")):  # the last was never seen
        found = server.translate(source, target, *TEXTS[:2])
        words = expected(translator, source, target, TEXTS[:2])
        assert [each["translation"] for each in found] == words and all(words)
    given = {"beam": 4, "nbest": 3, "lenpen": 0.5}
    status, content = server.post(text=TEXTS[3], source="en", target="fr", **given)
    assert status == 200 and (content["source"], content["target"]) == ("en", "fr")
    (found,) = content["translations"]
    core = BatchTranslator(translator)
    (direct,) = core.translate_batch([TEXTS[3]], "en", "fr", Options(**given))
    assert found["tokens"] == direct.tokens and len(found["hypotheses"]) == 3
    assert "routing" not in found
    for hypothesis, other in zip(found["hypotheses"], direct.hypotheses, strict=True):
        assert hypothesis["text"] == other.text and hypothesis["tokens"] == other.tokens
        assert hypothesis["score"] == pytest.approx(other.score)
        assert hypothesis["scores"] == pytest.approx(other.scores)


def test_what_it_offers(server):
    offered = server.get("/languages")
    assert sorted(offered["directions"]) == ["de-en", "en-de", "en-fr", "fr-en"]
    assert sorted(offered["languages"]) == ["de", "en", "fr"] and offered["model"] == "smoe-2-2"
    assert offered["strata"] == {"encoder.layer.1": [2, 2], "decoder.layer.1": [2, 2]}
    assert (offered["max_tokens"], offered["max_texts"]) == (200, 64)
    _, answer = server.post(text="1", source="en", target="fr")
    assert answer["model"] == offered["model"]  # by which the page sees that it is another one
    assert server.get("/health")["status"] == "ok"


def test_strata_of_a_chain_are_its_passes(translator):
    engine = Engine(BatchTranslator(translator, keep=True), "chain", 200)
    engine.blocks = moe_blocks(tiny("--smoe-strata", "8", "--smoe-chain", "2"))
    assert {tuple(sizes) for sizes in engine.description()["strata"].values()} == {(8, 8)}


def test_routes_are_those_on_paper(three_languages, gates_by_hand):
    """Of the model whose gates were fixed by hand, each token's experts in each layer and stratum."""
    with Serving(gates_by_hand, "--data", three_languages) as serving:
        (found,) = serving.translate("aa", "bb", "aa0 aa1 aa2 aa5", routing=True)
    for side in ("encoder", "decoder"):
        routing = found["routing"][side]
        assert [each["name"] for each in routing["layers"]] == [f"{side}.layer.{n}" for n in (1, 3)]
        tokens = zip(routing["tokens"], routing["special"])
        classes = [SPECIAL if special else class_of(token) for token, special in tokens]
        for layer in routing["layers"]:
            assert layer["strata"] == [2, 2, 2, 2] and layer["first_experts"] == [0, 2, 4, 6]
            for kind, stops in zip(classes, layer["stops"], strict=True):
                assert {stop["stratum"]: stop["first"] for stop in stops} == ROUTES[kind]
                assert all(stop["first"] == stop["experts"][0]["expert"] for stop in stops)
    encoder, decoder = (found["routing"][side]["tokens"] for side in ("encoder", "decoder"))
    assert encoder == ["__bb__", "aa0", "aa1", "aa2", "aa5", "</s>"] == found["tokens"]
    assert decoder == ["</s>", *found["hypotheses"][0]["tokens"][:-1]]


def experts(answer) -> list:
    """Of each side and layer the experts of each token at each stop, with their weights."""
    layers = [layer for side in answer["routing"].values() for layer in side["layers"]]
    stops = [stop for layer in layers for of_token in layer["stops"] for stop in of_token]
    return [[(each["expert"], each["weight"]) for each in stop["experts"]] for stop in stops]


def test_a_blank_line_is_blank(server):
    lines = server.translate("en", "fr", "is", " ", "1 2", beam=1)
    assert [bool(line["translation"]) for line in lines] == [True, False, True]
    for blank, given in itertools.product(("", "\u200b", "\n\n"), ({}, {"sentences": True})):
        (alone,) = server.translate("en", "fr", blank, **given)
        assert alone["text"] == blank and not alone["translation"].strip()


def test_sentences_of_a_text(server):
    sentences = ["1 2 is .", "is .", "3"]
    asked = {"beam": 1, "routing": True}
    alone = [server.translate("en", "fr", each, **asked)[0] for each in sentences]
    form, blank = "{}  {}\n\n{} ", " \n"
    both = server.translate("en", "fr", form.format(*sentences), blank, sentences=True, **asked)
    assert both[0]["translation"] == form.format(*(each["translation"] for each in alone))
    found = both[0]["sentences"]
    assert [each["tokens"] for each in found] == [each["tokens"] for each in alone]
    for each, other in zip(found, alone, strict=True):  # padding takes nothing
        for stop, twin in zip(experts(each), experts(other), strict=True):
            (first, weight), (second, rest) = stop
            assert [first, second] == [expert for expert, _ in twin]
            assert weight >= rest > 0 and weight + rest == pytest.approx(1, abs=2e-4)
            assert weight == pytest.approx(twin[0][1], abs=1e-3)
    assert both[1] == {"text": blank, "translation": blank, "sentences": []}
    asked = {"source": "en", "target": "fr", "sentences": True}
    status, content = server.post(text="is. " * 65, **asked)
    assert status == 422 and "sentences: 65" in content["error"]


def test_many_at_once(server, translator):
    """None lost, none mixed up, and far fewer batches than texts."""
    directions = (("en", "fr"), ("fr", "en"))
    asked = [(*direction, text) for direction in directions for text in TEXTS]
    core = BatchTranslator(translator)
    batches = (core.translate_batch(TEXTS, *each, Options(beam=1)) for each in directions)
    direct = [each for batch in batches for each in batch]
    assert len({tuple(each.tokens) for each in direct}) == len(asked)  # a mix-up shows
    assert len({round(each.hypotheses[0].score, 4) for each in direct}) > 5
    before = server.get("/health")
    together = threading.Barrier(len(asked))

    def ask(question):
        together.wait()
        (answer,) = server.translate(*question, beam=1)
        return answer

    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(ask, asked))
    for answer, other in zip(answers, direct, strict=True):
        assert (answer["text"], answer["tokens"]) == (other.source, other.tokens)
        (best,) = answer["hypotheses"]
        assert answer["translation"] == best["text"] == other.hypotheses[0].text
        assert best["score"] == pytest.approx(other.hypotheses[0].score, abs=1e-5)
    after = server.get("/health")
    assert after["translated"] - before["translated"] == len(asked) and after["waiting"] == 0
    assert after["batches"] - before["batches"] < len(asked) / 3


GOOD = {"text": "1 2", "source": "en", "target": "fr"}
REFUSED = {  # body, status, and what the sentence names
    "no JSON": (b'{"text": ', 400, "line 1"),
    "not UTF-8": (b'{"text": "\xff"}', 400, "byte 10"),
    "deep": (b"[" * 100000, 400, "not JSON"),
    "a list": (b"[1]", 400, "not a JSON object"),
    "no text": ({"text": None}, 422, '"texts"'),
    "both": ({"texts": ["1"]}, 422, '"texts"'),
    "a number": ({"text": 7}, 422, "text is 7"),
    "blank, routing": ({"text": None, "texts": ["a", ""], "routing": True}, 422, "empty"),
    "half": ({"text": "\ud800"}, 422, "surrogate"),
    "none": ({"text": None, "texts": []}, 422, "texts: 0 of them; expected 1 to 64"),
    "many": ({"text": None, "texts": ["1"] * 65}, 422, "texts: 65"),
    "long": ({"text": "1 " * 500}, 422, "at most 200"),
    "too much": ({"text": "1 " * MAX_BODY}, 413, f"{MAX_BODY} bytes"),
    "no source": ({"source": None}, 422, "source is null"),
    "language": ({"target": "xx"}, 422, "from 'en' to 'xx'"),
    "beam": ({"beam": 10**9}, 422, "beam is 1000000000; expected a whole number from 1 to 20"),
    "part of one": ({"nbest": 1.5}, 422, "nbest is 1.5; expected a whole number from 1 to 20"),
    "nbest": ({"nbest": 6}, 422, "nbest is 6; expected at most the beam, 5"),
    "lenpen": ({"lenpen": float("nan")}, 422, "lenpen is nan; expected a number from 0 to 10"),
    "routing": ({"routing": 1}, 422, "routing is 1"),
    "unknown": ({"temperature": 1}, 422, "'temperature'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_has_one_sentence(server, name):
    body, status, named = REFUSED[name]
    if isinstance(body, dict):
        body = json.dumps(GOOD | body)
    found, headers, content = server.request("POST", "/translate", body, JSON)
    error = json.loads(content)["error"]
    assert (found, named in error) == (status, True), error
    assert headers["Content-Type"] == "application/json" and "\n" not in error


def test_other_requests_are_refused(server):
    for method, path, headers, status in (
        ("GET", "/translate", {}, 405),
        ("POST", "/translate/", JSON, 404),
        ("GET", "/page/../engine.py", {}, 404),
        # A page of another origin can send this one without asking first.
        ("POST", "/translate", {"Content-Type": "text/plain"}, 415),
        ("POST", "/translate", JSON | {"Content-Encoding": "gzip"}, 415),
        ("GET", "/languages", {"Host": "evil.example:80"}, 403),
        ("GET", "/", {"Host": "127.0.0.1.evil.example"}, 403),
        ("GET", "/", {"Host": "[127.0.0.1]evil.example"}, 403),
        ("GET", "/", {"Host": "localhost:80evil.example"}, 403),
    ):
        found, _, content = server.request(method, path, json.dumps(GOOD), headers)
        assert found == status and json.loads(content)["error"], content
    for host in ("localhost", "127.0.0.1:1", "[::1]:8000", "LOCALHOST"):
        assert server.request("GET", "/health", None, {"Host": host})[0] == 200
    assert server.request("GET", f"{server.url}/health")[0] == 200


@pytest.mark.parametrize("length", [5, -1])
def test_a_request_with_two_lengths_or_none_ends_its_connection(server, length):
    """To a proxy before the server, what follows may be no request (RFC 9112, 6.1)."""
    request = "POST /translate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    request += f"Content-Length: {length}\r\n\r\n0\r\n\r\n"
    request += "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANGS) as connection:
        connection.sendall(request.encode())
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1") == 1
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


def test_a_long_text_is_refused_before_it_is_divided_into_subwords(server):
    """Within what a body may have; a text of so many characters takes seconds to divide."""
    status, content = server.post(**GOOD | {"text": "1" * 200_000})
    assert status == 422 and "200000 characters" in content["error"]
    blanks = {"text": f"1 2{' ' * 3000}3"}  # characters that become few subwords
    assert server.post(**GOOD | blanks, beam=1)[0] == 200


def test_numbers_for_prometheus(server):
    server.translate("en", "fr", "1", beam=1)
    status, headers, content = server.request("GET", "/metrics")
    assert status == 200 and headers["Content-Type"].startswith("text/plain; version=0.0.4")
    numbers = dict(line.split() for line in content.decode().splitlines() if line[0] != "#")
    assert float(numbers["smoe_texts_translated_total"]) >= 1
    assert numbers["smoe_texts_waiting"] == "0"
    kinds = [line for line in content.decode().splitlines() if line.startswith("# TYPE ")]
    assert len(kinds) == len(numbers) == 4


def test_a_reverse_proxy_and_a_line_for_each_request(tiny_run):
    """Its name is allowed; other names are not, on an address of other machines, too, if there is one."""
    assert allowed_hosts("0.0.0.0", []) is None
    more = ("--host", "0.0.0.0", "--allow-host", "Translate.example", "--access-log")
    with Serving(tiny_run, *more) as server:
        for host, status in (("translate.example", 200), ("localhost", 200), ("evil.example", 403)):
            assert server.request("GET", "/health", None, {"Host": host})[0] == status
        assert server.output.count("GET /health HTTP/1.1") == 3
        assert "warning: with --host 0.0.0.0" in server.output
        thread, asked = threading.Thread(target=server.post, kwargs=GOOD), 0
        thread.start()
        while thread.is_alive():  # a line, too, while texts are translated
            server.get("/languages")
            asked += 1
            thread.join(0.1)
        assert server.output.count("GET /languages HTTP/1.1") == asked


def test_the_page_is_its_own_files(server):
    """Nothing comes from elsewhere, and a browser is told to take nothing from there."""
    for file in PAGE.iterdir():
        path = "/" if file.stem == "index" else f"/{file.name}"
        status, headers, content = server.request("GET", path)
        assert status == 200 and content == file.read_bytes()
        policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
        assert policy["default-src"] == "'none'" and set(policy.values()) <= {"'none'", "'self'"}
        assert headers["X-Content-Type-Options"] == "nosniff" and "Server" not in headers
        addresses = set(re.findall(r"https?://[^\s\"')]+", content.decode()))
        assert addresses <= {"http://www.w3.org/2000/svg"}
        assert "innerHTML" not in content.decode()


def test_what_cannot_be_served(server, tiny_run, tmp_path):
    for words, status, named in (
        (["none"], 1, "error: none is missing"),
        (["none", "--port", server.port], 1, f"error: --port {server.port} is in use"),
        (["none", "--host", "no.such.host.invalid"], 1, "error: --host no.such.host.invalid: "),
        (["none", "--host", "192.0.2.1"], 1, "error: --host 192.0.2.1 --port "),
        (["none", "--device", "gpu"], 1, "error: --device gpu"),
        ([tiny_run, "--from", "xx", "--to", "fr"], 1, "error: --from xx --to fr: "),
        (["none", "--port", "70000"], 2, "argument --port"),
        (["none", "--allow-host", "http://mt.example/"], 2, "argument --allow-host"),
        (["none", "--timeout", "0"], 2, "argument --timeout"),
        ([""], 2, "argument RUN"),
        (["none", "--max-batch", "0"], 2, "argument --max-batch"),
    ):
        words = words if "--port" in words else [*words, "--port", "0"]
        result = run("smoe", "serve", *words, check=False, cwd=tmp_path)
        assert result.returncode == status and named in result.stdout, result.stdout
        assert "Traceback" not in result.stdout


@pytest.mark.soak
def test_without_what_it_needs():
    program = "import sys; sys.modules['uvicorn'] = None\n"
    program += "from smoe_fairseq.cli import main; main(['serve', 'none'])"
    result = run_python(program)
    assert result.returncode == 1 and len(result.stdout.splitlines()) == 1
    assert "pip install starlette uvicorn" in result.stdout


def test_a_checkpoint_of_one_direction(two_updates):
    """Words between blanks, and a direction that is the only one."""
    with Serving(two_updates / "checkpoint_best.pt") as serving:
        offered = serving.get("/languages")
        assert offered["directions"] == ["src-tgt"] and not offered["any_pair"]
        assert offered["model"] == two_updates.name
        (found,) = serving.translate("src", "tgt", "ax by", routing=True)
        assert found["routing"]["encoder"]["tokens"] == ["ax", "by", "</s>"]
        status, content = serving.post(text="AX", source="tgt", target="src")
        assert status == 422 and "expected one of src-tgt" in content["error"]


def test_one_direction_of_several(tiny_run):
    with Serving(tiny_run, "--from", "English", "--to", "fr") as serving:
        offered = serving.get("/languages")
        assert offered["directions"] == ["en-fr"] and offered["languages"] == ["en", "fr"]
        assert not offered["any_pair"] and serving.translate("en", "French", "1 2", beam=1)
        for source, target in (("en", "de"), ("fr", "en")):
            status, content = serving.post(text="1 2", source=source, target=target)
            assert status == 422 and "expected en-fr" in content["error"]


def test_a_stock_model_has_no_strata(corpus, pre_norm):
    with Serving(pre_norm, "--data", corpus) as serving:
        (found,) = serving.translate("src", "tgt", "a b c", routing=True)
        assert found["routing"]["encoder"]["tokens"] == ["a", "b", "c", "</s>"]
        assert found["routing"]["encoder"]["layers"] == found["routing"]["decoder"]["layers"] == []
        assert serving.get("/languages")["strata"] == {}
