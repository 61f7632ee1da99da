"""Translates batches of sentences: encoding, search, and decoding of the hypotheses."""

import copy
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from fairseq import utils
from fairseq.hub_utils import GeneratorHubInterface
from omegaconf import open_dict
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from smoe_fairseq.errors import UsageError
from smoe_fairseq.flags import SURROGATE
from smoe_fairseq.translate.int8 import check_int8, quantize
from smoe_fairseq.translate.packed import can_pack, pack
from smoe_fairseq.translate.search import BeamSearch, SearchOptions, option
from smoe_fairseq.translate.shortlist import Shortlist, direction_of


def by_length(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Batches of indices, the longest texts first, with at most ``max_tokens`` each, padding included.

    A text that is longer is a batch by itself.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def check_texts(texts: Iterable) -> None:
    """Raise UsageError if one is not a string, or has half of a surrogate pair, such as "\\ud800" in JSON."""
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise UsageError(f"text {number} is {text!r:.60}: expected a text")
        if SURROGATE.search(text):
            raise UsageError(f"{text!r:.60} holds half of a surrogate pair, which is no character")


# Texts that are too long for a model are divided: at ends of sentences, then of clauses, then of words.

_MARKS = (r"(?<=[.!?…])\s+|(?<=[。！？])", r"(?<=[,;:–—])\s+|(?<=[，；：、])", r"\s+")


def divide(text: str, fits: Callable[[str], bool], marks: tuple[str, ...] = _MARKS) -> list[str]:
    """The text in parts that fit, each as long as possible.

    Parts consist of sentences. A sentence that does not fit is divided at commas, then between words, and a
    word between letters.
    """
    if fits(text):
        return [text]
    if not marks:
        half = len(text) // 2
        if not half:
            return [text]
        return [part for side in (text[:half], text[half:]) for part in divide(side, fits, ())]
    parts: list[str] = []
    for piece in filter(None, re.split(marks[0], text)):
        if parts and fits(joined := f"{parts[-1]} {piece}"):
            parts[-1] = joined
        else:
            parts += divide(piece, fits, marks[1:])
    return parts


# Batches in parallel on a CPU, each on one thread: small products gain little from several threads.


def in_threads(
    function: Callable, items: Iterable, number: int, stop: Callable[[], None] | None = None
) -> Iterator:
    """The results of all items, in their order; ``number`` are computed at a time.

    Args:
        stop: ends running computations when their results are no longer needed; not needed if ``number``
            is 1.
    """
    if number == 1:
        yield from map(function, items)
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(number)
    try:
        yield from pool.map(function, items)
    except BaseException:
        stop()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)


