"""Opens checkpoint files for fairseq's commands and ``smoe``: detects damage, and executes no code.

Importing this needs neither torch nor fairseq.
"""

import argparse
import ast
import os
import pickle
import re
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from types import ModuleType, SimpleNamespace

from smoe_fairseq.errors import UsageError, naming_file
from smoe_fairseq.files import check_plain

from .checkpoint_names import rank_files
from .replacing import patches, replace
from .startup import load

_ARCHIVE = b"PK"  # begins a zip archive: torch's format since 1.6
_LEGACY = b"\x80"  # begins a pickle: torch's earlier format, which has no checksums
# torch's messages with the name of a refused type, since 2.6.
_REFUSED = re.compile(
    r"GLOBAL (\S+) was not an allowed|GLOBAL (\S+) whose module|got <class '([^']+)'>"
)
# torch's RuntimeErrors for damaged content. All others are about the system or memory.
_DAMAGE = ("failed reading zip archive", "hasRecord", "mmap can only be used", "magic number")
_MAX_SHOWN = 100  # characters of a type's name, or of an error
_TENSOR = re.compile(r"\w+ torch\.strided torch\.(b?float\w+|u?int\w+|bool) (?!meta)\S+")
_REAL = (".weight", ".bias", ".w1", ".w2", ".b1", ".b2")  # other tensors may be integers or bool
forms = load("smoe_fairseq.forms")  # an installed older copy of startup.py does not load it
_WHOLE = forms.Number(0, whole=True)
_CHECKPOINT = {
    "model": {str: object},
    "cfg?": (None, {}),  # older ones have args instead
    "optimizer_history?": [{"num_updates": _WHOLE, "lr_scheduler_state?": {}}],
    "extra_state?": {
        "train_iterator?": {"epoch?": forms.Number(1, whole=True), "iterations_in_epoch?": _WHOLE},
        "metrics?": {},
        "best?": (None, Real),
    },
}
_verified = set()  # files whose checksums this process has compared, by path and state


class InaccessibleCheckpoint(UsageError):
    """It cannot be read now (memory, open files, permissions, a failing disk), but may be intact."""


def _cut_off(path: Path | str) -> UsageError:
    return UsageError(
        f"{path} is cut off or not a checkpoint of fairseq: expected one, in training by --restore-file; "
        "smoe import converts a folder for transformers"
    )


def check_exists(path: Path | str) -> None:
    """Raise UsageError if a checkpoint is missing; the message differs if the path is the name of a set."""
    if os.path.exists(path) or "://" in str(path):  # fairseq can fetch URLs
        return
    if rank_files(path):
        raise UsageError(
            f"{path} is a set of --expert-parallel: make a file by `smoe consolidate {path} --output FILE`"
        )
    raise UsageError(f"{path} is missing")


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Compare a checkpoint's checksums, and convert errors that reading it raises in this context.

    Raises:
        InaccessibleCheckpoint: it may be intact.
        UsageError: all other errors.
    """
    try:
        if os.path.exists(path):
            check_plain(path)
            check_sums(path)
        yield
    except UsageError:
        raise
    except FileNotFoundError:
        check_exists(path)
        raise
    except pickle.UnpicklingError as error:
        raise UsageError(_refusal(path, str(error))) from None
    except (OSError, RuntimeError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or "no memory"
        if isinstance(error, RuntimeError) and any(message in reason for message in _DAMAGE):
            raise _cut_off(path) from None
        raise InaccessibleCheckpoint(f"{path} cannot be read: {reason[:_MAX_SHOWN]}") from None
    except Exception:  # torch raises many types of errors for bytes that are not a pickle
        raise _cut_off(path) from None


def check_content(path: Path | str, state, has_config: bool = True) -> None:
    """Raise UsageError unless a checkpoint's common parts have the types of fairseq's checkpoints.

    Args:
        has_config: whether it has to name its model and task.
    """
    message = forms.fault(state, _CHECKPOINT)
    if not message and state.get("optimizer_history") == []:
        message = "optimizer_history is empty"
    for name, tensor in () if message else state["model"].items():
        parts = [str(getattr(tensor, part, "")) for part in ("layout", "dtype", "device")]
        kind = " ".join([type(tensor).__name__, *parts]).strip()
        if not _TENSOR.fullmatch(kind) or "float" not in kind and name.endswith(_REAL):
            message = (
                f"model.{name[:_MAX_SHOWN]} is {kind}; expected a dense tensor of real numbers"
            )
            break
    if message:
        raise UsageError(f"{path} is not a checkpoint of fairseq: {message}")
    config = state.get("cfg") or {"model": state.get("args")}
    for part in ("model", "task"):
        if has_config and config.get(part, part) is None:
            raise UsageError(f"{path} does not name its {part}")


def _refusal(path: Path | str, message: str) -> str:
    """Replaces torch's message, which explains how to load the file in spite of the danger."""
    match = _REFUSED.search(message)
    name = next(filter(None, match.groups())) if match else ""
    name = name.removeprefix("builtins.")  # in messages of torch 2.6
    if name.isprintable() and 0 < len(name) <= _MAX_SHOWN:  # the file determines the name
        what = f"{name} (a type or function)"
    else:
        what = "more than data"
    return (
        f"{path} holds {what}, which is not loaded since it could run a program; expected tensors, "
        "numbers, text, and lists and dictionaries of them"
    )


