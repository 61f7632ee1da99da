"""The model behind the server: requests, their queue, and their translation."""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import MISSING, dataclass, field, fields

import torch
from fairseq.data.data_utils import collate_tokens

from smoe_fairseq.analysis import inputs
from smoe_fairseq.analysis.sentence import SentenceSide, StopFinder
from smoe_fairseq.errors import UsageError, quietly
from smoe_fairseq.forms import Number, fault
from smoe_fairseq.models.transformer import moe_blocks
from smoe_fairseq.translate.translator import (
    BatchTranslator,
    Options,
    Readout,
    Translation,
    check_texts,
)

MAX_BEAM = 20
MAX_TEXTS = 64
CHARACTERS = 32  # per subword: longer texts are refused before they are divided into subwords
EXAMPLE = '{"text": "Ein Hund.", "source": "de", "target": "en"}'
_FORM = {  # of the content of a request; all but the languages have defaults
    "text": (None, str),
    "texts": (None, [str]),
    "source": str,
    "target": str,
    "beam": Number(1, MAX_BEAM, whole=True),
    "nbest": Number(1, MAX_BEAM, whole=True),
    "lenpen": Number(0, 10),
    "routing": bool,
}


class MalformedRequest(UsageError):
    """The body is not JSON: status 400, where others are 422."""


@dataclass(frozen=True)
class Search:
    """What the texts of a batch have in common."""

    source: str
    target: str
    beam: int = 5
    nbest: int = 1
    lenpen: float = 1.0
    routing: bool = False


_DEFAULTS = {f.name: f.default for f in fields(Search) if f.default is not MISSING}
_DEFAULTS |= {"text": None, "texts": None}


def read(body: bytes, max_texts: int = MAX_TEXTS) -> tuple[list[str], Search]:
    """The texts of ``POST /translate``, at most so many, in order, and how to translate them.

    Raises:
        MalformedRequest: it is not a JSON object in UTF-8.
        UsageError: something in it is missing, unknown or of another kind; the sentence names it.
    """
    given = _object(body)
    for name in given:
        if name not in _FORM:
            raise UsageError(f"{name!r:.60}: unknown; expected some of {', '.join(_FORM)}")
    asked = _DEFAULTS | given
    if found := fault(asked, _FORM):
        raise UsageError(found)
    text, texts = asked.pop("text"), asked.pop("texts")
    if (text is None) == (texts is None):
        raise UsageError('expected either "text", a string, or "texts", a list of strings')
    texts = [text] if texts is None else texts
    if not 1 <= len(texts) <= max_texts:
        raise UsageError(f"texts: {len(texts)} of them; expected 1 to {max_texts} in one request")
    check_texts(texts)
    search = Search(**asked | {"lenpen": float(asked["lenpen"])})
    if search.nbest > search.beam:
        raise UsageError(f"nbest is {search.nbest}; expected at most the beam, {search.beam}")
    return texts, search


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


# Texts that wait for the model: those of one direction that come together are translated as one
# batch.
#
# Threads, no asyncio: a request holds a `concurrent.futures.Future`, and cancels it when the answer is
# no longer needed.


class QueueFull(Exception):
    """The queue has no room for so many texts."""


class QueueClosed(Exception):
    """The server is stopping."""


@dataclass
class _Waiting:
    text: str
    kind: Hashable
    future: Future = field(default_factory=Future)


