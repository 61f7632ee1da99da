"""Binarised text: written byte for byte as by ``fairseq-preprocess``, or adopted from other authors.

The format is fairseq 0.12.2's ``MMapIndexedDataset``: a ``.bin`` file of all token numbers, and an ``.idx``
file with the lengths and offsets of the sentences.
"""

import io
import os
import shutil
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import (
    check_plain,
    read_plain,
    read_text,
    whole_files,
    whole_folder,
    write_whole,
)
from smoe_fairseq.recipes.data.archives import extract
from smoe_fairseq.recipes.data.raw import (
    SPLITS,
    Section,
    check_replaceable,
    copy_pairs,
    write_sizes,
)
from smoe_fairseq.recipes.data.subwords import encode_files
from smoe_fairseq.recipes.data.text_files import Chunk, map_chunks
from smoe_fairseq.recipes.datasets import Dataset, both_orders
from smoe_fairseq.recipes.folders import final, print_written, shard_folders
from smoe_fairseq.subwords import read_subwords, write_sums

SUFFIXES = ("bin", "idx")
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # the first entries of every dictionary of fairseq
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
    copies = [shard / f"dict.{lang}.txt" for shard in shards for lang in dataset.languages]
    vocabulary = read_dictionary(dictionary)
    for shard in shards:
        shard.mkdir(parents=True, exist_ok=True)
    for copy in copies:
        write_whole(copy, read_plain(dictionary), called=str(output))
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
    """Read a dictionary in fairseq's format, a word and its count per line, numbered after `SPECIAL`.

    Raises UsageError for another format or a repeated word.
    """
    words = Vocabulary({word: number for number, word in enumerate(SPECIAL)})
    for line in io.StringIO(read_text(file), newline=None):
        word, separator, count = line.rstrip().rpartition(" ")
        if not separator or not count.lstrip("-").isdecimal() or word in words:
            expected = f"a new word, a space and a count in each line, not {line.rstrip()!r}"
            raise UsageError(f"{file} is not a dictionary: expected {expected}")
        words[word] = len(words)
    return words


@dataclass(frozen=True)
class _Binariser:
    """Maps a chunk to the bytes of its token numbers, the sentence lengths and the count of unknown words."""

    vocabulary: Vocabulary
    dtype: np.dtype

    def __call__(self, chunk: Chunk) -> tuple[bytes, np.ndarray, int]:
        numbers, lengths = array("i"), array("i")
        for line in chunk.lines():
            words = line.split()
            numbers.extend(map(self.vocabulary.__getitem__, words))
            numbers.append(EOS)
            lengths.append(len(words) + 1)
        content = np.frombuffer(numbers, dtype=np.int32)
        unknown = int((content == UNKNOWN).sum())
        return content.astype(self.dtype).tobytes(), np.array(lengths, dtype=np.int32), unknown


def binarise_files(
    vocabulary: Vocabulary, files: dict[Path, tuple[str, str]], workers: int = 1
) -> str:
    """Write a ``.bin`` and an ``.idx`` file for each key of ``files``; returns counts, as words to print."""
    dtype = np.dtype(np.uint16 if len(vocabulary) < 65500 else np.uint32)  # as fairseq chooses
    sentences = tokens = unknown = 0
    with map_chunks("binarise", _Binariser(vocabulary, dtype), files, workers) as by_file:
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


# Binarised text of other authors, in an archive or a folder: checked and used unchanged.


def adopt(dataset: Dataset, source: Path, raw: Path, output: Path, longest: int = 0) -> None:
    """Use the data of an archive, or of the folder it was unpacked to, for training and evaluation.

    The numbers of training pairs are written to ``sizes.json`` next to ``raw``.

    Args:
        raw: folder to write for the test text, in the shared layout.
        output: folder to write for the binarised text, its dictionary and ``spm.model``. Test sets that the
            archive has only as text are encoded and binarised. Files of a folder are linked if possible.
        longest: maximum number of pieces in a line of such a test set; the rest is cut off. 0: no maximum.
    """
    check_replaceable(raw, [source])
    with whole_folder(output) as numbers, whole_folder(raw, replace=True) as text:
        original = text / "original"
        targets = _targets(dataset, numbers, original)
        if source.is_dir():
            _link(binarised_folder(dataset, source) or source, targets)
        else:
            extract(source, targets)
        archive = _Archive(dataset, source, numbers, original)
        archive.check_subwords()
        archive.complete_dictionaries()
        sizes = {pair: archive.count(pair) for pair in dataset.pairs}
        archive.write_tests(text, longest)
        shutil.rmtree(original)
        write_sizes(raw, sizes)
    print(
        f"{final(output)}: {sum(sizes.values()):,} training pairs as they are in {source}",
        flush=True,
    )


def binarised_folder(dataset: Dataset, folder: Path) -> Path | None:
    """The folder to which paths of ``raw.binarised`` are relative; None if there is none.

    It is ``folder``, a folder in it, or its parent if ``folder`` is the top folder of the archive.
    """
    if not (layout := dataset.raw.get("binarised")) or not folder.is_dir():
        return None
    places = [folder, *sorted(folder.iterdir())]
    if folder.resolve().name == Path(layout["text"]).parts[0]:
        places.append(folder.resolve().parent)
    return next((place for place in places if (place / layout["text"]).is_dir()), None)


