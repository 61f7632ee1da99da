"""One sentencepiece model and one dictionary for all languages of a data set."""

import io
from pathlib import Path
from typing import Any

import sentencepiece

from smoe_fairseq.system.errors import UsageError
from smoe_fairseq.system.files import whole_files

_SPECIAL_PIECES = 3  # <unk>, <s> and </s>, which fairseq's dictionary adds by itself


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
