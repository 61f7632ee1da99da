"""Binarised text, written byte for byte as by ``fairseq-preprocess``.

The format is fairseq 0.12.2's ``MMapIndexedDataset``: a ``.bin`` file of all token numbers, and an ``.idx``
file with the lengths and offsets of the sentences.
"""

import io
import struct
from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import check_plain, read_plain, read_text, whole_files, write_whole
from smoe_fairseq.recipes.data.raw import SPLITS
from smoe_fairseq.recipes.data.text_files import Chunk, map_chunks
from smoe_fairseq.recipes.datasets import Dataset
from smoe_fairseq.recipes.folders import print_written, shard_folders
from smoe_fairseq.subwords import SPECIAL, write_sums

SUFFIXES = ("bin", "idx")
EOS, UNKNOWN = SPECIAL.index("</s>"), SPECIAL.index("<unk>")
_HEADER = struct.Struct("<9sQBQ")  # magic, version, code of the dtype, sentences
_MAGIC = b"MMIDIDX\0\0"
_CODES = {np.dtype(np.uint16): 8, np.dtype(np.uint32): 9}


def binarise(
    dataset: Dataset, text: Path, dictionary: Path, output: Path, workers: int = 1
) -> None:
    """Binarise every pair's splits in ``text`` (and its shards) to ``output``.

    Each shard gets ``{split}.{pair}.{language}.bin`` and ``.idx``, which serve both directions of a pair,
    and a copy of the dictionary for each language. The result does not depend on ``workers``. Files that an
    interrupted call has written are kept. Raises OSError if a pair has no text to train or validate, and
    UsageError for an invalid dictionary.
    """
    files = {
        output / folder.relative_to(text) / file.name: file
        for i, folder in enumerate(shard_folders(text))
        for pair in (*dataset.pairs, *(() if i else dataset.keep))
        for file in _files(
            folder, pair, SPLITS[2:] if pair in dataset.keep else SPLITS[: 1 if i else 3]
        )
    }
    shards = sorted({target.parent for target in files})
    vocabulary = read_dictionary(dictionary)
    for shard in shards:
        shard.mkdir(parents=True, exist_ok=True)
        for language in dataset.languages:
            write_whole(shard / f"dict.{language}.txt", read_plain(dictionary), called=str(output))
    left = {
        file: tuple(f"{target}.{suffix}" for suffix in SUFFIXES)
        for target, file in files.items()
        if not Path(f"{target}.{SUFFIXES[-1]}").exists()
    }
    counts = binarise_files(vocabulary, left, workers)
    for shard in shards:
        write_sums(shard)
    print_written(output, len(files), len(left), counts)


def _files(folder: Path, pair: str, splits: Sequence[str]) -> Iterator[Path]:
    """The pair's files; fairseq looks for validation and test in the first shard only."""
    for split in splits:
        files = [folder / f"{split}.{pair}.{language}" for language in pair.split("-")]
        if split != "test" or all(file.is_file() for file in files):
            yield from files


class Vocabulary(dict[str, int]):
    """Maps the words of a dictionary to their numbers, other words to that of ``<unk>``."""

    def __missing__(self, _word: str) -> int:
        return UNKNOWN


def read_dictionary(file: Path) -> Vocabulary:
    """A dictionary in fairseq's format, numbered after `SPECIAL`; raises UsageError for another format."""
    words = Vocabulary({word: number for number, word in enumerate(SPECIAL)})
    for line in io.StringIO(read_text(file), newline=None):
        word, separator, count = line.rstrip().rpartition(" ")
        if not separator or not count.lstrip("-").isdecimal() or word in words:
            expected = f"a new word, a space and a count in each line, not {line.rstrip()!r}"
            raise UsageError(f"{file} is not a dictionary: expected {expected}")
        words[word] = len(words)
    return words


def _numbers(known: Vocabulary, dtype: np.dtype, chunk: Chunk) -> tuple[bytes, np.ndarray, int]:
    """The bytes of a chunk's token numbers, the sentence lengths and the count of unknown words."""
    numbers, lengths = array("i"), array("i")
    for line in chunk.lines():
        words = line.split()
        numbers.extend(map(known.__getitem__, words))
        numbers.append(EOS)
        lengths.append(len(words) + 1)
    content = np.frombuffer(numbers, dtype=np.int32)
    unknown = int((content == UNKNOWN).sum())
    return content.astype(dtype).tobytes(), np.array(lengths, dtype=np.int32), unknown


def binarise_files(
    vocabulary: Vocabulary, files: dict[Path, tuple[str, str]], workers: int = 1
) -> str:
    """Write a ``.bin`` and an ``.idx`` file for each key of ``files``; returns counts, as words to print."""
    dtype = np.dtype(np.uint16 if len(vocabulary) < 65500 else np.uint32)  # as fairseq chooses
    sentences = tokens = unknown = 0
    with map_chunks("binarise", partial(_numbers, vocabulary, dtype), files, workers) as by_file:
        for file, results in by_file:
            lengths = [np.zeros(0, dtype=np.int32)]
            with whole_files(files[file]) as (data, index):
                with open(data, "wb") as output:
                    for content, chunk_lengths, chunk_unknown in results:
                        output.write(content)
                        lengths.append(chunk_lengths)
                        unknown += chunk_unknown
                all_lengths = np.concatenate(lengths)
                Path(index).write_bytes(_index(all_lengths, dtype))
            sentences += len(all_lengths)
            tokens += int(all_lengths.sum(dtype=np.int64))
    return f"{sentences:,} sentences, {tokens:,} tokens, {unknown:,} of them unknown"


def _index(lengths: np.ndarray, dtype: np.dtype) -> bytes:
    """The content of an ``.idx`` file: ``lengths`` (int32) of sentences whose tokens are of ``dtype``."""
    starts = np.zeros(len(lengths), dtype=np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=starts[1:])
    header = _HEADER.pack(_MAGIC, 1, _CODES[dtype], len(lengths))
    return header + lengths.tobytes() + (starts * dtype.itemsize).tobytes()


def token_dtype(index: Path) -> np.dtype:
    """The dtype of the tokens in the ``.bin`` file of an ``.idx`` file that `count_sentences` accepts."""
    with open(index, "rb") as file:
        code = _HEADER.unpack(file.read(_HEADER.size))[2]
    return next((dtype for dtype, number in _CODES.items() if number == code), np.dtype(np.int32))


def read_index(index: Path) -> np.ndarray:
    """The sentence lengths with end symbols, int32 ``(sentences,)``; raises as `count_sentences`."""
    return np.fromfile(index, np.int32, count_sentences(index), offset=_HEADER.size)


def count_sentences(index: Path) -> int:
    """The number of sentences in an ``.idx`` file; raises UsageError if it is invalid or cut off."""
    check_plain(index)
    with open(index, "rb") as file:
        header = file.read(_HEADER.size)
    if len(header) == _HEADER.size and header.startswith(_MAGIC):
        sentences = _HEADER.unpack(header)[-1]
        if index.stat().st_size == _HEADER.size + 12 * sentences:  # an int32 and an int64 each
            return sentences
    raise UsageError(f"{index} is cut off, or not an index of fairseq-preprocess")
