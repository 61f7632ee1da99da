"""The model behind the server: requests, their queue, and their translation."""

import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from fairseq.data.data_utils import collate_tokens

from smoe_fairseq.analysis import inputs
from smoe_fairseq.analysis.sentence import SentenceSide, run_batch
from smoe_fairseq.errors import UsageError
from smoe_fairseq.forms import Number, fault
from smoe_fairseq.models.transformer import moe_blocks
from smoe_fairseq.translate.directions import direction_of, is_multilingual
from smoe_fairseq.translate.readout import Readout, Translation
from smoe_fairseq.translate.sentences import join_sentences, split_sentences
from smoe_fairseq.translate.text import BatchTranslator, Options, checked_texts

MAX_BEAM = 20
MAX_TEXTS = 64
CHARACTERS = 32  # per subword: longer texts are refused before they are split into subwords
EXAMPLE = '{"text": "Ein Hund.", "source": "de", "target": "en"}'
_FORM = {  # of a request
    "text?": (None, str),
    "texts?": (None, [str]),
    "source": str,
    "target": str,
    "beam?": Number(1, MAX_BEAM, whole=True),
    "nbest?": Number(1, MAX_BEAM, whole=True),
    "lenpen?": Number(0, 10),
    "routing?": bool,
    "sentences?": bool,
}
_FIELDS = [name.removesuffix("?") for name in _FORM]


class MalformedRequest(UsageError):
    """The body is not JSON: status 400 instead of 422."""


@dataclass(frozen=True)
class Search:
    """Direction and options, which all texts of a batch share."""

    source: str
    target: str
    beam: int = 5
    nbest: int = 1
    lenpen: float = 1.0
    routing: bool = False


@dataclass(frozen=True)
class Texts:
    """The texts of a request.

    Args:
        texts: as they were sent.
        parts: what is translated: the texts, or all their sentences.
        gaps: of each text of sentences, see `join_sentences`; None: the parts are the texts.
    """

    texts: list[str]
    parts: list[str]
    gaps: list[list[str]] | None = None

    def answers(self, of_parts: list[dict]) -> list[dict]:
        """An answer for each text, with those of its sentences."""
        if self.gaps is None:
            return of_parts
        answers, remaining = [], iter(of_parts)
        for text, gaps in zip(self.texts, self.gaps, strict=True):
            sentences = list(itertools.islice(remaining, len(gaps) - 1))
            whole = join_sentences([each["translation"] for each in sentences], gaps)
            answers.append({"text": text, "translation": whole, "sentences": sentences})
        return answers


def read(body: bytes, max_texts: int = MAX_TEXTS) -> tuple[Texts, Search]:
    """The texts of ``POST /translate``, and how to translate them.

    Raises:
        MalformedRequest: it is not a JSON object in UTF-8.
        UsageError: a field is missing, unknown or invalid; the message names it.
    """
    request = _object(body)
    for name in request:
        if name not in _FIELDS:
            raise UsageError(f"{name!r:.60}: unknown; expected some of {', '.join(_FIELDS)}")
    if message := fault(request, _FORM):
        raise UsageError(message)
    text, texts = request.pop("text", None), request.pop("texts", None)
    if (text is None) == (texts is None):
        raise UsageError('expected either "text", a string, or "texts", a list of strings')
    texts = [text] if texts is None else texts
    checked_texts(texts)
    divided, kind = Texts(texts, texts), "texts"
    if request.pop("sentences", False):
        sentences, gaps = zip(*map(split_sentences, texts)) if texts else ((), ())
        divided, kind = Texts(texts, list(itertools.chain(*sentences)), list(gaps)), "sentences"
    if not texts or len(divided.parts) > max_texts:
        number = len(divided.parts)
        raise UsageError(f"{kind}: {number} of them; expected 1 to {max_texts} in one request")
    search = Search(**request)
    if search.nbest > search.beam:
        raise UsageError(f"nbest is {search.nbest}; expected at most the beam, {search.beam}")
    return divided, search


