"""Text to subword pieces, separated by spaces, and dealt out to shards."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import sentencepiece

from smoe_fairseq.recipes.folders import shard_names
from smoe_fairseq.recipes.preparing.chunks import Chunk, chunks
from smoe_fairseq.recipes.preparing.progress import progress
from smoe_fairseq.recipes.preparing.workers import shared
from smoe_fairseq.recipes.shell import report
from smoe_fairseq.system.errors import UsageError
from smoe_fairseq.system.files import whole_folder


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
