"""Keeps the strings of a checkpoint's config from being run as code.

For fairseq 0.12.2 on any Python. ``torch.load(weights_only=True)`` builds nothing but data, but that data
holds the config of the training, and fairseq hands some of its strings to ``eval``: layers of
convolutional models, ``adaptive_softmax_cutoff``, Adam's betas and two dozen more. A file from elsewhere
could run any program that way, in fairseq-generate as in smoe analyze. In each module that calls
``eval``, this puts a function of that name before the built-in one, for every caller and setting alike.
It takes what these settings are made of: literals, and sums and repetitions of lists such as fairseq's
own default ``[(512, 3)] * 20``. Where nobody catches its UsageError, the user reads one sentence.
"""

import ast
import sys
from argparse import Action, Namespace
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from types import FrameType, ModuleType

from smoe_fairseq.system.errors import UsageError

EVALUATING = (
    "fairseq.utils",  # eval_str_list, eval_str_dict, eval_bool: flags and settings of many modules
    "fairseq.criterions.ctc",
    "fairseq.data.audio.raw_audio_dataset",
    "fairseq.data.codedataset",
    "fairseq.models.fconv",
    "fairseq.models.fconv_lm",
    "fairseq.models.fconv_self_att",
    "fairseq.models.hubert.hubert",
    "fairseq.models.lightconv_lm",
    "fairseq.models.speech_to_text.s2t_wav_transformer",
    "fairseq.models.transformer_lm",
    "fairseq.models.wav2vec.wav2vec",
    "fairseq.models.wav2vec.wav2vec2",
    "fairseq.optim.adafactor",
    "fairseq.optim.adam",
    "fairseq.optim.adamax",
    "fairseq.optim.cpu_adam",
    "fairseq.optim.fused_lamb",
    "fairseq_cli.eval_lm",  # here and below it is --model-overrides, which no checkpoint sets
    "fairseq_cli.validate",
)
LONGEST = 10_000  # entries of a list that is put together; more would be a way to fill the memory
_SHOWN = 60  # characters of what is refused


def evaluate_literals_only(module: ModuleType) -> None:
    module.eval = evaluate


def evaluate(source, /):
    """``eval`` for literals, and for sums and repetitions of lists and tuples of them.

    Raises:
        UsageError: it is anything else; one sentence that names the setting.
        TypeError: it is no string, as ``eval`` says; fairseq counts on that.
    """
    if not isinstance(source, str):
        raise TypeError(f"expected a string, not {type(source).__name__}")
    try:
        return _value(ast.parse(source.strip(), mode="eval").body)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        shown = repr(source if len(source) <= _SHOWN else source[:_SHOWN] + "...")
        setting = _setting_of(source, sys._getframe(1))
        raise UsageError(
            f"{setting} is {shown}: expected a literal, such as (0.9, 0.98) or [(512, 3)] * 20; "
            "anything else would be run as a program, and is not"
        ) from None


def _value(node: ast.expr):
    """Of a part of the expression; ValueError where it is not one of those that are allowed."""
    if isinstance(node, ast.List | ast.Tuple):
        values = [_value(each) for each in node.elts]
        return values if isinstance(node, ast.List) else tuple(values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        return _put_together(_value(node.left), node.op, _value(node.right))
    return ast.literal_eval(node)


def _put_together(left, operator: ast.operator, right) -> list | tuple:
    if isinstance(operator, ast.Mult):
        if not isinstance(left, list | tuple):
            left, right = right, left
        if isinstance(left, list | tuple) and type(right) is int:
            if len(left) * right <= LONGEST:
                return left * right
    elif isinstance(left, list | tuple) and type(left) is type(right):
        if len(left) + len(right) <= LONGEST:
            return left + right
    raise ValueError("no list, or too long a one")


def _setting_of(source: str, frame: FrameType | None) -> str:
    """The name of a flag or setting that has this value, found in what called ``eval``."""
    while frame is not None:
        variables = frame.f_locals
        if isinstance(action := variables.get("action"), Action) and action.option_strings:
            return action.option_strings[-1]
        owner = variables.get("self")
        for holder in (*variables.values(), *(getattr(owner, n, None) for n in ("cfg", "args"))):
            if name := _name_in(holder, source):
                return f"the setting {name!r} of the checkpoint or command line"
        frame = frame.f_back
    return "a setting of the checkpoint or command line"


def _name_in(holder, source: str) -> str | None:
    """Of the entry that is ``source``, where ``holder`` is a config of any of fairseq's kinds."""
    if isinstance(holder, Namespace) or is_dataclass(holder) and not isinstance(holder, type):
        holder = vars(holder)
    if isinstance(holder, Mapping):
        with suppress(Exception):  # omegaconf's own, for entries that have no value
            return next((k for k, v in holder.items() if isinstance(v, str) and v == source), None)
    return None
