"""The sentencepiece model beside the dictionaries: how it is found, read and checked."""

import re
from pathlib import Path

from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import read_plain

NAMES = ("spm.model", "sentencepiece.bpe.model")  # of our recipes and of fairseq
BEGINS_WORD = "\u2581"  # sentencepiece's mark for the beginning of a word


def read_subwords(path: Path | str):
    """A sentencepiece model from a plain file; raises UsageError as `read_plain`, or if it is not one."""
    from sentencepiece import SentencePieceProcessor

    content = read_plain(path) or b"0"  # sentencepiece accepts an empty model
    try:
        return SentencePieceProcessor(model_proto=content)
    except Exception:  # from C++, of various types
        raise UsageError(f"{path} is not a model of sentencepiece") from None


def subwords_of(data: str) -> Path | None:
    """The sentencepiece model in the folder of the dictionaries; None if it has none."""
    folder = Path(data)
    folders = [folder, folder.parent] if re.fullmatch(r"shard\d+", folder.name) else [folder]
    places = (place / name for place in folders for name in NAMES)
    return next((place for place in places if place.is_file()), None)


def has_pieces(dictionary) -> bool:
    """Whether the dictionary contains sentencepiece's pieces."""
    return any(symbol.startswith(BEGINS_WORD) for symbol in dictionary.symbols)


def checked_subwords(data: str, dictionary, needed: bool = True) -> Path | None:
    """`subwords_of`, checked against the dictionary; None for text without subwords.

    Some words are no pieces of the model: languages, and characters that it does not cover.

    Args:
        needed: whether the model is required if the dictionary contains pieces.

    Raises:
        UsageError: the model is missing or invalid, or a third of the words are no pieces of it.
    """
    subwords = subwords_of(data)
    if subwords is None:
        if needed and has_pieces(dictionary):
            raise UsageError(
                f"{data} has no {NAMES[0]}: expected the sentencepiece model of the dictionaries in their "
                "folder"
            )
        return None
    words = [word for word in dictionary.symbols[dictionary.nspecial :] if word[:2] != "__"]
    check_pieces(subwords, [word for word in words if not word.startswith("madeupword")])
    return subwords


def check_pieces(subwords: Path, words: list[str]) -> None:
    """Raise UsageError if the sentencepiece model is invalid, or a third of the words are no pieces of it."""
    model = read_subwords(subwords)
    numbers = model.piece_to_id(words)
    unknown = [w for w, number in zip(words, numbers, strict=True) if number == model.unk_id()]
    if 3 * len(unknown) > len(words):
        raise UsageError(
            f"{subwords} does not fit the dictionaries: {len(unknown):,} of {len(words):,} words are no "
            f"pieces of it, such as {unknown[0][:40]!r}"
        )