class RequestQueue:
    """A queue before one worker thread, the only one that calls the model.

    Args:
        translate: takes (texts, kind) and answers with a result for each text, in their order.
        max_batch: maximum number of texts that are translated together.
        max_waiting: texts in the queue, those that are being translated not counted.
        linger: seconds that the first text of a batch waits for others.
    """

    def __init__(
        self,
        translate: Callable[[list[str], Hashable], Sequence],
        max_batch: int,
        max_waiting: int,
        linger: float,
    ):
        self.translate = translate
        self.max_batch, self.max_waiting, self.linger = max_batch, max_waiting, linger
        self.batches = self.translated = 0  # so far
        self.translating = 0  # texts that are with the model
        self._waiting: deque[_Waiting] = deque()
        self._closed = False
        self._changed = threading.Condition()
        self._worker = threading.Thread(target=self._work, name="model", daemon=True)
        self._worker.start()

    def submit(self, texts: Sequence[str], kind: Hashable) -> list[Future]:
        """A future of each text's result; texts of an equal ``kind`` may share a batch.

        Raises:
            QueueFull: not all of them have room; none was taken.
            QueueClosed: after `close`.
        """
        entries = [_Waiting(text, kind) for text in texts]
        with self._changed:
            if self._closed:
                raise QueueClosed
            if len(self._waiting) + len(entries) > self.max_waiting:
                self._drop_cancelled()
            if len(self._waiting) + len(entries) > self.max_waiting:
                raise QueueFull
            self._waiting.extend(entries)
            self._changed.notify()
        return [entry.future for entry in entries]

    @property
    def waiting(self) -> int:
        """Texts in the queue."""
        return len(self._waiting)

    def close(self, timeout: float | None = None) -> None:
        """Refuse waiting texts with `QueueClosed`, and wait for the current batch."""
        with self._changed:
            self._closed = True
            left = list(self._waiting)
            self._waiting.clear()
            self._changed.notify()
        for entry in left:
            if entry.future.set_running_or_notify_cancel():
                entry.future.set_exception(QueueClosed())
        self._worker.join(timeout)

    def _work(self) -> None:
        while batch := self._next_batch():
            # From here on a future cannot be cancelled any more; those that were are dropped.
            batch = [entry for entry in batch if entry.future.set_running_or_notify_cancel()]
            self.translating = len(batch)
            if batch:
                self._translate(batch)
            self.translating = 0

    def _next_batch(self) -> list[_Waiting]:
        """The first text that waits and others of its kind, in their order; none: the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return []
            kind = self._waiting[0].kind
            end = time.monotonic() + self.linger
            while not self._closed and self._count(kind) < self.max_batch:
                if not self._changed.wait(max(0.0, end - time.monotonic())):
                    break
            batch, others = [], deque()
            for entry in self._waiting:
                fits = entry.kind == kind and len(batch) < self.max_batch
                (batch if fits else others).append(entry)
            self._waiting = others
            return batch

    def _count(self, kind: Hashable) -> int:
        return sum(entry.kind == kind for entry in self._waiting)

    def _drop_cancelled(self) -> None:
        self._waiting = deque(entry for entry in self._waiting if not entry.future.cancelled())

    def _translate(self, batch: list[_Waiting]) -> None:
        try:
            results = self.translate([entry.text for entry in batch], batch[0].kind)
            answers = list(zip(batch, results, strict=True))
        except Exception as error:
            if len(batch) == 1:
                batch[0].future.set_exception(error)
                return
            for entry in batch:  # so that the others do not fail, too
                self._translate([entry])
            return
        self.batches += 1
        self.translated += len(batch)
        for entry, answer in answers:
            entry.future.set_result(answer)


# A loaded model for requests: texts in, answers for JSON out.


class Engine:
    """A model: `translate` is called by one thread at a time, `check` and `description` by any.

    Args:
        model: whose texts are translated.
        name: what it is called.
        max_tokens: of a text, in subwords.
    """

    def __init__(self, model: BatchTranslator, name: str, max_tokens: int):
        self.model, self.name = model, name
        translator = self.translator = model.translator
        self.max_tokens = min(max_tokens, translator.max_positions[0] - 2)
        self.max_characters = CHARACTERS * self.max_tokens
        self.max_len = max(Options().max_len_b, self.max_tokens)
        task = self.task = translator.task
        self.directions = inputs.directions(task)
        self.any_pair = inputs.is_multilingual(task)
        self.languages = list(dict.fromkeys(x for pair in self.directions for x in pair.split("-")))
        self.blocks = moe_blocks(translator.models[0])
        self.finder = StopFinder(translator.models[0], task)

    def description(self) -> dict:
        """The answer to ``GET /languages``."""
        return {
            "model": self.name,
            "directions": self.directions,
            "languages": self.languages,
            "any_pair": self.any_pair,
            "strata": {
                name: list(map(int, block.strata.sizes)) for name, block in self.blocks.items()
            },
            "max_tokens": self.max_tokens,
        }

    def check(self, texts: Sequence[str], search: Search) -> None:
        """Refuse what cannot be translated, before it waits.

        Raises:
            UsageError: the model has no such direction, a text is too long, or none has words; with routing
                each needs some.
        """
        source, target = search.source, search.target
        asked = f"from {source[:20]!r} to {target[:20]!r}"
        self.translator.task_for(source, target, asked)
        for text in texts:
            if len(text) > self.max_characters:
                raise UsageError(f"a text of {len(text)} characters is too long: {text[:40]!r}")
        # One of many may be a blank line, which is translated by a blank one.
        if not (all if search.routing else any)(map(self.translator.has_words, texts)):
            raise UsageError("a text is empty: expected at least one word")
        for text in texts:
            tokens = len(self.translator.encode(text)) - 1
            if tokens > self.max_tokens:
                raise UsageError(
                    f"a text of {tokens} tokens, of at most {self.max_tokens}, begins with {text[:40]!r}"
                )

    def translate(self, texts: list[str], search: Search) -> list[dict]:
        """An answer for each text, for JSON."""
        options = Options(
            beam=search.beam,
            nbest=search.nbest,
            lenpen=search.lenpen,
            max_len_b=self.max_len,
            divide_above=self.max_tokens,
        )
        with quietly():
            found = self.model.translate_batch(texts, search.source, search.target, options)
            routing = self._routing(found, search) if search.routing else None
        answers = [_answer(translation) for translation in found]
        for answer, of_text in zip(answers, routing or (), strict=False):
            answer["routing"] = of_text
        return answers

    def _routing(self, found: list[Translation], search: Search) -> list[dict]:
        """Each token's way through the experts, of the texts and their best translations: one more pass."""
        source, target = self.task.source_dictionary, self.task.target_dictionary
        first = Readout(
            self.translator,
            self.model.models,
            self.translator.task_for(search.source, search.target),
        ).first
        read = [_ids(source, translation.tokens) for translation in found]
        given = [_ids(target, each.hypotheses[0].tokens[:-1], first) for each in found]
        device = self.translator.device
        net_input = {
            "src_tokens": collate_tokens(read, source.pad()).to(device),
            "src_lengths": torch.tensor([len(ids) for ids in read], device=device),
            "prev_output_tokens": collate_tokens(given, target.pad()).to(device),
        }
        return [{s.side: _side(s) for s in sides} for sides in self.finder.run(net_input)]


def _ids(dictionary, tokens: list[str], *first: int) -> torch.Tensor:
    return torch.tensor([*first, *map(dictionary.index, tokens)])


def _answer(translation: Translation) -> dict:
    hypotheses = [
        {"text": h.text, "score": h.score, "tokens": h.tokens, "scores": h.scores}
        for h in translation.hypotheses
    ]
    return {
        "text": translation.source,
        "translation": hypotheses[0]["text"],
        "tokens": translation.tokens,
        "hypotheses": hypotheses,
    }


def _side(side: SentenceSide) -> dict:
    return {
        "tokens": side.tokens,
        "special": side.special,
        "layers": [
            {
                "name": block.name,
                "strata": list(block.strata.sizes) * block.strata.chain,
                "fixed_depth": block.strata.fixed_depth,
                "first_experts": block.strata.first_experts,
                "stops": [[_stop(stop) for stop in of_token] for of_token in of_block],
            }
            for block, of_block in zip(side.blocks, side.stops, strict=True)
        ],
    }


def _stop(stop) -> dict:
    experts = [{"expert": expert, "weight": round(weight, 4)} for expert, weight in stop.experts]
    return {"stratum": stop.stratum, "first": stop.first, "experts": experts}
