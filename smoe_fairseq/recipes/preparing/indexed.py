"""Binarised text as ``fairseq-preprocess`` writes it (``--dataset-impl mmap``), without importing fairseq.

The format is fairseq 0.12.2's ``MMapIndexedDataset``: a ``.bin`` file of all token numbers, and an ``.idx``
file with the sentences' lengths and the places where they begin.
"""

import struct
from pathlib import Path

import numpy as np

from smoe_fairseq.system.errors import UsageError

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # what every dictionary of fairseq begins with
EOS, UNKNOWN = SPECIAL.index("</s>"), SPECIAL.index("<unk>")
_HEADER = struct.Struct("<9sQBQ")  # magic, version, code of the numbers' type, sentences
_MAGIC = b"MMIDIDX\0\0"
_CODES = {np.dtype(np.uint16): 8, np.dtype(np.uint32): 9}


def number_type(words: int) -> np.dtype:
    """What the numbers of a dictionary of so many words, the special ones included, are kept as."""
    return np.dtype(np.uint16 if words < 65500 else np.uint32)


def index_bytes(lengths: np.ndarray, kind: np.dtype) -> bytes:
    """The content of an ``.idx`` file for sentences of these ``lengths`` (int32) of numbers of a ``kind``."""
    starts = np.zeros(len(lengths), dtype=np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=starts[1:])
    header = _HEADER.pack(_MAGIC, 1, _CODES[kind], len(lengths))
    return header + lengths.tobytes() + (starts * kind.itemsize).tobytes()


def count_sentences(index: Path) -> int:
    """Of an ``.idx`` file; a `UsageError` where it is none, or cut off."""
    with open(index, "rb") as file:
        header = file.read(_HEADER.size)
    if len(header) == _HEADER.size and header.startswith(_MAGIC):
        sentences = _HEADER.unpack(header)[-1]
        if index.stat().st_size == _HEADER.size + 12 * sentences:  # int32 and int64 of each
            return sentences
    raise UsageError(f"{index} is cut off, or not an index of fairseq-preprocess")


class Vocabulary(dict[str, int]):
    """The number of each word of a dictionary; that of ``<unk>`` for all others."""

    def __missing__(self, _word: str) -> int:
        return UNKNOWN


def read_dictionary(file: Path) -> Vocabulary:
    """From fairseq's format: a word and its count on each line, numbered from the special words on.

    Raises:
        UsageError: it is not in this format, or has a word twice.
    """
    words = Vocabulary({word: number for number, word in enumerate(SPECIAL)})
    try:
        with open(file, encoding="utf-8") as lines:
            for line in lines:
                word, separator, count = line.rstrip().rpartition(" ")
                if not separator or not count.lstrip("-").isdecimal() or word in words:
                    raise UsageError(
                        f"{file} is not a dictionary: expected a word that no other line has, a space and a "
                        f"count, not {line.rstrip()!r}"
                    )
                words[word] = len(words)
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text: {error.reason}") from None
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None
    return words
