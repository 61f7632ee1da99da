"""Translates batches of sentences: encoding and search."""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import torch
from fairseq import utils
from fairseq.hub_utils import GeneratorHubInterface
from omegaconf import open_dict
from torch import nn

from smoe_fairseq.errors import UsageError
from smoe_fairseq.flags import SURROGATE
from smoe_fairseq.host_memory import cores
from smoe_fairseq.modules.torch_features import without_default_device
from smoe_fairseq.translate.int8 import check_int8, quantize
from smoe_fairseq.translate.packed import can_pack, pack
from smoe_fairseq.translate.readout import Readout, Translation, encoded, joined
from smoe_fairseq.translate.search import BeamSearch, SearchOptions, option
from smoe_fairseq.translate.sentences import divide, split_sentences
from smoe_fairseq.translate.threads import in_threads


def by_length(
    lengths: Sequence[int], max_tokens: int, max_sentences: int | None = None
) -> Iterator[list[int]]:
    """Batches of indices, the longest texts first, with at most ``max_tokens`` each, padding included.

    A text that is longer is a batch by itself.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        is_full = batch and (len(batch) + 1) * lengths[batch[0]] > max_tokens
        if is_full or len(batch) == max_sentences:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def checked_texts(texts: Iterable) -> list[str]:
    """The texts in a list.

    Raises UsageError for a dict or a set, which are no list, and for a text that is not a string or has
    half of a surrogate pair, such as "\\ud800" in JSON.
    """
    if isinstance(texts, Mapping | Set):
        raise UsageError(f"texts: expected a list, not {texts!r:.60}")
    texts = list(texts)
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise UsageError(f"text {number} is {text!r:.60}: expected a text")
        if SURROGATE.search(text):
            raise UsageError(f"{text!r:.60} holds half of a surrogate pair, which is no character")
    return texts


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


MAX_TOKENS = 16384  # of source in a batch, padding included
_FEW_TOKENS = 512  # that are not divided among threads


@dataclass(frozen=True)
class Options(SearchOptions):
    """How to translate.

    Args:
        nbest: number of hypotheses of each text, at most ``beam``.
        prefix: text with which every translation begins.
        requested: whether to compute the requested capacity, which takes one more pass.
    """

    by_sentence: bool = field(
        default=False,
        metadata={
            "words": "translate each sentence by itself, for models of sentences; keep blanks between them",
            "flag": "--sentences",
        },
    )
    divide_above: int = option(200, "divide a line of more tokens at ends of sentences", 1)
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
        keep: pack copies of the translator's models, which can otherwise no longer be trained or saved.
        max_sentences: of a batch; by default limited by ``max_tokens`` alone.

    It can be called from several threads.

    Raises:
        UsageError: a model, or this CPU, does not support int8.
    """

    def __init__(
        self,
        translator: GeneratorHubInterface,
        max_tokens: int = MAX_TOKENS,
        int8: bool = False,
        keep: bool = False,
        max_sentences: int | None = None,
    ):
        self.translator, self.max_tokens = translator, max_tokens
        self.max_sentences = max_sentences
        self.models = list(translator.models)
        self.ours = all(getattr(model, "has_own_search", False) for model in self.models)
        if int8 and not self.ours:
            raise UsageError("--int8: expected a smoe_transformer, not fairseq's own")
        on_cpu = translator.device.type == "cpu"
        if int8 or (self.ours and on_cpu and can_pack()):
            if keep:
                self.models = [with_same_weights(model) for model in self.models]
            for model in self.models:
                quantize(model) if int8 else pack(model)
        # Not asked for at each call: another call may have set it to 1 meanwhile.
        self.most_threads = min(torch.get_num_threads(), cores())
        self.searches: set[BeamSearch] = set()  # that are running

    def stop(self) -> None:
        """End running translations: they raise RuntimeError. fairseq's own search does not end."""
        for search in list(self.searches):
            search.stop()

    @without_default_device()
    def translate_batch(
        self,
        texts: Iterable[str],
        source: str | None = None,
        target: str | None = None,
        options: Options = Options(),
        done: Callable[[int, Translation], None] = lambda number, translation: None,
        known: Set[int] = frozenset(),
    ) -> list[Translation]:
        """Translations in the order of the texts; those of texts without words are empty.

        A text that has more tokens than ``divide_above`` or the model's limit is divided at ends of
        sentences, and the translations of the parts are joined with blanks (not after "。" and the like).
        With ``by_sentence``, every text is divided at all of them, and line breaks and blanks are kept.

        Args:
            source, target: languages; optional if only one direction is possible.
            done: called with the index and the translation of each text, the longest texts first.
            known: indices of texts that need no translation: theirs are None. The others have the same
                batches, and so the same translations, as without ``known``.

        Raises:
            UsageError: the direction is unknown or ambiguous, or a text is not a string.
        """
        texts = checked_texts(texts)
        task = self.translator.task_for(source, target)
        divided = [self._parts(text, options) for text in texts]
        places = [
            (text, part) for text, (parts, _) in enumerate(divided) for part in range(len(parts))
        ]
        found: list[list] = [[None] * len(parts) for parts, _ in divided]
        results: list = [None] * len(texts)

        def join(text: int) -> None:
            gaps = divided[text][1]
            results[text] = joined(texts[text], found[text], gaps, options.nbest, options.lenpen)
            done(text, results[text])

        for text, (parts, _) in enumerate(divided):
            if not parts and text not in known:
                join(text)
        flat, begins = [divided[t][0][p] for t, p in places], [not part for _, part in places]
        # fairseq's sampling of a batch depends on the batches before it.
        skipped = frozenset() if options.sampling and not self.ours else known
        needless = {index for index, (text, _) in enumerate(places) if text in skipped}
        for batch, translations in self._translate(task, flat, begins, options, needless):
            for index, translation in zip(batch, translations, strict=True):
                text, part = places[index]
                found[text][part] = translation
                if None not in found[text] and text not in known:
                    join(text)
        return results

    def _parts(self, text: str, options: Options) -> tuple[list[str], list[str]]:
        """The parts that are translated separately, and the gaps around them.

        A text without subwords has no parts.
        """
        if not self.translator.has_words(text):
            return [], [""]
        # Including the end of sentence; the model may add the token of a language.
        longest = min(options.divide_above + 1, self.translator.max_positions[0] - 1)

        def fits(part: str) -> bool:
            # A token has at least one letter; the initial blank and the end of sentence may be tokens, too.
            # Normalisation may expand letters beyond ASCII.
            if part.isascii() and len(part) + 2 <= longest:
                return True
            return len(encoded(self.translator, part, self.translator.src_dict)) <= longest

        sentences, gaps = split_sentences(text) if options.by_sentence else ([text], ["", ""])
        divided = [divide(sentence, fits) for sentence in sentences]
        within = [[gap, *[" "] * (len(parts) - 1)] for gap, parts in zip(gaps, divided)]
        return list(itertools.chain(*divided)), [*itertools.chain(*within), gaps[-1]]

    def _translate(
        self,
        task,
        texts: list[str],
        begins: list[bool],
        options: Options,
        needless: Set[int],
    ) -> Iterator[tuple[list[int], list[Translation]]]:
        """Indices and translations of each batch.

        Args:
            begins: whether each text is the first part of a whole one.
            needless: indices; batches of these alone are left out.
        """
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
            if prefix is not None:
                most = options.max_len_a * int(lengths[batch].min()) + options.max_len_b
                most = int(min(most, *(each.max_decoder_positions() - 1 for each in self.models)))
                if prefix.shape[1] > most:
                    limits = "--max-len-a, --max-len-b and the model"
                    expected = f"expected at most {most} subwords, the limit of {limits}"
                    raise UsageError(f"--prefix {options.prefix!r:.60}: {expected}")
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

        share = max(_FEW_TOKENS, int(lengths.sum()) // max(self.threads, 1))
        limit = min(share, self.max_tokens // max(self.threads, 1))
        batches = by_length(lengths.tolist(), limit, self.max_sentences)
        batches = [batch for batch in batches if not needless.issuperset(batch)]
        threads = min(self.threads, len(batches))
        self.searches |= {search} if self.ours else set()
        try:
            yield from in_threads(translate, batches, threads, search.stop if threads > 1 else None)
        finally:
            self.searches -= {search}

    @property
    def threads(self) -> int:
        """The number of batches that are translated at a time; 0: see `in_threads`."""
        on_cpu = self.translator.device.type == "cpu"
        return self.most_threads if on_cpu and self.ours else 0

    def _search(self, task, options: Options):
        if self.ours:
            return BeamSearch(task.target_dictionary, options)
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