def is_archive(path: Path | str) -> bool:
    """Whether a file has torch's format since 1.6, which has checksums and can be memory-mapped."""
    with open(path, "rb") as file:
        return file.read(len(_ARCHIVE)) == _ARCHIVE


def check_sums(path: Path | str) -> None:
    """Compare each part of a checkpoint with the checksum (CRC-32) that torch has stored.

    torch does not compare them: changed bytes of a tensor (a failing disk or memory, a broken transfer)
    would go unnoticed. This reads the file once more, at 1 to 2 GB/s in addition to the disk's time; once
    per process, unless the file changes.
    """
    state = os.stat(path)
    key = (os.path.realpath(path), state.st_ino, state.st_size, state.st_mtime_ns)
    if key in _verified:
        return
    with open(path, "rb") as file:
        start = file.read(2)
        if start[:1] == _LEGACY:
            return
        if start != _ARCHIVE:
            raise zipfile.BadZipFile
        try:
            with zipfile.ZipFile(file) as archive:
                parts = archive.infolist()
                if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
                    raise UsageError(f"{path} holds compressed parts")
                damaged = archive.testzip()
        except (OSError, MemoryError, UsageError):
            raise
        except Exception:  # damaged tables cause many types of errors
            raise zipfile.BadZipFile from None
    if len({part.filename for part in parts}) < len(parts):  # readers may disagree
        raise UsageError(f"{path} holds two parts of one name")
    if damaged is not None:
        raise UsageError(
            f"{path} is damaged: {damaged} does not match its checksum; expected another copy"
        )
    _verified.add(key)


# Keeps strings of a checkpoint's config from being executed.
#
# For fairseq 0.12.2 on any Python. ``torch.load(weights_only=True)`` loads only data, but this includes the
# config, and fairseq passes some of its strings to ``eval``: layers of convolutional models,
# ``adaptive_softmax_cutoff``, Adam's betas and two dozen more. So a file could run any program. Here each
# module of fairseq gets another ``eval``, which supports the values of these settings: literals, and sums and
# repetitions of lists such as fairseq's ``[(512, 3)] * 20``. It also replaces ``ast.literal_eval``, whose
# SyntaxError (``--lr 0,002``) argparse does not handle.


MAX_ENTRIES = 10_000  # of a list that is a sum or repetition, so that it cannot fill the memory


@patches("fairseq.*")
@patches("fairseq_cli.*")
def evaluate_literals_only(module: ModuleType) -> None:
    module.eval = evaluate
    if hasattr(module, "ast"):
        module.ast = SimpleNamespace(literal_eval=evaluate)


class NoLiteral(ValueError, argparse.ArgumentTypeError):
    """A text is not a literal; a ValueError whose message argparse prints."""