def device_of(name: str, int8: bool = False) -> torch.device:
    """The device named by ``--device``.

    Raises:
        UsageError: this machine lacks the device, or ``int8`` is set and the device does not support it.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0]
        raise UsageError(f"--device {name}: expected cpu, or a GPU's name ({reason})") from None
    if int8:
        check_int8(device)
    return device


@dataclass(frozen=True)
class Hypothesis:
    """One translation of a text.

    Args:
        text: detokenised.
        score: ``sum(scores) / len(scores) ** lenpen``, as fairseq-generate prints it.
        tokens: subwords, with the end of sentence.
        scores: log-probability of each token, to base 2.
        requested: requested capacity of each token as the decoder's input, mean over its MoE layers; None for
            the end of sentence, which is never fed back. None instead of a list for a dense decoder, or if
            it was not requested.
    """

    text: str
    score: float
    tokens: list[str]
    scores: list[float]
    requested: list[float | None] | None = None


@dataclass(frozen=True)
class Translation:
    """A text and its translations, best first.

    Args:
        tokens: the encoder's input, including tokens of languages and the end of sentence.
        requested: requested capacity of these tokens, see `Hypothesis`.
        parts: number of parts, more than one if the text was too long.
    """

    source: str
    hypotheses: list[Hypothesis]
    tokens: list[str]
    requested: list[float] | None = None
    parts: int = 1


def joined(source: str, parts: list[Translation], options: "Options") -> Translation:
    """The translation of a text from those of its parts: hypotheses of equal rank are concatenated.

    A text without parts has ``nbest`` empty hypotheses.
    """
    if len(parts) == 1:
        return replace(parts[0], source=source)
    number = min((len(part.hypotheses) for part in parts), default=options.nbest)
    by_rank = ([part.hypotheses[n] for part in parts] for n in range(number))
    return Translation(
        source,
        [_concatenated(hypotheses, options.lenpen) for hypotheses in by_rank],
        [token for part in parts for token in part.tokens],
        _flat([part.requested for part in parts]),
        len(parts),
    )


def _concatenated(hypotheses: list[Hypothesis], lenpen: float) -> Hypothesis:
    scores = [score for hypothesis in hypotheses for score in hypothesis.scores]
    return Hypothesis(
        " ".join(hypothesis.text for hypothesis in hypotheses),
        sum(scores) / max(1, len(scores)) ** lenpen,
        [token for hypothesis in hypotheses for token in hypothesis.tokens],
        scores,
        _flat([hypothesis.requested for hypothesis in hypotheses]),
    )


def _flat(parts: list[list | None]) -> list | None:
    return None if None in parts or not parts else [value for part in parts for value in part]


# The requested capacity of translated tokens, from one more pass over them.
#
# Shapes: B sentences, S source positions, T target positions.


@torch.inference_mode()
def requested_capacity(
    model: nn.Module, source_BS: Tensor, decoder_input: list[Tensor], padding: int
) -> tuple[Tensor | None, Tensor | None]:
    """Gates that each token passed, means over the MoE layers of a side, ``(B, S)`` and ``(B, T)``.

    Args:
        decoder_input: of each sentence, including its first token.

    Returns:
        None for a side without MoE layers.
    """
    input_BT = pad_sequence(decoder_input, batch_first=True, padding_value=padding)
    encoder_out = model.encoder(source_BS)
    _, extra = model.decoder.extract_features(input_BT, encoder_out)
    sides = {"encoder": [], "decoder": []}
    for name, stats in zip(extra["moe_layers"], extra["moe_stats"], strict=True):
        sides[name.split(".")[0]].append(stats.requested_capacity)
    encoder_BS, decoder_BT = (
        torch.stack(layers).float().mean(0) if layers else None for layers in sides.values()
    )
    return encoder_BS, decoder_BT


# From the results of a search to translations: text, scores, requested capacity.
#
# Shapes: B sentences, S source positions.


class Readout:
    """Converts results in the direction of ``task``, see `Translator.task_for`."""

    def __init__(self, translator: GeneratorHubInterface, models: Sequence[nn.Module], task):
        self.translator, self.models = translator, models
        self.source, self.target = task.source_dictionary, task.target_dictionary
        self.first = self.target.eos()  # the decoder's first token
        self.forced: list[int] = []  # first tokens of every translation
        self.hidden = {self.first}
        if hasattr(task, "data_manager"):  # a multilingual task
            spec = task.args.langtoks["main"][1]
            if spec:  # translations begin with the token of their language
                language = task.data_manager.get_decoder_langtok(task.args.target_lang, spec)
                self.hidden.add(language)
                if task.args.lang_tok_replacing_bos_eos:
                    self.first = language
                else:
                    self.forced = [language]

    def prefixes(self, text: str, begins_B: list[bool]) -> Tensor | None:
        """``(B, P)``: first tokens of each translation; ``text`` only if it begins that of a whole text.

        None if the task determines them.

        Raises:
            UsageError: the model lacks a token of ``text``.
        """
        if not text or not any(begins_B):
            return None
        ids = encoded(self.translator, text, self.target).tolist()[:-1]
        if self.target.unk() in ids:
            raise UsageError(
                f"--prefix {text!r}: expected text without characters that the model lacks"
            )
        free = [self.target.pad()] * len(ids)
        return torch.tensor([self.forced + (ids if begins else free) for begins in begins_B])

    def translations(
        self, texts: list[str], source_BS: Tensor, results: list[list[dict]], requested: bool
    ) -> list[Translation]:
        """The translations of a batch; ``results`` are those of one of fairseq's generators."""
        real_BS = source_BS != self.source.pad()
        source_capacity: list = [None] * len(texts)
        target_capacity: list = [[None] * len(hypotheses) for hypotheses in results]
        if requested:
            self._requested(source_BS, real_BS, results, source_capacity, target_capacity)
        return [
            Translation(
                text,
                list(map(self._hypothesis, results[b], target_capacity[b])),
                [self.source[i] for i in source_BS[b][real_BS[b]].tolist()],
                source_capacity[b],
            )
            for b, text in enumerate(texts)
        ]

    def _hypothesis(self, result: dict, requested: list[float | None] | None) -> Hypothesis:
        ids = result["tokens"]
        text = self.target.string(ids, extra_symbols_to_ignore=self.hidden)
        return Hypothesis(
            text=self.translator.detokenize(self.translator.remove_bpe(text)),
            score=float(result["score"]) / math.log(2),
            tokens=[self.target[i] for i in ids.tolist()],
            scores=[score / math.log(2) for score in result["positional_scores"].tolist()],
            requested=requested,
        )

    def _requested(
        self,
        source_BS: Tensor,
        real_BS: Tensor,
        results: list[list[dict]],
        source_capacity: list,
        target_capacity: list[list],
    ) -> None:
        """Fill in the requested capacity of each source's tokens, and of those of its hypotheses."""
        (model,) = self.models
        for n in range(
            max(map(len, results))
        ):  # all first hypotheses at once, then all second ones
            rows = [b for b, hypotheses in enumerate(results) if n < len(hypotheses)]
            ids = [results[b][n]["tokens"] for b in rows]
            inputs = [torch.cat([i.new_tensor([self.first]), i[:-1]]) for i in ids]
            encoder_BS, decoder_BT = requested_capacity(
                model, source_BS[rows], inputs, self.target.pad()
            )
            for i, b in enumerate(rows):
                if encoder_BS is not None:
                    source_capacity[b] = encoder_BS[i][real_BS[b]].tolist()
                if decoder_BT is not None:
                    target_capacity[b][n] = [*decoder_BT[i, 1 : len(inputs[i])].tolist(), None]


