"""Subword regularisation (``--subword-sampling ALPHA``): training text is split anew in each epoch.

BPE-dropout (Provilkov et al. 2020) for a BPE model of sentencepiece; for a unigram model one of the best
segmentations of each word (Kudo 2018). Validation and test text is not sampled.

sentencepiece's own sampling is not used: with the same seed, version 0.2.3 draws differently in each process,
so ranks would disagree and no run could resume.
"""

import functools
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq.data import BaseWrapperDataset, Dictionary, FairseqDataset, LanguagePairDataset
from fairseq.data import TransformEosLangPairDataset as WithLanguageTokens
from fairseq.utils import split_paths
from torch import Tensor

from smoe_fairseq.checkpoints.pieces import merges
from smoe_fairseq.errors import UsageError
from smoe_fairseq.subwords import BEGINS_WORD, read_subwords, subwords_of

FLAG = "--subword-sampling"
MEASURED = 256  # sentences from which the growth of lengths is estimated
QUANTILE = 0.95  # of the growth of lengths, for which batches have room
MAX_DRAWS = 16  # for a segmentation that fits; then a sentence stays unchanged
N_BEST = 16  # segmentations of a word
MAX_CACHED = 1 << 15  # words
MAX_PIECES = 8  # of a cached word; a longer one may be a sentence without blanks, seldom met again
logger = logging.getLogger(__name__)


def sample_subwords(task, subset: str, alpha: float, seed: int, most: tuple[int, int]) -> None:
    """Make the task sample the subwords of its training text.

    Args:
        subset: the name of the training text.
        alpha: for a BPE model the probability to skip a merge; for a unigram model the exponent of the
            probabilities: smaller values give more variety.
        most: the maximum lengths of source and target in tokens.

    Raises:
        UsageError: the data has no sentencepiece model or, once it is loaded, no pairs of sentences.
    """
    options = task.cfg or task.args
    data = split_paths(getattr(options, "data", None) or "")[0]
    model = subwords_of(data)
    if model is None:
        raise UsageError(f"{FLAG}: expected the subword model spm.model in {data}")
    if getattr(options, "num_batch_buckets", 0):
        raise UsageError(f"--num-batch-buckets with {FLAG}, which changes lengths: leave one out")
    samplers = [Sampler(model, d, alpha) for d in (task.source_dictionary, task.target_dictionary)]
    load = task.load_dataset

    @functools.wraps(load)
    def load_dataset(split, epoch=1, **others):
        def sampled(pairs):
            is_sampled = isinstance(pairs, SampledPairs)
            return pairs if is_sampled else SampledPairs(pairs, samplers, seed, most, first)

        load(split, epoch=epoch, **others)
        dataset = task.datasets[split]
        # fairseq tells the first of the virtual epochs that read all data once.
        first = epoch - (epoch - 1) % getattr(dataset, "num_virtual_epochs", 1)
        if split == subset and isinstance(getattr(dataset, "datasets", None), list):
            dataset.datasets = [sampled(part) for part in dataset.datasets]
        elif split == subset:
            task.datasets[split] = sampled(dataset)

    task.load_dataset = load_dataset


