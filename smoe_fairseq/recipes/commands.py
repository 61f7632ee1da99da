"""The recipes and their steps as commands: ``smoe train``, ``scripts/train.sh`` and the steps these run.

A command is a function; its signature declares operands and options. Its settings (settings.py) come with
the data set.
"""

import argparse
import importlib
import inspect
import os
import shlex
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from smoe_fairseq.errors import end_parsing, nearest, quietly
from smoe_fairseq.flags import at_least, filled, flag_of, positive
from smoe_fairseq.recipes.processes import recipe
from smoe_fairseq.recipes.settings import SETTINGS, Settings
from smoe_fairseq.subwords import SPECIAL

# sentencepiece's rule names, by value of --normalization; those of nfc are ours.
NORMALIZATIONS = {"nfc": "", "nfkc": "nmt_nfkc", "identity": "identity"}
NEAR = 0.85  # similarity at which an unknown flag is reported as a mistyped setting
_FOLDERS = ("DATA_DIR", "RUN_DIR", "CONFIG_DIR", "DRY_RUN")
_TRAINING = ("GPUS", "NODES", "LAUNCHER", "BATCH", "PRECISION", "FORECAST")
_COMET = ("COMET", "COMET_MODEL")


class Command(NamedTuple):
    """``function`` is FILE:FUNCTION below this package; ``settings`` are variables."""

    function: str
    summary: str
    settings: tuple[str, ...] = ()


RECIPES = {
    "prepare": Command(
        "data.prepare:prepare",
        "download and binarise a data set; FLAGS are those of `smoe subwords learn`",
        ("RAW", "PRETRAINED", "WORKERS", *_FOLDERS),
    ),
    "train": Command(
        "training.train:train",
        "train a method on a data set, or resume training; FLAGS go to fairseq-train",
        ("SEED", *_TRAINING, *_FOLDERS),
    ),
    "evaluate": Command(
        "evaluation.evaluate:evaluate",
        "translate the test sets and score them; FLAGS go to fairseq-generate",
        ("SEED", "GPUS", "JOBS", *_COMET, *_FOLDERS),
    ),
    "study": Command(
        "study.runs:study",
        "train and score methods with all seeds; FLAGS are methods, then flags of fairseq-train",
        ("SEEDS", "JOBS", *_TRAINING, *_COMET, "RESULTS_DIR", *_FOLDERS),
    ),
    "report": Command(
        "compare.report:write_report",
        "write tables and pictures of the runs of a study",
        ("RESULTS_DIR", "CONFIG_DIR"),
    ),
    "table": Command(
        "compare.table:print_table",
        "print the scores of a data set's runs, and the paper's",
        ("DATA_DIR", "RUN_DIR", "CONFIG_DIR"),
    ),
    "demo": Command(
        "demo:demo",
        "prepare a data set, train a method, evaluate it and show translations",
        ("SEED", "GPUS", "JOBS", "RAW", *_FOLDERS),
    ),
}
# Steps that the recipes call, and a dry run prints as `python -P -m smoe_fairseq.recipes STEP`.
STEPS = {
    "fetch": Command("data.download:fetch", "step: download the raw files"),
    "unpack": Command("data.download:unpack", "step: the archives' files that are needed"),
    "adopt": Command("data.adopt:adopt", "step: binarised text as it is"),
    "gather": Command("data.prepare:gather", "step: one text layout"),
    "adapt": Command("data.adapt:adapt", "step: pretrained model with this data set's subwords"),
    "learn": Command("data.subwords:learn", "step: sentencepiece model"),
    "encode": Command("data.subwords:encode", "step: text to subwords"),
    "binarise": Command("data.binarise:binarise", "step: subwords to numbers"),
    "reshard": Command("training.reshard:reshard", "step: checkpoints for other numbers of ranks"),
    "tokenizer": Command("data.download:fetch_tokenizer", "step: sacreBLEU's tokenizer model"),
    "methods": Command("compare.table:print_methods", "step: the methods of a table"),
}
_OPERANDS = {
    "dataset": "a file of configs/datasets",
    "method": "a file of configs/methods, such as moe or smoe-4-4",
}


# Options that need more than their parameter's type and default.
_OPTIONS = {
    "workers": {"type": positive, "help": "processes (default: 1)"},
    "format": {
        **{"choices": ("markdown", "csv", "latex"), "default": "markdown"},
        "help": "default: markdown",
    },
    "metric": {
        "default": "bleu",
        "metavar": "NAME",
        "help": "bleu, chrf++, chrf, ter, spbleu, comet, or one of the data set's `metrics`; default: "
        "bleu, the only one for which the paper's numbers are shown",
    },
    "compare": {
        **{"nargs": 2, "metavar": ("A", "B")},
        "help": "compare method B with A in each direction, over all their seeds: paired bootstrap over "
        "sentences, permutation test over seeds",
    },
    "checkpoint": {
        "metavar": "WHICH",
        "help": "best, last, or average:N of the last N that were saved (default: the data set's, best)",
    },
    "force_resume": {"action": "store_true", "help": "resume although text or flags differ"},
}


class CommandParser(ArgumentParser):
    """Reports an error in one line that points to the command's help; refuses empty paths."""

    error = end_parsing

    def __init__(self, **options):
        super().__init__(**options)
        self.register("type", Path, lambda text: Path(filled(text)))


def function_of(command: Command) -> Callable[..., None]:
    """The function of a command; imports its module."""
    file, _, name = command.function.partition(":")
    with quietly():
        return getattr(importlib.import_module(f"{__package__}.{file}"), name)