def encoded(translator: GeneratorHubInterface, text: str, dictionary) -> Tensor:
    """The subwords of a text, and the end of sentence."""
    subwords = translator.apply_bpe(translator.tokenize(text))
    return dictionary.encode_line(subwords, add_if_not_exist=False).long()


MAX_TOKENS = 16384  # of source in a batch, padding included


@dataclass(frozen=True)
class Options(SearchOptions):
    """How to translate.

    Args:
        nbest: number of hypotheses of each text, at most ``beam``.
        prefix: text with which every translation begins.
        requested: whether to compute the requested capacity, which takes one more pass.
    """

    divide_above: int = option(200, "translate a line of more tokens sentence by sentence", 1)
    nbest: int = 1
    prefix: str = ""
    requested: bool = False

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.nbest <= self.beam:
            raise UsageError(f"--nbest {self.nbest}: expected 1 to --beam, {self.beam}")


class BatchTranslator:
    """A loaded model, and the search for it.

    Args:
        translator: of `SMoETransformerModel.from_pretrained`; its models may be fairseq's own, which use
            fairseq's generator. On a CPU our models are packed (`pack`).
        max_tokens: see `MAX_TOKENS`.
        int8: whether the models compute in int8, on a CPU; see `quantize`.
        shortlist: a file of ``smoe shortlist``; directions that it lacks use all tokens.
        keep: pack copies of the translator's models, which can otherwise no longer be trained or saved.

    It can be called from several threads.

    Raises:
        UsageError: a model, or this CPU, does not support int8; or the shortlist is of another dictionary.
    """

    def __init__(
        self,
        translator: GeneratorHubInterface,
        max_tokens: int = MAX_TOKENS,
        int8: bool = False,
        shortlist: Path | str | None = None,
        keep: bool = False,
    ):
        self.translator, self.max_tokens = translator, max_tokens
        self.models = list(translator.models)
        self.ours = all(getattr(model, "has_own_search", False) for model in self.models)
        for flag, is_set in (("--int8", int8), ("--shortlist", shortlist is not None)):
            if is_set and not self.ours:
                raise UsageError(f"{flag}: expected a smoe_transformer, not fairseq's own")
        on_cpu = translator.device.type == "cpu"
        if int8 or (self.ours and on_cpu and can_pack()):
            if keep:
                self.models = [with_same_weights(model) for model in self.models]
            for model in self.models:
                quantize(model) if int8 else pack(model)
        self.shortlist = None if shortlist is None else Shortlist(shortlist, translator.task)

    def translate_batch(
        self,
        texts: Iterable[str],
        source: str | None = None,
        target: str | None = None,
        options: Options = Options(),
        done: Callable[[int], None] = lambda number: None,
    ) -> list[Translation]:
        """Translations in the order of the texts; those of texts without words are empty.

        A text that has more tokens than ``divide_above`` or the model's limit is divided at ends of
        sentences, and the translations of the parts are joined with blanks.

        Args:
            source, target: languages; optional if only one direction is possible.
            done: called after each batch with the number of texts that begin in it.

        Raises:
            UsageError: the direction is unknown or ambiguous, or a text is not a string.
        """
        texts = list(texts)
        check_texts(texts)
        task = self.translator.task_for(source, target)
        parts = [self._parts(text, options) for text in texts]
        flat = [(part, not n) for of_text in parts for n, part in enumerate(of_text)]
        done(sum(not of_text for of_text in parts))
        by_index: dict[int, Translation] = {}
        for batch, translations in self._translate(task, flat, options):
            by_index.update(zip(batch, translations, strict=True))
            done(sum(flat[index][1] for index in batch))
        remaining = iter(by_index[index] for index in range(len(flat)))
        return [
            joined(text, [next(remaining) for _ in of_text], options)
            for text, of_text in zip(texts, parts, strict=True)
        ]

    def _parts(self, text: str, options: Options) -> list[str]:
        """The parts that are translated separately; empty for a text without subwords."""
        if not self.translator.has_words(text):
            return []
        # Including the end of sentence; the model may add the token of a language.
        longest = min(options.divide_above + 1, self.translator.max_positions[0] - 1)

        def fits(part: str) -> bool:
            # A token has at least one letter; the initial blank and the end of sentence may be tokens, too.
            # Normalisation may expand letters beyond ASCII.
            is_short = part.isascii() and len(part) + 2 <= longest
            return (
                is_short or len(encoded(self.translator, part, self.translator.src_dict)) <= longest
            )

        return divide(text, fits)

    def _translate(
        self, task, parts: list[tuple[str, bool]], options: Options
    ) -> Iterator[tuple[list[int], list[Translation]]]:
        """Indices and translations of each batch.

        Args:
            parts: texts, and whether each is the first part.
        """
        texts, begins = [text for text, _ in parts], [begins for _, begins in parts]
        ids = [encoded(self.translator, text, task.source_dictionary) for text in texts]
        if not ids:
            return
        lengths = np.array([len(i) for i in ids])
        dataset = task.build_dataset_for_inference(ids, lengths)
        search, readout = self._search(task, options), Readout(self.translator, self.models, task)

        def translate(batch: list[int]) -> tuple[list[int], list[Translation]]:
            sample = dataset.collater([dataset[index] for index in batch])
            order = sample["id"].tolist()
            prefix = readout.prefixes(options.prefix, [begins[index] for index in order])
            most = int(options.max_len_a * lengths[batch].min() + options.max_len_b)
            if prefix is not None and prefix.shape[1] > most:
                limit = f"at most {most} subwords, the limit of --max-len-a and --max-len-b"
                raise UsageError(f"--prefix {options.prefix!r}: expected {limit}")
            sample, prefix = utils.apply_to_sample(
                lambda x: x.to(self.translator.device), (sample, prefix)
            )
            with torch.inference_mode():
                results = task.inference_step(search, self.models, sample, prefix_tokens=prefix)
            return order, readout.translations(
                [texts[index] for index in order],
                sample["net_input"]["src_tokens"],
                [hypotheses[: options.nbest] for hypotheses in results],
                requested=options.requested and self.ours and len(self.models) == 1,
            )

        batches = list(by_length(lengths.tolist(), self.max_tokens // self.threads))
        threads = min(self.threads, len(batches))
        stop = search.stop if threads > 1 else None
        yield from in_threads(translate, batches, threads, stop)

    @property
    def threads(self) -> int:
        """The number of batches that are translated at a time."""
        on_cpu = self.translator.device.type == "cpu"
        return torch.get_num_threads() if on_cpu and self.ours else 1

    def _search(self, task, options: Options):
        if self.ours:
            shortlist = self.shortlist and self.shortlist.of(*direction_of(task))
            return BeamSearch(task.target_dictionary, options, shortlist)
        settings = copy.deepcopy(self.translator.cfg.generation)
        with open_dict(settings):
            for name, value in vars(options).items():
                if name in settings:
                    setattr(settings, name, value)
        if options.sampling:
            torch.manual_seed(options.seed)
        return task.build_generator(self.models, settings)


def with_same_weights(model: nn.Module) -> nn.Module:
    """A copy of a model that shares its parameters and buffers."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