class Sampler:
    """Samples the subwords of sentences of token ids, word by word.

    Words that the model would split differently, such as a language's token, stay unchanged.
    """

    def __init__(self, model: Path, dictionary: Dictionary, alpha: float):
        self.model = read_subwords(model)
        self.alpha, self.ids, self.symbols = alpha, dictionary.indices, dictionary.symbols
        self.special = dictionary.nspecial
        pieces = map(self.model.id_to_piece, range(self.model.get_piece_size()))
        self.scores = {piece: self.model.get_score(i) for i, piece in enumerate(pieces)}
        self.known = self.scores.keys() & self.ids.keys()
        self.cache: dict[tuple[str, ...], Any] = {}  # results of `_segmentations` by word
        try:
            self.is_unigram = bool(self.model.nbest_encode("a", nbest_size=1))
        except RuntimeError:  # sentencepiece 0.2.1 returns nothing
            self.is_unigram = False

    def __call__(self, tokens: Tensor, seed: str, most: int) -> Tensor:
        """Another segmentation of at most ``most`` tokens, determined by the seed."""
        words: list[list[str]] = []
        for id_ in tokens.tolist():
            symbol = self.symbols[id_]
            if not words or id_ < self.special or symbol.startswith(BEGINS_WORD):
                words.append([])
            words[-1].append(symbol)
        found = [(word, self._found(word)) for word in map(tuple, words)]
        generator = random.Random(seed)
        for _ in range(MAX_DRAWS):
            drawn = [piece for each in found for piece in self._draw(*each, generator)]
            if len(drawn) <= most:
                return torch.tensor([self.ids[piece] for piece in drawn]).to(tokens)
        return tokens

    def _found(self, word: tuple[str, ...]):
        """`_segmentations`, from the cache unless the word is long."""
        if len(word) > MAX_PIECES:
            return self._segmentations(word)
        if word not in self.cache:
            if len(self.cache) == MAX_CACHED:
                self.cache.clear()
            self.cache[word] = self._segmentations(word)
        return self.cache[word]

    def _draw(self, word: tuple[str, ...], found, generator: random.Random) -> Sequence[str]:
        if found is None:
            return word
        if not self.is_unigram:
            *_, drawn = merges(found, self.scores, self.alpha, generator)
            return drawn if self.ids.keys() >= set(drawn) else word
        return generator.choices(found[0], cum_weights=found[1])[0]

    def _segmentations(self, word: tuple[str, ...]):
        """For a unigram model the best segmentations and their cumulative weights; for BPE the letters.

        None for a word that stays unchanged.
        """
        text = self.model.decode(list(word))
        if not text or tuple(self.model.encode(text, out_type=str)) != word:
            return None
        if not self.is_unigram:
            letters = "".join(word)
            *_, pieces = merges(letters, self.scores)
            return letters if pieces == [*word] else None
        best = self.model.nbest_encode(text, nbest_size=N_BEST, out_type=str)
        best = [pieces for pieces in best if self.known >= set(pieces)]
        if not best:
            return None
        totals = np.array([sum(self.scores[piece] for piece in pieces) for pieces in best])
        return best, np.exp(self.alpha * (totals - totals.max())).cumsum().tolist()


class SampledPairs(BaseWrapperDataset):
    """Pairs of sentences with sampled subwords, determined by seed, epoch and pair.

    fairseq makes batches by `sizes` before anything is sampled. So these are upper bounds, which keep batches
    within ``--max-tokens``: a sentence's length times a factor above that of 95 percent of the draws.
    Longer draws are repeated.

    Args:
        samplers: of source and target.
        most: maximum of the bounds, unless the sentence itself is longer.
    """

    def __init__(self, pairs, samplers, seed: int, most: tuple[int, int], epoch: int):
        if not isinstance(pairs, LanguagePairDataset | WithLanguageTokens):
            raise UsageError(f"{FLAG} needs --task translation or translation_multi_simple_epoch")
        super().__init__(pairs)
        self.samplers, self.seed, self.epoch = samplers, seed, 0
        lengths_N2 = np.asarray(pairs.sizes)
        some_S = np.unique(np.linspace(0, len(pairs) - 1, MEASURED).astype(int))
        long = (1 << 30, 1 << 30)
        drawn_S2 = np.array([[len(t) for t in self._draw(pairs[i], long)] for i in some_S])
        growth_2 = np.quantile(drawn_S2 / lengths_N2[some_S], QUANTILE, axis=0).clip(min=1)
        bounds_N2 = np.minimum(np.ceil(lengths_N2 * growth_2), most)
        self._sizes_N2 = np.maximum(bounds_N2, lengths_N2).astype(lengths_N2.dtype)
        self.epoch = epoch  # set here, so that sizes do not depend on it and runs can resume
        logger.info(
            f"{FLAG}: sentences have {drawn_S2.sum() / lengths_N2[some_S].sum():.2f} times the subwords; "
            f"batches have room for {growth_2[0]:.2f} (source) and {growth_2[1]:.2f} (target)"
        )

    def _draw(self, example: dict, most) -> list[Tensor]:
        seed = f"{self.seed} {self.epoch} {example['id']}"
        sides = zip(self.samplers, ("source", "target"), most, strict=True)
        return [draw(example[side], f"{seed} {side}", int(limit)) for draw, side, limit in sides]

    def __getitem__(self, index):
        example = self.dataset[index]
        source, target = self._draw(example, self._sizes_N2[index])
        return {**example, "source": source, "target": target}

    def set_epoch(self, epoch):
        super().set_epoch(epoch)
        self.epoch = epoch

    def collater(self, samples, **options):
        return self.dataset.collater(samples, **options)

    @property
    def sizes(self):
        return self._sizes_N2

    def size(self, index):
        return tuple(self._sizes_N2[index])

    def num_tokens(self, index):
        return self._sizes_N2[index].max()

    def num_tokens_vec(self, indices):
        return self._sizes_N2[indices].max(1)

    def batch_by_size(self, indices, **options):
        return FairseqDataset.batch_by_size(self, indices, **options)
