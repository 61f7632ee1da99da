"""Many texts at a time, to hypotheses with tokens, scores and requested capacity."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from fairseq import utils
from omegaconf import open_dict
from torch import Tensor

from smoe_fairseq.models.smoe_transformer import SMoETransformerModel
from smoe_fairseq.models.translator import Translator
from smoe_fairseq.translation.batches import by_length
from smoe_fairseq.translation.beam_search import BeamSearch
from smoe_fairseq.translation.hypothesis import Translation, joined
from smoe_fairseq.translation.long_text import divide
from smoe_fairseq.translation.readout import Readout
from smoe_fairseq.translation.threads import in_threads

MAX_TOKENS = 16384  # of source, padding included, that are translated at a time


@dataclass(frozen=True)
class Options:
    """How to search; names and defaults are fairseq's."""

    beam: int = 5
    nbest: int = 1
    lenpen: float = 1.0
    unkpen: float = 0.0
    min_len: int = 1
    max_len_a: float = 0.0
    max_len_b: int = 200
    divide_above: int = 200  # tokens of a text; as many as a translation may have
    requested: bool = False  # whether the requested capacity is wanted, which takes one more pass


class BatchTranslator:
    """A loaded model.

    Args:
        translator: of `SMoETransformerModel.from_pretrained`; its model may be one of fairseq's own, too,
            which is then searched by fairseq's generator.
        max_tokens: see `MAX_TOKENS`.
    """

    def __init__(self, translator: Translator, max_tokens: int = MAX_TOKENS):
        self.translator = translator
        self.task = translator.task
        self.max_tokens = max_tokens

    def translate_batch(
        self,
        texts: Sequence[str],
        source: str | None = None,
        target: str | None = None,
        options: Options = Options(),
        done: Callable[[int], None] = lambda number: None,
    ) -> list[Translation]:
        """Translations in the order of the texts; one without words has an empty hypothesis.

        A text of more than ``divide_above`` tokens, or than the model takes, is divided at the ends of its
        sentences, and the translations of the parts are joined with blanks.

        Args:
            source, target: languages; may be left out where only one direction is possible.
            done: is told after each batch how many texts were in it.

        Raises:
            UsageError: the direction is not known or not clear.
        """
        self.translator.turn_to(source, target)
        parts = [self._parts(text, options) for text in texts]
        flat = [part for of_text in parts for part in of_text]
        done(sum(not of_text for of_text in parts))
        left, text_of = [len(of_text) for of_text in parts], []
        for number, of_text in enumerate(parts):
            text_of += [number] * len(of_text)
        found: dict[int, Translation] = {}
        for batch, translations in self._translate(flat, options):
            found.update(zip(batch, translations, strict=True))
            complete = 0
            for index in batch:
                left[text_of[index]] -= 1
                complete += not left[text_of[index]]
            done(complete)
        remaining = iter(found[index] for index in range(len(flat)))
        return [
            joined(text, [next(remaining) for _ in of_text], options.lenpen)
            for text, of_text in zip(texts, parts, strict=True)
        ]

    def _parts(self, text: str, options: Options) -> list[str]:
        """What is translated by itself; nothing of a text without subwords, such as blanks of no width."""
        if not self.translator.has_words(text):
            return []
        # With the end of sentence; and there may be the token of a language.
        longest = min(options.divide_above + 1, self.translator.max_positions[0] - 1)

        def fits(part: str) -> bool:
            # A token has a letter at least; there may be one for the blank before, and one for the end. A
            # letter beyond ASCII may become several before that.
            few = part.isascii() and len(part) + 2 <= longest
            return few or len(self._encode(part)) <= longest

        return divide(text, fits)

    def _encode(self, text: str) -> Tensor:
        translator = self.translator
        return translator.binarize(translator.apply_bpe(translator.tokenize(text)))

    def _translate(
        self, texts: list[str], options: Options
    ) -> Iterator[tuple[list[int], list[Translation]]]:
        """Batches: indices and translations."""
        ids = [self._encode(text) for text in texts]
        if not ids:
            return
        lengths = np.array([len(i) for i in ids])
        dataset = self.task.build_dataset_for_inference(ids, lengths)
        search, readout = self._search(options), Readout(self.translator)

        def translate(batch: list[int]) -> tuple[list[int], list[Translation]]:
            sample = dataset.collater([dataset[index] for index in batch])
            sample = utils.apply_to_sample(lambda x: x.to(self.translator.device), sample)
            with torch.inference_mode():
                found = self.task.inference_step(search, self.translator.models, sample)
            order = sample["id"].tolist()
            return order, readout.translations(
                [texts[index] for index in order],
                sample["net_input"]["src_tokens"],
                [hypotheses[: options.nbest] for hypotheses in found],
                requested=options.requested and self._is_ours(),
            )

        batches = list(by_length(lengths.tolist(), self.max_tokens // self.threads))
        threads = min(self.threads, len(batches))
        stop = search.stop if threads > 1 else None
        yield from in_threads(translate, batches, threads, stop)

    @property
    def threads(self) -> int:
        """Batches at a time."""
        on_cpu = self.translator.device.type == "cpu"
        return torch.get_num_threads() if on_cpu and self._is_ours() else 1

    def _search(self, options: Options):
        """Ours, or fairseq's for its own models."""
        if self._is_ours():
            values = {name: getattr(options, name) for name in BeamSearch.options()}
            return BeamSearch(self.task.target_dictionary, **values)
        settings = copy.deepcopy(self.translator.cfg.generation)
        with open_dict(settings):
            for name, value in vars(options).items():
                if name in BeamSearch.options() or name == "nbest":
                    setattr(settings, name, value)
        return self.task.build_generator(self.translator.models, settings)

    def _is_ours(self) -> bool:
        models = self.translator.models
        return len(models) == 1 and isinstance(models[0], SMoETransformerModel)
