"""Subwords learnt and applied, and text as numbers."""

import io
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import whole_files, whole_folder
from smoe_fairseq.host_memory import machine_memory
from smoe_fairseq.recipes.config import Dataset
from smoe_fairseq.recipes.processes import report, shard_folders, shard_names
from smoe_fairseq.recipes.raw import SPLITS
from smoe_fairseq.recipes.text_files import (
    EOS,
    UNKNOWN,
    Chunk,
    Vocabulary,
    chunks,
    count_lines,
    index_bytes,
    number_type,
    progress,
    read_dictionary,
    shared,
)

_SPECIAL_PIECES = 3  # <unk>, <s> and </s>, which fairseq's dictionary adds by itself

# Of memory, for each byte of the text that is learnt from; measured, docs/reproduce.md.
_BYTES_PER_BYTE = {"unigram": 21, "bpe": 6}


def learn(raw: Path, output: Path, options: dict[str, Any]) -> None:
    """As `learn_from`, of ``train.*`` of ``raw``."""
    files = sorted(raw.glob("train.*"))
    if not files:
        raise UsageError(f"{raw} has no training text (train.eng-xxx.eng and so on)")
    learn_from(files, output, options)


def learn_from(files: list[Path], output: Path, options: dict[str, Any]) -> None:
    """Trains on ``files`` of text; writes ``output/spm.model`` and ``output/dict.txt``.

    ``options`` are sentencepiece's own training options. A text too small for the vocabulary size
    asked for gives a smaller one.

    Raises:
        UsageError: there is no text, sentencepiece cannot learn from it, or that takes too much memory.
    """
    raw = files[0] if len(files) == 1 else files[0].parent
    _check_memory(raw, files, options)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            input=[str(file) for file in files],
            model_writer=model,
            hard_vocab_limit=False,
            minloglevel=1,
            **options,
        )
    except RuntimeError as error:
        raise UsageError(f"sentencepiece cannot learn from {raw}: {error}") from None
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
    # fairseq's format is a piece and its count on each line; the counts matter only for sorting.
    dictionary = "".join(f"{piece} 1\n" for piece in pieces[_SPECIAL_PIECES:])
    written = [output / "dict.txt", output / "spm.model"]
    with whole_files(written, parents=True) as (words, pieces_file):
        Path(words).write_text(dictionary, "utf-8")
        Path(pieces_file).write_bytes(model.getvalue())
    if len(pieces) < options.get("vocab_size", 0):
        asked = f"{options['vocab_size']:,} that were asked for"
        report(f"{len(pieces):,} pieces in place of the {asked}: the text has no more")
    print(f"{output / 'spm.model'}: {len(pieces):,} pieces from {len(files)} files", flush=True)


def _check_memory(raw: Path, files: list[Path], options: dict[str, Any]) -> None:
    """Refuses what would fill the machine, which would end another program, or this one after an hour."""
    memory = machine_memory()
    size = sum(file.stat().st_size for file in files)
    needed = _BYTES_PER_BYTE[options.get("model_type", "unigram")]
    if memory is None or needed * size <= memory:
        return
    lines = sum(count_lines(file) for file in files)
    drawn = min(lines, options.get("input_sentence_size") or lines)
    if (whole := needed * size * drawn // max(1, lines)) > memory:
        fitting = 0.8 * drawn * memory / whole
        digits = 10 ** max(0, len(str(int(fitting))) - 2)
        raise UsageError(
            f"learning subwords from {drawn:,} lines of {raw} takes about {whole / 1e9:.1f} GB of memory, "
            f"and there are {memory / 1e9:.1f} GB: draw fewer with --input-sentence-size "
            f"{int(fitting) // digits * digits}"
        )


# Text to subword pieces, separated by spaces, and dealt out to shards.


def encode(
    model: Path, raw: Path, output: Path, shards: int = 1, longest: int = 0, workers: int = 1
) -> None:
    """Writes every file of ``raw`` to ``output`` as pieces, the same for any number of ``workers``.

    With several ``shards``, line ``n`` of a training file goes to ``output/shardI``, ``I`` being
    ``n`` modulo ``shards``, and other splits go to the first. A line of the other splits is cut off
    after ``longest`` pieces (0: never), and how many were is reported.
    """
    encoder = Encoder(load_model(model), shards, longest)
    files = sorted(raw.glob("*.*-*.*"))
    with whole_folder(output, replace=True) as partial:
        folders = [partial / name for name in shard_names(shards)]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        lines = encode_files(encoder, files, folders, workers)
    print(f"{output}: {len(files)} files, {lines:,} lines", flush=True)


def load_model(path: Path) -> sentencepiece.SentencePieceProcessor:
    """A sentencepiece model; a `UsageError` where the file is none."""
    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise UsageError(
            f"{path} is not a model that the step learn has written: {error}"
        ) from None


@dataclass(frozen=True)
class Encoder:
    """Called with a part of a file; gives the encoded lines of each shard, and how many were cut off.

    They are dealt as if the part began its file; how many lines it has comes last.
    """

    model: sentencepiece.SentencePieceProcessor
    shards: int
    longest: int

    def shards_of(self, file: Path) -> int:
        return self.shards if _is_training(file) else 1

    def __call__(self, chunk: Chunk) -> tuple[list[bytes], int, int]:
        longest = 0 if _is_training(chunk.file) else self.longest
        encoded = self.model.encode(chunk.lines(), out_type=str, num_threads=1)
        cut = sum(1 for pieces in encoded if len(pieces) > longest) if longest else 0
        lines = [" ".join(pieces[: longest or None]) + "\n" for pieces in encoded]
        step = self.shards_of(chunk.file)
        return ["".join(lines[i::step]).encode() for i in range(step)], cut, len(lines)


def encode_files(encoder: Encoder, files: list[Path], folders: list[Path], workers: int) -> int:
    """Writes files of the same names to ``folders``, one for each shard, and counts the lines."""
    parts = {file: list(chunks(file)) for file in files}
    size = sum(file.stat().st_size for file in files)
    total = 0
    with ExitStack() as stack:
        advance = stack.enter_context(progress("encode", size))
        each = stack.enter_context(shared(encoder, workers, size))
        results = each(chunk for file in files for chunk in parts[file])
        for file in files:
            line = cuts = 0
            with ExitStack() as opened:
                outputs = [
                    opened.enter_context(open(folder / file.name, "wb"))
                    for folder in folders[: encoder.shards_of(file)]
                ]
                for chunk in parts[file]:
                    dealt, cut, lines = next(results)
                    for i, text in enumerate(dealt):
                        outputs[(line + i) % len(outputs)].write(text)
                    line, cuts = line + lines, cuts + cut
                    advance(chunk.size)
            if cuts:
                report(
                    f"{cuts} lines of {file} have more than {encoder.longest} pieces and are cut off"
                )
            total += line
    return total


def _is_training(file: Path) -> bool:
    return file.name.startswith("train.")


# Pieces to numbers: what ``fairseq-preprocess`` writes, byte for byte, by processes started once.


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
