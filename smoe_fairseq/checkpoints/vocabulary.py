"""Another vocabulary for a trained model: more languages, more subwords, or fewer subwords.

The embeddings, the dictionary and the sentencepiece model change together. V is the number of words, D the
dimension of the embeddings.
"""

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from smoe_fairseq.checkpoints.pieces import Cutter, is_bpe, only_pieces, pieces_of, with_pieces
from smoe_fairseq.checkpoints.sets import memory_key
from smoe_fairseq.errors import UsageError
from smoe_fairseq.subwords import BEGINS_WORD

_EMBEDDINGS = (
    "encoder.embed_tokens.weight",
    "decoder.embed_tokens.weight",
    "decoder.output_projection.weight",
)
_TABLE = re.compile(r".+\.gates\.\d+\.table")  # the expert of each word (`HashGate`)
_LONGEST = 16  # letters of a piece, as sentencepiece learns by default
_LATER = 1.0  # by how much a new piece of a unigram model scores above the pieces that it replaces


class Vocabulary:
    """A model's words, and what belongs to them.

    Args:
        weights: the parameters by name.
        symbols: the words of all V rows of the embeddings.
        subwords: the sentencepiece model, some of whose pieces are ``symbols``.

    Raises:
        UsageError: the embeddings have another number of rows.
    """

    def __init__(self, weights: Mapping[str, Tensor], symbols: Sequence[str], subwords: bytes):
        self.weights, self.symbols, self.subwords = dict(weights), list(symbols), subwords
        for name in self._by_word():
            if len(weights[name]) != len(symbols):
                raise UsageError(
                    f"{name} has {len(weights[name]):,} rows, and the dictionary {len(symbols):,} words"
                )

    @property
    def bytes(self) -> int:
        """The memory of the embeddings; tied ones count once."""
        tensors = (self.weights[name] for name in _EMBEDDINGS if name in self.weights)
        return sum({memory_key(t): t.numel() * t.element_size() for t in tensors}.values())

    def _by_word(self) -> list[str]:
        """The names of the tensors that have a row per word."""
        return [name for name in self.weights if name in _EMBEDDINGS or _TABLE.fullmatch(name)]

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a function to the embeddings (V, D) and tables of experts (V,); tied ones stay tied."""
        changed = {}
        for name in self._by_word():
            tensor = self.weights[name]
            key = memory_key(tensor)
            changed.setdefault(key, (tensor, change(tensor)))  # the old one keeps its address
            self.weights[name] = changed[key][1]

    def append(self, parts: Mapping[str, Sequence[str]]) -> None:
        """Append words: embeddings are the means of those of their parts, the expert is that of the first."""
        row = {symbol: i for i, symbol in enumerate(self.symbols)}
        unknown = row["<unk>"]
        rows = [[row.get(part, unknown) for part in each] or [unknown] for each in parts.values()]

        def grown(tensor: Tensor) -> Tensor:
            if tensor.dim() == 1:
                return torch.cat([tensor, tensor[[each[0] for each in rows]]])
            means = [tensor[each].float().mean(0).to(tensor.dtype) for each in rows]
            return torch.cat([tensor, torch.stack(means)])

        if parts:
            self._change(grown)
            self.symbols += parts

    def add_pieces(self, texts: Iterable[str], others: Iterable[str], number: int) -> list[str]:
        """Append pieces that shorten ``texts``, and letters of it that have none; returns the new pieces.

        The pieces continue the merges of byte-pair encoding from the present pieces. ``others``, the text of
        the languages that are to stay as they are, is cut as before. An embedding is the mean of those of the
        pieces that the piece replaces.

        Args:
            number: the maximum, without letters.
        """
        cutter, known = Cutter(self.subwords), pieces_of(self.subwords)
        lowest = min(score for _, score in known.values())
        others = Counter(word for line in others for word in cutter.normalized(line).split())
        before = {word: cutter.cut(f"{BEGINS_WORD}{word}") for word in others}
        text = Counter(word for line in texts for word in cutter.normalized(line).split())
        # The dictionary may have words that are no pieces.
        taken = {BEGINS_WORD, *known, *self.symbols}
        letters = sorted({c for word in text for c in word} - taken)
        if "<0x00>" in known:  # bytes spell the letters of others
            spelled = {c for word in others for c in word}
            letters = [c for c in letters if c not in spelled]
        taken |= {a + b for parts in before.values() for a, b in zip(parts, parts[1:])}
        ready = with_pieces(self.subwords, dict.fromkeys(letters, lowest))
        cut = Cutter(ready).cut
        words = [(cut(f"{BEGINS_WORD}{word}"), count) for word, count in sorted(text.items())]
        merged = list(_merged(words, taken, number))
        while True:
            if is_bpe(self.subwords):
                scores = {piece: lowest - 1 - i for i, piece in enumerate(merged)}
            else:
                scores = {piece: cutter.score(piece) + _LATER for piece in merged}
            model = with_pieces(ready, scores)
            cut = Cutter(model).cut
            used = {
                p
                for w, parts in before.items()
                if (now := cut(BEGINS_WORD + w)) != parts
                for p in now
            }
            kept = [p for p in merged if p not in used and cut(p) == [p]]
            if kept == merged:
                break
            merged = kept
        added = [*letters, *merged]
        self.append({piece: cutter.cut(piece) for piece in added})
        self.subwords = model
        return added

    def trim(self, pieces: Iterable[str]) -> None:
        """Keep these pieces, all letters, and the words that are no ordinary pieces."""
        before = pieces_of(self.subwords).keys()
        self.subwords = only_pieces(self.subwords, set(pieces))
        removed = before - pieces_of(self.subwords).keys()
        rows = [i for i, symbol in enumerate(self.symbols) if symbol not in removed]
        self.symbols = [self.symbols[i] for i in rows]
        self._change(lambda tensor: tensor[rows])


def _merged(
    words: Sequence[tuple[list[str], int]], refused: set[str], number: int
) -> Iterator[str]:
    """The pieces that byte-pair encoding learns from words, given as their pieces and counts.

    Args:
        refused: pieces that are not to be made.
        number: the maximum.
    """
    counts, places = Counter(), defaultdict(set)
    for i, (parts, count) in enumerate(words):
        for pair in zip(parts, parts[1:]):
            counts[pair] += count
            places[pair].add(i)
    heap = [(-count, pair) for pair, count in counts.items()]
    heapq.heapify(heap)
    made = set()
    while heap and len(made) < number:
        count, pair = heapq.heappop(heap)
        piece = "".join(pair)
        if -count != counts[pair]:  # it has changed since
            if counts[pair]:
                heapq.heappush(heap, (-counts[pair], pair))
            continue
        if -count < 2:
            return
        if piece in refused or len(piece) > _LONGEST or any(p[:3] == "<0x" for p in pair):
            continue
        if piece not in made:
            made.add(piece)
            yield piece
        for i in sorted(places.pop(pair)):
            parts, times = words[i]
            for old in zip(parts, parts[1:]):
                counts[old] -= times
            at = 0
            while at < len(parts) - 1:
                if (parts[at], parts[at + 1]) == pair:
                    parts[at : at + 2] = [piece]
                at += 1
            for new in zip(parts, parts[1:]):
                counts[new] += times
                places[new].add(i)
                heapq.heappush(heap, (-counts[new], new))
