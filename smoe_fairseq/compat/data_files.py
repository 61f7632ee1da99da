"""One sentence for a data file that holds no sentences, or not those that its index counts.

For fairseq 0.12.2 on any Python, which ends in stack traces about memory maps. fairseq-preprocess makes a
file without sentences of an empty text and says nothing; data sets of the older format fail only after the
first epoch, when they are to be validated on. A copy that was interrupted leaves files that are cut off.
The same for data of which every sentence is too long, and for data made with a larger dictionary than the
one beside it: on a GPU its words are an assertion in a kernel.
"""

import functools
import os
import struct
from types import ModuleType

from smoe_fairseq.system.errors import UsageError

_HEADER = struct.Struct("<9sQBQ")  # magic, version, code of the tokens' type, sentences
_SIZE, _POINTER = struct.Struct("<i"), struct.Struct("<q")  # of each sentence: tokens, first byte
_MAGIC, _OLDER = b"MMIDIDX\0\0", b"TNTIDX\0\0"  # how an index begins, now and in the older format
_BINARY = ("mmap", "cached", "lazy")
_SAMPLE = 200  # sentences that are compared with the dictionary
_AGAIN = "copy the data again, or make it again with fairseq-preprocess"


def name_unusable_files(indexed_dataset: ModuleType) -> None:
    original = indexed_dataset.make_dataset

    @functools.wraps(original)
    def make_dataset(path, impl, *others, **options):
        data = indexed_dataset.data_file_path(path)
        binary = impl in _BINARY and indexed_dataset.MMapIndexedDataset.exists(path)
        if binary:
            _check_size(path, indexed_dataset)
        empty = binary and impl == "mmap" and os.path.getsize(data) == 0
        dataset = None if empty else original(path, impl, *others, **options)
        if empty or (dataset is not None and len(dataset) == 0):
            raise UsageError(
                f"{path if impl == 'raw' else data} has no sentences: expected at least one in every file "
                "that is trained, validated or tested on"
            )
        return dataset

    indexed_dataset.make_dataset = make_dataset


def _check_size(path: str, indexed_dataset: ModuleType) -> None:
    """Raise UsageError unless the index is as long as it says, and the data as the index says."""
    index, data = indexed_dataset.index_file_path(path), indexed_dataset.data_file_path(path)
    with open(index, "rb") as file:
        header = file.read(_HEADER.size)
        if header.startswith(_OLDER):
            return  # these are read sentence by sentence
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise UsageError(f"{index} is cut off, or not an index of fairseq-preprocess: {_AGAIN}")
        *_, code, sentences = _HEADER.unpack(header)
        if os.path.getsize(index) != _HEADER.size + sentences * (_SIZE.size + _POINTER.size):
            raise UsageError(f"{index} is not as long as its {sentences} sentences: {_AGAIN}")
        if sentences == 0:
            return
        file.seek(_HEADER.size + _SIZE.size * (sentences - 1))
        (size,) = _SIZE.unpack(file.read(_SIZE.size))
        file.seek(-_POINTER.size, os.SEEK_END)
        (pointer,) = _POINTER.unpack(file.read(_POINTER.size))
    expected = pointer + size * indexed_dataset._code_to_dtype[code]().itemsize
    if (found := os.path.getsize(data)) != expected and found:
        raise UsageError(
            f"{data} has {found:,} bytes, and {expected:,} by its index {os.path.basename(index)}: {_AGAIN}"
        )


def name_foreign_words(language_pair_dataset: ModuleType) -> None:
    dataset = language_pair_dataset.LanguagePairDataset
    original = dataset.__init__

    @functools.wraps(original)
    def checked(self, *others, **options):
        original(self, *others, **options)
        for side, sentences, dictionary in (
            ("source", self.src, self.src_dict),
            ("target", self.tgt, self.tgt_dict),
        ):
            if sentences is not None and dictionary is not None:
                _check_words(side, sentences, dictionary)

    dataset.__init__ = checked


def _check_words(side: str, sentences, dictionary) -> None:
    """Raise UsageError where a sample of the sentences has a word that the dictionary does not have."""
    for i in range(0, len(sentences), max(1, len(sentences) // _SAMPLE)):
        words = sentences[i]
        if len(words) and (word := int(words.max())) >= len(dictionary):
            raise UsageError(
                f"the {side} side of the data has word {word}, its dictionary only {len(dictionary)} words: "
                "expected the dict.*.txt that fairseq-preprocess wrote with the data"
            )


def name_no_batches(iterators: ModuleType) -> None:
    iterator = iterators.EpochBatchIterator
    original = iterator.first_batch.fget

    @functools.wraps(original)
    def first_batch(self):
        if len(self.frozen_batches) == 0:
            raise UsageError(
                "no sentence of the data is short enough for the model: expected at least one within "
                "--max-source-positions and --max-target-positions"
            )
        return original(self)

    iterator.first_batch = property(first_batch)
