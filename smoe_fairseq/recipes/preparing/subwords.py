"""One sentencepiece model and one dictionary for all languages of a data set."""

import io
from pathlib import Path
from typing import Any

import sentencepiece

from smoe_fairseq.recipes.preparing.chunks import count_lines
from smoe_fairseq.recipes.shell import report
from smoe_fairseq.system.errors import UsageError
from smoe_fairseq.system.files import whole_files
from smoe_fairseq.system.memory import machine_memory

_SPECIAL_PIECES = 3  # <unk>, <s> and </s>, which fairseq's dictionary adds by itself

# Of memory, for each byte of the text that is learnt from; measured, docs/reproduce.md.
_BYTES_PER_BYTE = {"unigram": 21, "bpe": 6}


def learn(raw: Path, output: Path, options: dict[str, Any]) -> None:
    """Trains on ``train.*`` of ``raw``; writes ``output/spm.model`` and ``output/dict.txt``.

    ``options`` are sentencepiece's own training options. A text too small for the vocabulary size
    asked for gives a smaller one.

    Raises:
        UsageError: there is no text, sentencepiece cannot learn from it, or that takes too much memory.
    """
    files = sorted(raw.glob("train.*"))
    if not files:
        raise UsageError(f"{raw} has no training text (train.eng-xxx.eng and so on)")
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
    with whole_files([output / "dict.txt", output / "spm.model"]) as (words, pieces_file):
        output.mkdir(parents=True, exist_ok=True)
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