def _targets(dataset: Dataset, numbers: Path, original: Path) -> dict[str, Path]:
    """The file to write for each name in the archive."""
    layout = dataset.raw["binarised"]
    targets = {layout["vocabulary"]: numbers / "spm.model"}
    names = _dictionaries(dataset)
    for pair in dataset.pairs:
        for order in both_orders(pair):
            names += [file for split in SPLITS for file in _names(split, order)]
            for language in pair.split("-"):
                name = layout["test"].format(pair=order, language=language)
                targets[name] = original / f"{order}.{language}"
    return targets | {f"{layout['text']}/{name}": numbers / name for name in names}


def _dictionaries(dataset: Dataset) -> list[str]:
    return ["dict.txt", *(f"dict.{language}.txt" for language in dataset.languages)]


def _names(split: str, order: str) -> Iterator[str]:
    for language in order.split("-"):
        for suffix in SUFFIXES:
            yield f"{split}.{order}.{language}.{suffix}"


def _link(folder: Path, targets: dict[str, Path]) -> None:
    for name, target in targets.items():
        if (file := folder / name).is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file.resolve(), target)
            except OSError:  # on another disk
                shutil.copyfile(file, target)


class _Archive:
    """The extracted files of an archive: binarised text in ``numbers``, test text in ``original``."""

    def __init__(self, dataset: Dataset, source: Path, numbers: Path, original: Path):
        self.dataset = dataset
        self.layout = dataset.raw["binarised"]
        self.source = source
        self.numbers = numbers
        self.original = original

    def missing(self, name: str, use: str) -> UsageError:
        expected = f"the archive of docs/reproduce.md, whole, or --raw folder with {self.dataset.name}'s text"
        return UsageError(f"{self.source} has no {name}, {use}: expected {expected}")

    def check_subwords(self) -> None:
        name, model = self.layout["vocabulary"], self.numbers / "spm.model"
        if not model.exists():
            raise self.missing(name, "the model of the subwords")
        try:
            read_subwords(model)
        except UsageError:
            raise UsageError(f"{self.source}: {name} is not a sentencepiece model") from None

    def complete_dictionaries(self) -> None:
        """Write the dictionary under every name that fairseq reads."""
        names = _dictionaries(self.dataset)
        contents = {file.name: read_plain(file) for file in sorted(self.numbers.glob("dict*.txt"))}
        if not contents:
            raise self.missing(f"{self.layout['text']}/{names[1]}", "the dictionary")
        first, *_ = contents
        for name in contents:
            if contents[name] != contents[first]:
                both = f"{self.source}: {first} and {name} differ"
                raise UsageError(f"{both}; expected one dictionary for all languages")
        # Existing files may be links to the user's, so they are not rewritten.
        for name in set(names) - contents.keys():
            (self.numbers / name).write_bytes(contents[first])
        write_sums(self.numbers)

    def count(self, pair: str) -> int:
        """The number of training sentences; raises UsageError if there is no training or validation text."""
        for split in ("valid", "train"):
            if not (sentences := self.sentences(split, pair)):
                name = f"{self.layout['text']}/{next(_names(split, pair))}"
                raise self.missing(name, f"which {pair} needs to {split}")
        return sentences

    def sentences(self, split: str, pair: str) -> int:
        """The number of sentences in a split, 0 if it is missing; files may name the pair in either order."""
        counts = []
        for order in both_orders(pair):
            names = list(_names(split, order))
            present = [name for name in names if (self.numbers / name).exists()]
            if not present:
                continue
            if lost := sorted(set(names) - set(present)):
                use = f"though it has {present[0]}"
                raise self.missing(f"{self.layout['text']}/{lost[0]}", use)
            indices = [name for name in names if name.endswith(".idx")]
            one, other = (count_sentences(self.numbers / index) for index in indices)
            if one != other:
                both = f"{one} in {indices[0]} and {other} in {indices[1]}"
                raise UsageError(f"{self.source} has {both}: expected as many sentences in both")
            counts.append(one)
        return counts[0] if counts else 0

    def write_tests(self, text: Path, longest: int) -> None:
        """Copy the test text to ``text``, and binarise the tests that the archive has only as text."""
        to_binarise = []
        for pair in self.dataset.pairs:
            lines = self.copy_test(pair, text)
            sentences = self.sentences("test", pair)
            if not sentences:
                to_binarise += [text / f"test.{pair}.{language}" for language in pair.split("-")]
            elif sentences != lines:
                both = f"{sentences} sentences binarised, and {lines} as text: expected as many"
                raise UsageError(f"{self.source} has of the test of {pair} {both}")
        if not to_binarise:
            return
        pieces = self.original / "pieces"
        pieces.mkdir()
        encode_files(read_subwords(self.numbers / "spm.model"), to_binarise, [pieces], longest)
        outputs = {
            pieces / file.name: tuple(str(self.numbers / f"{file.name}.{s}") for s in SUFFIXES)
            for file in to_binarise
        }
        counts = binarise_files(read_dictionary(self.numbers / "dict.txt"), outputs)
        print(f"tests, binarised from text: {counts}", flush=True)

    def copy_test(self, pair: str, text: Path) -> int:
        for order in both_orders(pair):
            files = {lang: self.original / f"{order}.{lang}" for lang in pair.split("-")}
            if all(file.exists() for file in files.values()):
                if lines := copy_pairs(Section(files), text / f"test.{pair}", None)["kept"]:
                    return lines
        name = self.layout["test"].format(pair=pair, language=pair.split("-")[0])
        raise self.missing(name, f"or no line in it, which scores of {pair} are made with")