def _object(body: bytes) -> dict:
    try:
        content = json.loads(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise MalformedRequest(f"the body is not UTF-8 at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        reason = error if isinstance(error, json.JSONDecodeError) else "it cannot be read"
        raise MalformedRequest(f"the body is not JSON ({reason}): expected {EXAMPLE}") from None
    if not isinstance(content, dict):
        raise MalformedRequest(f"the body is not a JSON object: expected {EXAMPLE}")
    return content


# A queue of texts before the model: texts of one direction that arrive together are translated as one batch.
#
# It uses threads, not asyncio: a request holds a `concurrent.futures.Future`, and cancels it when the answer
# is no longer needed.


class QueueFull(Exception):
    """The queue has no room for these texts."""


class QueueClosed(Exception):
    """The server is stopping."""


@dataclass
class _Waiting:
    text: str
    kind: Hashable
    future: Future = field(default_factory=Future)


class RequestQueue:
    """A queue for one worker thread, the only one that calls the model.

    Args:
        translate: from (texts, kind) to the results of the texts, in their order.
        max_batch: maximum number of texts per batch.
        max_waiting: maximum number of texts in the queue, without those that are being translated.
        linger: seconds that the first text of a batch waits for others.
        stop: ends ``translate`` when its results are no longer needed.
    """

    def __init__(
        self,
        translate: Callable[[list[str], Hashable], Sequence],
        max_batch: int,
        max_waiting: int,
        linger: float,
        stop: Callable[[], None] = lambda: None,
    ):
        self.translate, self.stop = translate, stop
        self.max_batch, self.max_waiting, self.linger = max_batch, max_waiting, linger
        self.batches = self.translated = 0  # so far
        self.translating = 0  # texts of the current batch
        self._waiting: deque[_Waiting] = deque()
        self._closed = False
        self._changed = threading.Condition()
        self._worker = threading.Thread(target=self._work, name="model", daemon=True)
        self._worker.start()

    def submit(self, texts: Sequence[str], kind: Hashable) -> list[Future]:
        """A future for each text's result; texts of equal ``kind`` may share a batch.

        Raises:
            QueueFull: there is not enough room; no text was added.
            QueueClosed: after `close`.
        """
        entries = [_Waiting(text, kind) for text in texts]
        with self._changed:
            if self._closed:
                raise QueueClosed
            self._waiting = deque(each for each in self._waiting if not each.future.cancelled())
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
        """Refuse waiting texts with `QueueClosed`, stop the current batch, and wait for that.

        A thread that still computes when Python ends would abort the process.
        """
        with self._changed:
            self._closed = True
            left = list(self._waiting)
            self._waiting.clear()
            self._changed.notify()
        for entry in left:
            if entry.future.set_running_or_notify_cancel():
                entry.future.set_exception(QueueClosed())
        self.stop()
        self._worker.join(timeout)

    def _work(self) -> None:
        while (batch := self._next_batch()) is not None:
            # From here on futures cannot be cancelled; cancelled ones are dropped.
            batch = [entry for entry in batch if entry.future.set_running_or_notify_cancel()]
            self.translating = len(batch)
            if batch:
                self._translate(batch)

    def _next_batch(self) -> list[_Waiting] | None:
        """The first waiting text and others of its kind, in their order; None if the queue is closed.

        Empty if all have been cancelled meanwhile.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return None
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

    def _translate(self, batch: list[_Waiting]) -> None:
        try:
            results = self.translate([entry.text for entry in batch], batch[0].kind)
            answers = list(zip(batch, results, strict=True))
        except Exception as error:
            if len(batch) == 1 or self._closed:
                self.translating -= len(batch)
                for entry in batch:
                    entry.future.set_exception(QueueClosed() if self._closed else error)
                return
            for entry in batch:  # so that only the text that causes the error fails
                self._translate([entry])
            return
        self.batches += 1  # before the answers are sent, after which somebody may ask
        self.translated += len(batch)
        self.translating -= len(batch)
        for entry, answer in answers:
            entry.future.set_result(answer)


class Engine:
    """A loaded model for requests: from texts to answers for JSON.

    `translate` may be called by one thread at a time, `check` and `description` by any.

    Args:
        name: of the model.
        max_tokens: maximum length of a text, in subwords.
        only: the source and target language that are served; None: all.
    """

    def __init__(
        self,
        model: BatchTranslator,
        name: str,
        max_tokens: int,
        only: tuple[str, str] | None = None,
    ):
        self.model, self.name = model, name
        translator = self.translator = model.translator
        self.max_tokens = min(max_tokens, translator.max_positions[0] - 2)
        self.max_characters = CHARACTERS * self.max_tokens
        self.max_len = max(Options().max_len_b, self.max_tokens)
        task = self.task = translator.task
        self.directions = inputs.directions(task, only and "-".join(only))
        self.any_pair = is_multilingual(task) and only is None
        pairs = (inputs.languages(task, direction) for direction in self.directions)
        self.languages = list(dict.fromkeys(itertools.chain(*pairs)))
        self.blocks = moe_blocks(translator.models[0])

    def stop(self) -> None:
        """End running translations, which then raise RuntimeError."""
        self.model.stop()

    def description(self) -> dict:
        """The answer to ``GET /languages``."""
        return {
            "model": self.name,
            "directions": self.directions,
            "languages": self.languages,
            "any_pair": self.any_pair,
            "strata": {name: block.strata.own for name, block in self.blocks.items()},
            "max_tokens": self.max_tokens,
        }

    def check(self, texts: Sequence[str], search: Search) -> None:
        """Check a request before it is queued.

        Raises:
            UsageError: the model lacks the direction, or it is not served, a text is too long, or, with
                routing, has no words.
        """
        asked = f"from {search.source[:20]!r} to {search.target[:20]!r}"
        task = self.translator.task_for(search.source, search.target, asked)
        if not self.any_pair and "-".join(direction_of(task)) not in self.directions:
            raise UsageError(f"{asked}: expected {self.directions[0]}, which this server is for")
        for text in texts:
            if len(text) > self.max_characters:
                raise UsageError(f"a text of {len(text)} characters is too long: {text[:40]!r}")
        if search.routing and not all(map(self.translator.has_words, texts)):
            raise UsageError("a text is empty: with routing, expected at least one word")
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
            lenpen=float(search.lenpen),
            max_len_b=self.max_len,
            divide_above=self.max_tokens,
        )
        translations = self.model.translate_batch(texts, search.source, search.target, options)
        answers = [_answer(translation) for translation in translations]
        if search.routing:
            for answer, routing in zip(answers, self._routing(translations, search)):
                answer["routing"] = routing
        return answers

    def _routing(self, translations: list[Translation], search: Search) -> list[dict]:
        """The experts of each token of the texts and their best translations, from one more pass."""
        source, target = self.task.source_dictionary, self.task.target_dictionary
        task = self.translator.task_for(search.source, search.target)
        first = Readout(self.translator, self.model.models, task).first
        sources = [_ids(source, each.tokens) for each in translations]
        targets = [_ids(target, each.hypotheses[0].tokens[:-1], first) for each in translations]
        device = self.translator.device
        net_input = {
            "src_tokens": collate_tokens(sources, source.pad()).to(device),
            "src_lengths": torch.tensor([len(ids) for ids in sources], device=device),
            "prev_output_tokens": collate_tokens(targets, target.pad()).to(device),
        }
        pairs = run_batch(self.translator.models[0], self.task, net_input)
        return [{side.side: _side(side) for side in sides} for sides in pairs]


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
                "strata": block.strata.own,
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
