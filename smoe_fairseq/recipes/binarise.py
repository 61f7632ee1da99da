"""Binarised text: what ``fairseq-preprocess`` writes, byte for byte, without importing fairseq.

The format is fairseq 0.12.2's ``MMapIndexedDataset``: a ``.bin`` file of all token numbers, and an ``.idx``
file with the sentences' lengths and where they begin.
"""

import struct
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import whole_files
from smoe_fairseq.recipes.config import Dataset
from smoe_fairseq.recipes.folders import shard_folders
from smoe_fairseq.recipes.raw import SPLITS
from smoe_fairseq.recipes.text_files import Chunk, chunks, progress, shared

SUFFIXES = ("bin", "idx")
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # the first entries of every dictionary of fairseq
EOS, UNKNOWN = SPECIAL.index("</s>"), SPECIAL.index("<unk>")
_HEADER = struct.Struct("<9sQBQ")  # magic, version, code of the numbers' type, sentences
_MAGIC = b"MMIDIDX\0\0"
_CODES = {np.dtype(np.uint16): 8, np.dtype(np.uint32): 9}


def binarise(
    dataset: Dataset, text: Path, dictionary: Path, output: Path, workers: int = 1
) -> None:
    """Write every pair's splits in ``text`` (and its shards) to ``output`` as fairseq reads them.

    Each shard gets ``{split}.{pair}.{language}.bin`` and ``.idx``, which serve both directions of a pair,
    and the dictionary once for each language. The files are the same for any number of ``workers``.

    Raises:
        UsageError: a pair has no text to train or validate; or see `read_dictionary`.
    """
    files = {
        output / folder.relative_to(text) / file.name: file
        for i, folder in enumerate(shard_folders(text))
        for pair in dataset.pairs
        for file in _files(folder, pair, training_only=i > 0)
    }
    shards = sorted({target.parent for target in files})
    copies = [shard / f"dict.{lang}.txt" for shard in shards for lang in dataset.languages]
    vocabulary = read_dictionary(dictionary)
    targets = [f"{target}.{suffix}" for target in files for suffix in SUFFIXES]
    for shard in shards:
        shard.mkdir(parents=True, exist_ok=True)
    with whole_files([*copies, *targets], called=str(output)) as partials:
        for copy in partials[: len(copies)]:
            Path(copy).write_bytes(dictionary.read_bytes())
        pairs = zip(partials[len(copies) :: 2], partials[len(copies) + 1 :: 2], strict=True)
        written = dict(zip(files.values(), pairs, strict=True))
        told = binarise_files(vocabulary, written, workers)
    print(f"{output}: {len(files)} files, {told}", flush=True)


def _files(folder: Path, pair: str, training_only: bool) -> Iterator[Path]:
    """The pair's files; fairseq looks for validation and test in the first shard only."""
    for split in SPLITS[:1] if training_only else SPLITS:
        files = [folder / f"{split}.{pair}.{language}" for language in pair.split("-")]
        missing = [file for file in files if not file.is_file()]
        if not missing:
            yield from files
        elif split != "test":
            raise UsageError(f"{missing[0]} is missing: {pair} needs it to {split}")


class Vocabulary(dict[str, int]):
    """The number of each word of a dictionary; for any other word that of ``<unk>``."""

    def __missing__(self, _word: str) -> int:
        return UNKNOWN


def read_dictionary(file: Path) -> Vocabulary:
    """Read fairseq's format: a word and its count on each line, numbered after the special words.

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


@dataclass(frozen=True)
class _Binariser:
    """For a chunk: the bytes of its numbers, the lengths of its sentences, the number of unknown words."""

    vocabulary: Vocabulary
    kind: np.dtype

    def __call__(self, chunk: Chunk) -> tuple[bytes, np.ndarray, int]:
        numbers, lengths = array("i"), array("i")
        for line in chunk.lines():
            words = line.split()
            numbers.extend(map(self.vocabulary.__getitem__, words))
            numbers.append(EOS)
            lengths.append(len(words) + 1)
        content = np.frombuffer(numbers, dtype=np.int32)
        unknown = int((content == UNKNOWN).sum())
        return content.astype(self.kind).tobytes(), np.array(lengths, dtype=np.int32), unknown


def binarise_files(
    vocabulary: Vocabulary, files: dict[Path, tuple[str, str]], workers: int = 1
) -> str:
    """Write the ``.bin`` and the ``.idx`` named for each file; returns the counts in words."""
    kind = np.dtype(np.uint16 if len(vocabulary) < 65500 else np.uint32)  # as fairseq chooses
    parts = {file: list(chunks(file)) for file in files}
    size = sum(file.stat().st_size for file in files)
    sentences = tokens = unknown = 0
    with ExitStack() as stack:
        advance = stack.enter_context(progress("binarise", size))
        each = stack.enter_context(shared(_Binariser(vocabulary, kind), workers, size))
        results = each(chunk for file in files for chunk in parts[file])
        for file, (data, index) in files.items():
            lengths = [np.zeros(0, dtype=np.int32)]
            with open(data, "wb") as output:
                for chunk in parts[file]:
                    content, some, odd = next(results)
                    output.write(content)
                    lengths.append(some)
                    unknown += odd
                    advance(chunk.size)
            whole = np.concatenate(lengths)
            Path(index).write_bytes(_index(whole, kind))
            sentences += len(whole)
            tokens += int(whole.sum(dtype=np.int64))
    return f"{sentences:,} sentences, {tokens:,} tokens, {unknown:,} of them unknown"


def _index(lengths: np.ndarray, kind: np.dtype) -> bytes:
    """The content of an ``.idx`` file for sentences of these ``lengths`` (int32) of numbers of a ``kind``."""
    starts = np.zeros(len(lengths), dtype=np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=starts[1:])
    header = _HEADER.pack(_MAGIC, 1, _CODES[kind], len(lengths))
    return header + lengths.tobytes() + (starts * kind.itemsize).tobytes()


def count_sentences(index: Path) -> int:
    """The sentences of an ``.idx`` file; raises UsageError if it is no such file, or cut off."""
    with open(index, "rb") as file:
        header = file.read(_HEADER.size)
    if len(header) == _HEADER.size and header.startswith(_MAGIC):
        sentences = _HEADER.unpack(header)[-1]
        if index.stat().st_size == _HEADER.size + 12 * sentences:  # an int32 and an int64 of each
            return sentences
    raise UsageError(f"{index} is cut off, or not an index of fairseq-preprocess")
