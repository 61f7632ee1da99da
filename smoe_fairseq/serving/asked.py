"""What a request asks for: JSON, read and checked before anything is done."""

import json
from dataclasses import dataclass

from smoe_fairseq.system.errors import UsageError

MAX_BEAM = 20
MAX_TEXTS = 64
EXAMPLE = '{"text": "Ein Hund.", "source": "de", "target": "en"}'
_DEFAULTS = {"text": None, "texts": None, "source": None, "target": None}
_DEFAULTS |= {"beam": 5, "nbest": 1, "lenpen": 1.0, "routing": False}


class MalformedRequest(UsageError):
    """No JSON at all: status 400, where other sentences are 422."""


@dataclass(frozen=True)
class Search:
    """What texts have to have in common to share a batch."""

    source: str
    target: str
    beam: int
    nbest: int
    lenpen: float
    routing: bool


@dataclass(frozen=True)
class Asked:
    """A request's texts, in their order, and how they are to be translated."""

    texts: list[str]
    search: Search


def read(body: bytes, max_texts: int = MAX_TEXTS) -> Asked:
    """The content of ``POST /translate``, with at most so many texts.

    Raises:
        MalformedRequest: it is not a JSON object in UTF-8.
        UsageError: something in it is missing, unknown or of another kind; the sentence names it.
    """
    given = _object(body)
    for name in given:
        if name not in _DEFAULTS:
            raise UsageError(f"{_short(name)}: unknown; expected some of {', '.join(_DEFAULTS)}")
    asked = _DEFAULTS | given
    texts = _texts(asked["text"], asked["texts"], max_texts)
    beam = _whole(asked, "beam", MAX_BEAM)
    nbest = _whole(asked, "nbest", beam)
    lenpen = asked["lenpen"]
    if not _is_number(lenpen) or not 0 <= lenpen <= 10:
        raise UsageError(f"lenpen {_short(lenpen)}: expected a number from 0 to 10")
    if not isinstance(asked["routing"], bool):
        raise UsageError(f"routing {_short(asked['routing'])}: expected true or false")
    languages = [_language(asked, name) for name in ("source", "target")]
    return Asked(texts, Search(*languages, beam, nbest, float(lenpen), asked["routing"]))


def _object(body: bytes) -> dict:
    try:
        given = json.loads(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise MalformedRequest(f"the body is not UTF-8 at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        why = error if isinstance(error, json.JSONDecodeError) else "it cannot be read"
        raise MalformedRequest(f"the body is not JSON ({why}): expected {EXAMPLE}") from None
    if not isinstance(given, dict):
        raise MalformedRequest(f"the body is not a JSON object: expected {EXAMPLE}")
    return given


def _texts(text, texts, most: int) -> list[str]:
    if (text is None) == (texts is None):
        raise UsageError('expected either "text", a string, or "texts", a list of strings')
    if texts is None:
        texts = [text]
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        raise UsageError('"text" has to be a string, "texts" a list of strings')
    if not 1 <= len(texts) <= most:
        raise UsageError(f"texts: {len(texts)} of them; expected 1 to {most} in one request")
    for each in texts:
        if not each.strip():
            raise UsageError("a text is empty: expected at least one word")
        if not _is_text(each):  # "\ud800" in JSON
            raise UsageError("a text holds half of a surrogate pair, which is no character")
    return texts


def _is_text(text: str) -> bool:
    try:
        text.encode()
        return True
    except UnicodeEncodeError:
        return False


def _language(asked: dict, name: str) -> str:
    if not isinstance(asked[name], str):
        raise UsageError(f"{name} is missing: expected a language, as GET /languages names them")
    return asked[name]


def _whole(asked: dict, name: str, most: int) -> int:
    value = asked[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        of = " (the beam)" if name == "nbest" else ""
        raise UsageError(f"{name} {_short(value)}: expected a whole number from 1 to {most}{of}")
    return value


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value) -> str:
    """As it was given, on one line of no great length, fit to be sent."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
