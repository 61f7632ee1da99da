"""The pieces of a sentencepiece model: read, added and removed, without other libraries."""

import struct
from collections.abc import Collection, Iterator, Mapping
from random import Random

from smoe_fairseq.subwords import BEGINS_WORD

# A sentencepiece model is a protobuf message: field 1 has the pieces, 2 the settings of training, and 3 those
# of the normaliser. Appended bytes edit it, since repeated fields are joined and later values hold.

_NORMAL = 1  # type of a piece; others are <unk>, control symbols, bytes and symbols of the user
_AS_IS = b"\x1a\x06\x12\x00\x18\x00\x20\x00"  # no rules, no space in front, no space removed


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number and the position behind it."""
    value = shift = 0
    while message[at] >= 128:
        value |= (message[at] & 127) << shift
        at, shift = at + 1, shift + 7
    return value | message[at] << shift, at + 1


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes, bytes]]:
    """The number of each field, its value, and all its bytes."""
    at = 0
    while at < len(message):
        start = at
        key, at = _varint(message, at)
        if key & 7 == 0:
            value, at = _varint(message, at)
        else:
            length, at = _varint(message, at) if key & 7 == 2 else ({1: 8, 5: 4}[key & 7], at)
            value, at = message[at : at + length], at + length
        yield key >> 3, value, message[start:at]


def _message(content: bytes, field: int = 1) -> bytes:
    """The content as a field, with its length."""
    length, size = b"", len(content)
    while size >= 128:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    return bytes([field << 3 | 2]) + length + bytes([size]) + content


def new_model(is_bpe: bool, rules: bytes, scores: Mapping[str, float]) -> bytes:
    """A sentencepiece model of pieces after ``<unk> <s> </s>``; ``rules`` are normalisation's, compiled."""
    special = ((b"<unk>", 2), (b"<s>", 3), (b"</s>", 3))
    model = b"".join(_message(_message(piece) + bytes([0x18, type_])) for piece, type_ in special)
    model += _message(bytes([0x18, 2 if is_bpe else 1]), 2) + _message(_message(rules, 2), 3)
    return with_pieces(model, scores)


def pieces_of(model: bytes) -> dict[str, tuple[int, float]]:
    """Type and score of each piece of a sentencepiece model, in its order."""
    pieces = {}
    for number, content, _ in _fields(model):
        if number == 1:
            parts = {part: value for part, value, _ in _fields(content)}
            score = struct.unpack("<f", parts[2])[0] if 2 in parts else 0.0
            pieces[parts[1].decode()] = parts.get(3, _NORMAL), score
    return pieces


def is_bpe(model: bytes) -> bool:
    """Whether a sentencepiece model merges pairs; otherwise it maximises the pieces' scores (unigram)."""
    settings = b"".join(value for number, value, _ in _fields(model) if number == 2)
    return {number: value for number, value, _ in _fields(settings)}.get(3, 1) == 2


def with_pieces(model: bytes, scores: Mapping[str, float]) -> bytes:
    """The model with more pieces after its own."""
    return model + b"".join(
        _message(_message(piece.encode()) + b"\x15" + struct.pack("<f", score))
        for piece, score in scores.items()
    )


def only_pieces(model: bytes, kept: Collection[str]) -> bytes:
    """The model with the pieces of ``kept``, all letters, and what are no ordinary pieces."""
    if is_bpe(model):  # merges on the way to a piece
        scores = {piece: score for piece, (_, score) in pieces_of(model).items()}
        kept = set(kept).union(*(made for piece in kept for made in merges(piece, scores)))
    parts = []
    for number, content, part in _fields(model):
        if number == 1:
            values = {number: value for number, value, _ in _fields(content)}
            piece = values[1].decode()
            if values.get(3, _NORMAL) == _NORMAL and len(piece) > 1 and piece not in kept:
                continue
        parts.append(part)
    return b"".join(parts)


def merges(
    letters: str, scores: Mapping[str, float], dropout: float = 0.0, random: Random | None = None
) -> Iterator[list[str]]:
    """The letters, and the pieces after each merge of BPE, which skips one with probability ``dropout``."""
    pieces = [*letters]
    while True:
        yield pieces
        pairs = [
            (-scores[both], i)
            for i, both in enumerate(map("".join, zip(pieces, pieces[1:])))
            if both in scores and not (dropout and random.random() < dropout)
        ]
        if not pairs:
            return
        i = min(pairs)[1]
        pieces = [*pieces[:i], pieces[i] + pieces[i + 1], *pieces[i + 2 :]]


class Cutter:
    """Cuts a piece as a sentencepiece model cuts text that has no longer pieces."""

    def __init__(self, model: bytes):
        from sentencepiece import SentencePieceProcessor

        self.rules = SentencePieceProcessor(model_proto=model)
        self.model = SentencePieceProcessor(model_proto=model + _AS_IS)
        self.scores = [self.model.get_score(i) for i in range(self.model.get_piece_size())]
        self.unknown = min(self.scores) - 10  # as sentencepiece counts a letter without a piece

    def normalized(self, text: str) -> str:
        """Text after the model's rules, without marks of words."""
        return self.rules.normalize(text).replace(BEGINS_WORD, " ")

    def cut(self, piece: str) -> list[str]:
        return self.model.encode(piece.replace(BEGINS_WORD, " "), out_type=str)

    def score(self, piece: str) -> float:
        """The sum of the scores of a piece's parts."""
        numbers = self.model.piece_to_id(self.cut(piece))
        return sum(self.unknown if n == self.model.unk_id() else self.scores[n] for n in numbers)
