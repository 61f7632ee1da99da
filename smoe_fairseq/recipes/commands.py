"""The recipes and their steps as commands: ``smoe train``, ``scripts/train.sh`` and the steps these run."""

import argparse
import importlib
from argparse import ArgumentParser, Namespace
from pathlib import Path

from smoe_fairseq.errors import positive, quietly

# NAME: (file:function, one line of help, operands and options). The function gets the operands and options
# as keyword arguments. `[FLAGS]` takes all remaining words.
RECIPES = {
    "prepare": (
        "data.prepare:prepare",
        "download and binarise a data set; FLAGS are those of `smoe subwords learn`",
        "DATASET [FLAGS]",
    ),
    "train": (
        "training.train:train",
        "train a method on a data set, or resume training; FLAGS go to fairseq-train",
        "DATASET METHOD [FLAGS]",
    ),
    "evaluate": (
        "evaluation.evaluate:evaluate",
        "translate the test sets and score them; FLAGS go to fairseq-generate",
        "DATASET METHOD [FLAGS]",
    ),
    "study": (
        "study.runs:study",
        "train and score METHODS in all SEEDS; flags behind them go to fairseq-train",
        "DATASET [METHODS]",
    ),
    "report": (
        "study.report:write_report",
        "write tables and pictures of the runs of a study",
        "DATASET",
    ),
    "table": (
        "evaluation.table:print_table",
        "print the scores of a data set's runs beside the paper's",
        "DATASET --format --metric --compare",
    ),
    "demo": (
        "demo:demo",
        "prepare a data set, train a method, evaluate it and show translations",
        "DATASET METHOD",
    ),
}
# Steps that the recipes run, and `DRY_RUN=1` prints, as `python -P -m smoe_fairseq.recipes STEP`.
STEPS = {
    "fetch": ("data.download:fetch", "step: download the raw files", "DATASET FOLDER"),
    "unpack": (
        "data.download:unpack",
        "step: the archives' files that are needed",
        "DATASET DOWNLOADS TARGET",
    ),
    "adopt": (
        "data.binarise:adopt",
        "step: binarised text as it is",
        "DATASET SOURCE RAW OUTPUT --longest",
    ),
    "gather": ("data.prepare:gather", "step: one text layout", "DATASET SOURCE TARGET --workers"),
    "learn": ("data.subwords:learn", "step: sentencepiece model", "RAW OUTPUT --learning"),
    "encode": (
        "data.subwords:encode",
        "step: text to subwords",
        "MODEL RAW OUTPUT --shards --longest --workers",
    ),
    "binarise": (
        "data.binarise:binarise",
        "step: subwords to numbers",
        "DATASET TEXT DICTIONARY OUTPUT --workers",
    ),
    "gpu-hours": (
        "evaluation.table:print_gpu_hours",
        "estimate the hours of GPU that training a table takes",
        "DATASET --tflops --names",
    ),
    "foretell": (
        "training.forecast:print_forecast",
        "step: what training takes of memory",
        "DATASET processes on_machine [FLAGS]",
    ),
    "translate": (
        "evaluation.evaluate:translate",
        "step: the directions that are left; FLAGS go to fairseq-generate",
        "DATASET METHOD [FLAGS]",
    ),
    "generator": (
        "evaluation.generate:serve",
        "step: fairseq-generate for each line of standard input",
        "",
    ),
    "tokenizer": ("data.download:fetch_tokenizer", "step: sacreBLEU's tokenizer model", "NAME"),
}


def _dataset(name: str):
    from smoe_fairseq.recipes.config import load_dataset  # imports omegaconf

    return load_dataset(name)


_TYPES = {"DATASET": _dataset, "METHOD": str, "NAME": str, "processes": int, "on_machine": int}
_OPTIONS = {
    "--shards": {"type": int, "default": 1},
    "--longest": {"type": int, "default": 0},
    "--workers": {"type": positive, "default": 1, "help": "processes (1)"},
    "--tflops": {
        **{"type": float, "default": 94.0, "metavar": "N"},
        "help": "10^12 floating-point operations that training makes in a second on one GPU; default: "
        "%(default)g, 30 percent of the peak of an A100 in bf16",
    },
    "--names": {"action": "store_true", "help": "print the methods of the table alone"},
    "--format": {
        **{"choices": ("markdown", "csv", "latex"), "default": "markdown"},
        "help": "default: markdown",
    },
    "--metric": {
        **{"choices": ("bleu", "chrf++", "spbleu", "comet"), "default": "bleu"},
        "help": "default: bleu, the only one with the paper's numbers beside it",
    },
    "--compare": {
        **{"nargs": 2, "metavar": ("A", "B")},
        "help": "compare method B with A in each direction, over all seeds that both have: paired bootstrap "
        "over sentences, permutation test over seeds",
    },
}


def add_arguments(parser: ArgumentParser, name: str) -> None:
    """Add the operands and options of a recipe or a step."""
    place, _, words = (RECIPES | STEPS)[name]
    for word in words.split():
        if word == "--learning":
            add_learning(parser)
        elif word.startswith("--"):
            parser.add_argument(word, **_OPTIONS[word])
        elif word.startswith("["):
            rest = parser.add_argument("flags", metavar=word[1:-1], nargs=argparse.REMAINDER)
            rest.required = False  # else argparse reports it, too, when another operand is missing
        else:
            shown = {"metavar": word} if word.isupper() else {}
            parser.add_argument(word.lower(), type=_TYPES.get(word, Path), **shown)
    parser.set_defaults(run=_run, place=place)


def _run(given: Namespace) -> None:
    options = {
        name: v for name, v in vars(given).items() if name not in ("run", "place", "command")
    }
    file, _, function = given.place.partition(":")
    with quietly():
        module = importlib.import_module(f"{__package__}.{file}")
    getattr(module, function)(**options)


def add_learning(parser: ArgumentParser, vocab_size: int | None = None) -> None:
    """Add the options of sentencepiece's training; ``vocab_size`` is required unless it has a default."""
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