class Step:
    """A call of the function of one of `STEPS`, for `processes.run`; as text, the command for it."""

    def __init__(self, name: str, *operands: object, **options: object):
        self.name, self.operands, self.options = name, operands, options

    def __call__(self) -> None:
        function_of(STEPS[self.name])(*self.operands, **self.options)

    def __str__(self) -> str:
        flags = (word for name, value in self.options.items() for word in (flag_of(name), value))
        return recipe(self.name, *self.operands, *flags)


def add_arguments(parser: ArgumentParser, name: str) -> None:
    """Add the operands, options and settings of a recipe or a step."""
    command = (RECIPES | STEPS)[name]
    function = function_of(command)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "flags":
            rest = parser.add_argument("flags", metavar="FLAGS", nargs=argparse.REMAINDER)
            rest.required = False  # else argparse lists it when another operand is missing
        elif not _is_option(parameter):
            kind = parameter.annotation if parameter.annotation in (int, Path) else str
            shown = parameter.name if kind is int else parameter.name.upper()
            words = _OPERANDS.get(parameter.name)
            parser.add_argument(parameter.name, type=kind, metavar=shown, help=words)
    _add_options(parser, command, function)
    parser.set_defaults(run=partial(_run, name, function))


def _is_option(parameter: inspect.Parameter) -> bool:
    return (
        parameter.default is not parameter.empty
        or parameter.name in _OPTIONS
        or parameter.kind is parameter.VAR_KEYWORD
    )


def _add_options(parser: ArgumentParser, command: Command, function: Callable) -> None:
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            add_subword_options(parser)
        elif parameter.name != "flags" and _is_option(parameter):
            default = {} if parameter.default is parameter.empty else {"default": parameter.default}
            options = _OPTIONS.get(parameter.name, {"type": parameter.annotation})
            parser.add_argument(flag_of(parameter.name), **default | options)
    for setting in SETTINGS:
        if setting.variable in command.settings:
            setting.add_to(parser)


def _run(name: str, function: Callable, args: Namespace) -> None:
    if name in RECIPES and hasattr(args, "flags"):
        args.flags = _parse_late_options(name, function, args)
    options = vars(args).copy()
    variables = (setting.variable for setting in SETTINGS)
    flags = {name: v for name in variables if (v := options.pop(name, None)) is not None}
    for key in ("run", "command"):  # of the parser
        options.pop(key, None)
    settings = Settings.read(flags)
    for variable, value in flags.items() if settings.dry_run else ():
        if variable != "DRY_RUN":
            print(f"export {variable}={shlex.quote(value)}")
    if "dataset" in options:
        from smoe_fairseq.recipes.datasets import load_dataset  # imports omegaconf
        from smoe_fairseq.recipes.pretrained import with_pretrained

        options["dataset"] = with_pretrained(load_dataset(args.dataset, settings))
    function(**options)


def _parse_late_options(name: str, function: Callable, args: Namespace) -> list[str]:
    """Move the recipe's options among ``args.flags`` to ``args``; returns the other words.

    A flag that resembles an option is an error, as a mistyped one.
    """
    parser = CommandParser(prog=f"smoe {name}", add_help=False, allow_abbrev=False)
    _add_options(parser, RECIPES[name], function)
    flags = [word for word in args.flags if word != "--"]  # which other programs put before flags
    _, words = parser.parse_known_args(flags, args)
    options = [name for action in parser._actions for name in action.option_strings]
    for word in words:
        if word.startswith("--") and nearest(word.partition("=")[0], options, NEAR):
            parser.error(f"unrecognized arguments: {word}")
    return words


def _symbol(text: str) -> str:
    if os.path.isfile(text):  # False for words that are too long for a name
        raise ArgumentTypeError(f"{text} is a file; the texts come before this flag")
    if text.split() != [text] or text in SPECIAL:
        raise ArgumentTypeError(f"{text!r}: expected a word that is no mark of fairseq's")
    return text


def _normalization(text: str) -> str:
    if text not in NORMALIZATIONS and not os.path.isfile(text):
        expected = f"expected {', '.join(NORMALIZATIONS)}, or a file of sentencepiece's rules"
        raise ArgumentTypeError(f"{text}: {expected}")
    return text


def _sentences(text: str) -> int:
    number = at_least(int, 0, 2**63 - 1)(text)
    if 0 < number <= 100:  # which sentencepiece refuses
        raise ArgumentTypeError(f"{text}: expected 0 (all), or more than 100")
    return number


def add_subword_options(parser: ArgumentParser, vocab_size: int | None = None) -> None:
    """Add the options of sentencepiece's training; ``vocab_size`` is required unless it has a default."""

    def add(flag: str, text: str, default: object = None, **options) -> None:
        text += " (default: %(default)s)" if default else ""
        parser.add_argument(flag, help=text, default=default, **options)

    size = at_least(int, 1, 2**31 - 1)
    add("--vocab-size", "subwords", vocab_size, type=size, required=vocab_size is None)
    share = "share of the text's characters that get a subword"
    add("--character-coverage", share, 0.9995, type=at_least(float, 0.98, 1))
    nfkc = "nfkc (sentencepiece's default; changes punctuation)"
    rules = f"nfc (looks the same), {nfkc}, identity, or a file of sentencepiece's rules"
    text = f"normalisation of text, in learning and in encoding: {rules}"
    add("--normalization", text, "nfc", metavar="NAME", type=_normalization)
    split = "split characters without a subword into bytes, which take 256 of the subwords"
    add("--byte-fallback", split, False, action="store_true")
    whole = {"nargs": "+", "metavar": "SYMBOL", "type": _symbol}
    add("--user-defined-symbols", "subwords that are never split", [], **whole)
    add("--model-type", "algorithm", "unigram", choices=("unigram", "bpe"))
    drawn = "lines drawn at random to learn from; 0: all"
    add("--input-sentence-size", drawn, 0, type=_sentences)
