"""``smoe subwords``: the recipes' subwords for those who call fairseq's own commands."""

from argparse import ArgumentParser, Namespace
from collections import Counter
from pathlib import Path

from smoe_fairseq.errors import UsageError, positive
from smoe_fairseq.files import whole_folder

LEARN = (
    "learn a sentencepiece model; writes DIR/spm.model and DIR/dict.txt, which is for --srcdict and "
    "--tgtdict of fairseq-preprocess"
)
ENCODE = "text to subwords: writes a file of the same name to DIR for each"


def add_subwords_arguments(parser: ArgumentParser) -> None:
    """``learn`` and ``encode``."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    learn = actions.add_parser("learn", help=LEARN, description=LEARN)
    add_learning(learn, vocab_size=8000)
    encode = actions.add_parser("encode", help=ENCODE, description=ENCODE)
    encode.add_argument("model", metavar="MODEL", type=Path, help="spm.model, as learn writes it")
    encode.add_argument("--workers", type=positive, default=1, metavar="N", help="processes (1)")
    for action in (learn, encode):
        action.add_argument(
            "text", metavar="TEXT", type=Path, nargs="+", help="a sentence per line"
        )
        action.add_argument(
            "--output", metavar="DIR", type=Path, required=True, help="a new folder"
        )


def add_learning(parser: ArgumentParser, vocab_size: int | None = None) -> None:
    """sentencepiece's options that the recipes know; without a default ``vocab_size`` it is required."""
    size = {"default": vocab_size} if vocab_size else {"required": True}
    for flag, options in {
        "--vocab-size": {"type": int, "help": "subwords", **size},
        "--character-coverage": {
            **{"type": float, "default": 0.9995},
            "help": "share of the text's characters that get a subword",
        },
        "--model-type": {"default": "unigram", "choices": ("unigram", "bpe"), "help": "algorithm"},
        "--input-sentence-size": {
            **{"type": int, "default": 0},
            "help": "lines drawn at random to learn from; 0: all",
        },
    }.items():
        if "default" in options:
            options["help"] += " (default: %(default)s)"
        parser.add_argument(flag, **options)


def learning_options(args: Namespace) -> dict:
    """Of `add_learning`, as sentencepiece calls them."""
    names = ("vocab_size", "character_coverage", "model_type", "input_sentence_size")
    return {name: getattr(args, name) for name in names}


def run_subwords(args: Namespace) -> None:
    """Raises UsageError: text or model cannot be read, or the folder is there."""
    from smoe_fairseq.recipes.binarise import Encoder, encode_files, learn_from, load_model

    for file in args.text:
        if not file.is_file():
            raise UsageError(f"{file} is not a file: expected text, a sentence per line")
    if args.action == "learn":
        learn_from(args.text, args.output, learning_options(args))
        return
    names = Counter(file.name for file in args.text)
    if twice := [name for name, count in names.items() if count > 1]:
        raise UsageError(f"two files are called {twice[0]}: encode them to folders of their own")
    encoder = Encoder(load_model(args.model), shards=1, longest=0)
    with whole_folder(args.output) as folder:
        lines = encode_files(encoder, args.text, [folder], args.workers)
    print(f"{args.output}: {len(args.text)} files, {lines:,} lines", flush=True)