def evaluate(source, /):
    """``eval`` for literals, and for sums and repetitions of lists and tuples of them.

    Raises:
        NoLiteral: it is anything else; the message names the flag with this value, if there is one.
        TypeError: it is not a string; ``eval`` raises this too, and fairseq relies on it.
    """
    if not isinstance(source, str):
        raise TypeError(f"expected a string, not {type(source).__name__}")
    try:
        return _value(ast.parse(source.strip(), mode="eval").body)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        words = [part for word in sys.argv for part in word.split("=", 1)]
        flags = [w for w, value in zip(words, words[1:]) if value == source and w.startswith("--")]
        raise NoLiteral(
            f"{' '.join([*flags[:1], source[:60]])}: expected a literal, such as 0.5, (0.9, 0.98) or "
            "[(512, 3)] * 20; other expressions are not executed"
        ) from None


def _value(node: ast.expr):
    """The value of a part of the expression; raises ValueError unless it is allowed."""
    if isinstance(node, ast.List | ast.Tuple):
        values = [_value(each) for each in node.elts]
        return values if isinstance(node, ast.List) else tuple(values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        return _combine(_value(node.left), node.op, _value(node.right))
    return ast.literal_eval(node)


def _combine(left, operator: ast.operator, right) -> list | tuple:
    if isinstance(operator, ast.Mult):
        if not isinstance(left, list | tuple):
            left, right = right, left
        if isinstance(left, list | tuple) and type(right) is int:
            if len(left) * right <= MAX_ENTRIES:
                return left * right
    elif isinstance(left, list | tuple) and type(left) is type(right):
        if len(left) + len(right) <= MAX_ENTRIES:
            return left + right
    raise ValueError("not a list, or too long")


# Lets torch load fairseq checkpoints with ``weights_only=True``.
#
# For fairseq 0.12.2 on torch 2.6 and later, where ``torch.load`` by default loads only tensors, plain
# containers and types that are registered as safe. fairseq's checkpoints also contain the command line
# (``argparse.Namespace``) and, in their meters, numpy arrays and scalars (``--eval-bleu`` logs counts as
# arrays), for which we register our own types. Loading these executes no code from the file.


@patches("torch.serialization")
def allow_checkpoint_types(serialization: ModuleType) -> None:
    try:
        from torch import _weights_only_unpickler as unpickler

        from .plain_arrays import Array, Kind, reconstruct, scalar
    except ImportError:  # modules/ does not need numpy
        return
    ours = {"numpy.ndarray": Array, "numpy.dtype": Kind}
    for core in ("_core", "core"):  # of numpy 2 and 1
        ours[f"numpy.{core}.multiarray._reconstruct"] = reconstruct
        ours[f"numpy.{core}.multiarray.scalar"] = scalar
    serialization.add_safe_globals(
        [argparse.Namespace, *((type_, name) for name, type_ in ours.items())]
    )
    # Even if other code in this process registers numpy's own types as safe.
    replace(unpickler, "_get_user_allowed_globals", lambda allowed: {**allowed(), **ours})


# Checks each checkpoint that fairseq loads, with messages that name the file.
#
# For fairseq 0.12.2 on any torch. A full disk or a killed process leaves incomplete files, and a failing
# disk changes bytes of a tensor, which torch does not notice. If a file contains a type that is refused for
# safety, torch's message explains how to load it nevertheless, which would execute code from the file.


@patches("fairseq.checkpoint_utils:get_maybe_sharded_checkpoint_filename")
def name_missing_checkpoint(original, *arguments):
    check_exists(path := original(*arguments))
    return path


@patches("fairseq.checkpoint_utils:load_model_ensemble_and_task")
def name_unusable_checkpoint(original, filenames, *others, **options):
    with naming_file(", ".join(map(str, filenames))):
        return original(filenames, *others, **options)


@patches("fairseq.checkpoint_utils:load_checkpoint_to_cpu")
@patches("fairseq.checkpoint_utils:load_ema_from_checkpoint")
def name_unreadable_checkpoints(original, path, *others, **options):
    import torch

    with reading(path), naming_file(path):
        if os.path.exists(path):  # before fairseq upgrades older content
            state = torch.load(path, "cpu", mmap=is_archive(path), weights_only=True)
            check_content(path, state, has_config="ema" not in original.__name__)
        return original(path, *others, **options)
