"""One sentencepiece model and one dictionary for all languages of a data set."""

import io
import itertools
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import sentencepiece

from smoe_fairseq.recipes.folders import shard_names
from smoe_fairseq.recipes.shell import report
from smoe_fairseq.system.errors import UsageError
from smoe_fairseq.system.files import whole_files, whole_folder

_SPECIAL_PIECES = 3  # <unk>, <s> and </s>, which fairseq's dictionary adds by itself
_BATCH_CHARACTERS = 1_000_000


def learn(raw: Path, output: Path, options: dict[str, Any]) -> None:
    """Trains on ``train.*`` of ``raw``; writes ``output/spm.model`` and ``output/dict.txt``.

    ``options`` are sentencepiece's own training options. A text too small for the vocabulary size
    asked for gives a smaller one.
    """
    files = sorted(raw.glob("train.*"))
    if not files:
        raise UsageError(f"{raw} has no training text (train.eng-xxx.eng and so on)")
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
    with whole_files([output / "dict.txt", output / "spm.model"]) as (words, pieces_file):
        output.mkdir(parents=True, exist_ok=True)
        Path(words).write_text(dictionary, "utf-8")
        Path(pieces_file).write_bytes(model.getvalue())
    print(f"{output / 'spm.model'}: {len(pieces):,} pieces from {len(files)} files", flush=True)


def encode(model: Path, raw: Path, output: Path, shards: int = 1, longest: int = 0) -> None:
    """Writes every file of ``raw`` to ``output`` as pieces, separated by spaces.

    With several ``shards``, line ``n`` of a training file goes to ``output/shardI``, ``I`` being
    ``n`` modulo ``shards``, and other splits go to the first. A line of the other splits is cut off
    after ``longest`` pieces (0: never), and how many were is reported.
    """
    try:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    except (OSError, RuntimeError) as error:
        raise UsageError(
            f"{model} is not a model that the step learn has written: {error}"
        ) from None
    with whole_folder(output, replace=True) as partial:
        folders = [partial / name for name in shard_names(shards)]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(raw.glob("*.*-*.*")):
            if file.name.startswith("train."):
                _encode_file(processor, file, folders, longest=0)
            elif cut := _encode_file(processor, file, folders[:1], longest):
                report(f"{cut} lines of {file} have more than {longest} pieces and are cut off")


def _encode_file(processor, file: Path, folders: list[Path], longest: int) -> int:
    """Deals the lines out to files of the same name in ``folders``; returns how many were cut."""
    cut = 0
    with ExitStack() as stack:
        lines = stack.enter_context(open(file, encoding="utf-8", newline="\n"))
        outputs = itertools.cycle(
            [stack.enter_context(open(f / file.name, "w", encoding="utf-8")) for f in folders]
        )
        while batch := lines.readlines(_BATCH_CHARACTERS):
            for pieces in processor.encode([line.rstrip("\n") for line in batch], out_type=str):
                if longest and len(pieces) > longest:
                    pieces = pieces[:longest]
                    cut += 1
                next(outputs).write(" ".join(pieces) + "\n")
    return cut
