"""Pieces to numbers: what ``fairseq-preprocess`` writes, byte for byte, by processes started once."""

from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from smoe_fairseq.recipes.folders import shard_folders
from smoe_fairseq.recipes.preparing.chunks import Chunk, chunks
from smoe_fairseq.recipes.preparing.indexed import (
    EOS,
    UNKNOWN,
    Vocabulary,
    index_bytes,
    number_type,
    read_dictionary,
)
from smoe_fairseq.recipes.preparing.layout import SPLITS
from smoe_fairseq.recipes.preparing.progress import progress
from smoe_fairseq.recipes.preparing.workers import shared
from smoe_fairseq.settings.dataset import Dataset
from smoe_fairseq.system.errors import UsageError
from smoe_fairseq.system.files import whole_files


def binarise(
    dataset: Dataset, text: Path, dictionary: Path, output: Path, workers: int = 1
) -> None:
    """Writes every pair's splits in ``text`` (and its shards) to ``output`` as fairseq reads them.

    ``{split}.{pair}.{language}.bin`` and ``.idx``, and in each shard the dictionary once for each language.
    One set of files serves both directions of a pair. They are the same for any number of ``workers``, and
    appear when all are complete.

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
    binariser = Binariser(read_dictionary(dictionary))
    targets = [f"{target}.{suffix}" for target in files for suffix in ("bin", "idx")]
    for shard in shards:
        shard.mkdir(parents=True, exist_ok=True)
    with whole_files([*copies, *targets], called=str(output)) as partials:
        for copy in partials[: len(copies)]:
            Path(copy).write_bytes(dictionary.read_bytes())
        pairs = zip(partials[len(copies) :: 2], partials[len(copies) + 1 :: 2], strict=True)
        written = dict(zip(files.values(), pairs, strict=True))
        told = binarise_files(binariser, written, workers)
    print(f"{output}: {len(files)} files, {told}", flush=True)


def _files(folder: Path, pair: str, training_only: bool) -> Iterator[Path]:
    """Those of the splits that there are; fairseq looks for validation and test in the first shard only."""
    for split in SPLITS[:1] if training_only else SPLITS:
        files = [folder / f"{split}.{pair}.{language}" for language in pair.split("-")]
        missing = [file for file in files if not file.is_file()]
        if not missing:
            yield from files
        elif split != "test":
            raise UsageError(f"{missing[0]} is missing: {pair} needs it to {split}")


@dataclass(frozen=True)
class Binariser:
    """Called with a part of a file; gives its numbers' bytes, its sentences' lengths, and unknown words."""

    vocabulary: Vocabulary

    @property
    def kind(self) -> np.dtype:
        return number_type(len(self.vocabulary))

    def __call__(self, chunk: Chunk) -> tuple[bytes, np.ndarray, int]:
        numbers = array("i")
        lengths = array("i")
        number_of = self.vocabulary.__getitem__
        for line in chunk.lines():
            words = line.split()
            numbers.extend(map(number_of, words))
            numbers.append(EOS)
            lengths.append(len(words) + 1)
        content = np.frombuffer(numbers, dtype=np.int32)
        unknown = int((content == UNKNOWN).sum())
        return content.astype(self.kind).tobytes(), np.array(lengths, dtype=np.int32), unknown


def binarise_files(binariser: Binariser, files: dict[Path, tuple[str, str]], workers: int) -> str:
    """Writes the ``.bin`` and the ``.idx`` named for each file, and tells how much that was."""
    parts = {file: list(chunks(file)) for file in files}
    size = sum(file.stat().st_size for file in files)
    sentences = tokens = unknown = 0
    with ExitStack() as stack:
        advance = stack.enter_context(progress("binarise", size))
        each = stack.enter_context(shared(binariser, workers, size))
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
            Path(index).write_bytes(index_bytes(whole, binariser.kind))
            sentences += len(whole)
            tokens += int(whole.sum(dtype=np.int64))
    return f"{sentences:,} sentences, {tokens:,} tokens, {unknown:,} of them unknown"
