"""Opens checkpoint files for fairseq's commands and ``smoe``: finds damage, and executes nothing in them.

Importing this needs neither torch nor fairseq.
"""

import argparse
import ast
import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from types import ModuleType

from smoe_fairseq.errors import UsageError, naming_file
from smoe_fairseq.files import check_plain, rank_files

from .replacing import patches, replace
from .startup import load

_ARCHIVE = b"PK"  # how a zip archive begins: torch's format since 1.6
_LEGACY = b"\x80"  # how a pickle begins: the one before, which has no checksums
# How torch names a type that it refuses, since 2.6.
_REFUSED = re.compile(
    r"GLOBAL (\S+) was not an allowed|GLOBAL (\S+) whose module|got <class '([^']+)'>"
)
# torch's words for bytes that are wrong, in a RuntimeError. All others are of the system or the memory.
_OF_CONTENT = ("failed reading zip archive", "hasRecord", "mmap can only be used", "magic number")
_LONGEST = 100  # letters that are shown of a type's name, or of an error
_TENSOR = re.compile(r"\w+ torch\.strided torch\.(b?float|u?int)\d+\w* (?!meta)\S+")  # of a weight
_REAL = (".weight", ".bias", ".w1", ".w2", ".b1", ".b2")  # whole numbers are of tables and counts
forms = load("smoe_fairseq.forms")  # an older copy of startup.py has not done it
_WHOLE = forms.Number(0, whole=True)
_CHECKPOINT = {
    "model": {str: object},
    "cfg?": (None, {}),  # older ones have args in its place
    "optimizer_history?": [{"num_updates": _WHOLE, "lr_scheduler_state?": {}}],
    "extra_state?": {
        "train_iterator?": {"epoch?": forms.Number(1, whole=True), "iterations_in_epoch?": _WHOLE},
        "metrics?": {},
        "best?": (None, Real),
    },
}
_sound = set()  # files that this process has found to be so, by path and state


class UnreadableCheckpoint(UsageError):
    """One sentence that names the file and says what is wrong with it."""


class CutOffCheckpoint(UnreadableCheckpoint):
    """The file is not a whole checkpoint."""


class InaccessibleCheckpoint(UnreadableCheckpoint):
    """It could not be read for want of memory, files or rights, or from a failing disk; it may be sound."""


class RefusedCheckpoint(UnreadableCheckpoint):
    """It holds more than data, and building that could run a program of the file's."""


def check_there(path: Path | str) -> None:
    """Raise UsageError unless there is a checkpoint; the sentence tells a missing one from a set's name."""
    if os.path.exists(path) or "://" in str(path):  # one that fairseq fetches from elsewhere
        return
    if rank_files(path):
        raise UsageError(
            f"{path} is a set of --expert-parallel: make a file by `smoe consolidate {path} --output FILE`"
        )
    raise UsageError(f"{path} is missing")


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Check a checkpoint, then read it in this context.

    Raises:
        UsageError: it is missing.
        UnreadableCheckpoint: whatever is wrong with it.
    """
    try:
        if os.path.exists(path):
            check_plain(path)
            check_sums(path)
        yield
    except UsageError:
        raise
    except FileNotFoundError:
        check_there(path)
        raise
    except pickle.UnpicklingError as error:
        raise RefusedCheckpoint(_refusal(path, str(error))) from None
    except (OSError, RuntimeError, MemoryError) as error:
        said = getattr(error, "strerror", None) or " ".join(str(error).split()) or "no memory"
        if isinstance(error, RuntimeError) and any(words in said for words in _OF_CONTENT):
            raise CutOffCheckpoint(f"{path} is cut off or not a checkpoint") from None
        raise InaccessibleCheckpoint(f"{path} cannot be read: {said[:_LONGEST]}") from None
    except Exception:  # torch raises many kinds of errors for bytes that are no pickle
        raise CutOffCheckpoint(f"{path} is cut off or not a checkpoint") from None


def check_content(path: Path | str, state, has_config: bool = True) -> None:
    """Raise UnreadableCheckpoint unless the parts that every checkpoint of fairseq has are of their kinds.

    Args:
        has_config: whether it has to say of what model it is.
    """
    wrong = forms.fault(state, _CHECKPOINT)
    if not wrong and state.get("optimizer_history") == []:
        wrong = "optimizer_history is empty"
    for name, tensor in () if wrong else state["model"].items():
        parts = [str(getattr(tensor, part, "")) for part in ("layout", "dtype", "device")]
        kind = " ".join([type(tensor).__name__, *parts]).strip()
        if not _TENSOR.fullmatch(kind) or "int" in kind and name.endswith(_REAL):
            wrong = f"model.{name[:_LONGEST]} is {kind}; expected a dense tensor of real numbers in memory"
            break
    if wrong:
        raise UnreadableCheckpoint(f"{path} is not a checkpoint of fairseq: {wrong}")
    config = state.get("cfg") or {"model": state.get("args")}
    for part in ("model", "task"):
        if has_config and config.get(part, part) is None:
            raise UnreadableCheckpoint(f"{path} does not say of what {part} it is")


def _refusal(path: Path | str, words: str) -> str:
    """One sentence for torch's several, which go on to say how to have the file run its program."""
    found = _REFUSED.search(words)
    name = next(filter(None, found.groups())) if found else ""
    name = name.removeprefix("builtins.")  # which torch 2.6 says and newer ones leave out
    if name.isprintable() and 0 < len(name) <= _LONGEST:  # else it is made to be printed
        what = f"{name} (a type or function)"
    else:
        what = "more than data"
    return (
        f"{path} holds {what}, which is not loaded since it could run a program; expected tensors, "
        "numbers, text, and lists and dictionaries of them"
    )


def is_archive(path: Path | str) -> bool:
    """Whether it is in torch's format since 1.6, which has checksums and can be left on disk."""
    with open(path, "rb") as file:
        return file.read(len(_ARCHIVE)) == _ARCHIVE


def check_sums(path: Path | str) -> None:
    """Compares each part of a checkpoint with the checksum (CRC-32) that torch has written beside it.

    torch does not look at these: changed bytes of a tensor (a failing disk or memory, a broken
    transfer) would be trained on and copied without a word. It costs reading the file once more, at
    1 to 2 GB/s beside the disk's own time, and once in a process for a file that stays as it is.
    """
    state = os.stat(path)
    known = (os.path.realpath(path), state.st_ino, state.st_size, state.st_mtime_ns)
    if known in _sound:
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
                    raise CutOffCheckpoint(f"{path} holds compressed parts")
                damaged = archive.testzip()
        except (OSError, MemoryError, UsageError):
            raise
        except Exception:  # what damaged tables lead to is of many kinds
            raise zipfile.BadZipFile from None
    if len({part.filename for part in parts}) < len(parts):  # readers would not take the same one
        raise UnreadableCheckpoint(f"{path} holds two parts of one name")
    if damaged is not None:
        raise UnreadableCheckpoint(
            f"{path} is damaged: {damaged} does not match its checksum; expected another copy"
        )
    _sound.add(known)


# Keeps the strings of a checkpoint's config from being run as code.
#
# For fairseq 0.12.2 on any Python. ``torch.load(weights_only=True)`` builds nothing but data, but that data
# holds the config of the training, and fairseq passes some of its strings to ``eval``: layers of
# convolutional models, ``adaptive_softmax_cutoff``, Adam's betas and two dozen more. A file from elsewhere
# could run any program that way, in fairseq-generate as in smoe analyze. Each module of fairseq gets a
# function of that name, which takes what these settings are made of: literals, and sums and repetitions of
# lists such as fairseq's own ``[(512, 3)] * 20``.


LONGEST = 10_000  # entries of a list that is put together; more would be a way to fill the memory
_SHOWN = 60  # characters of what is refused


@patches("fairseq.*")
@patches("fairseq_cli.*")
def evaluate_literals_only(module: ModuleType) -> None:
    module.eval = evaluate


def evaluate(source, /):
    """``eval`` for literals, and for sums and repetitions of lists and tuples of them.

    Raises:
        ValueError: it is anything else.
        TypeError: it is no string, as ``eval`` says; fairseq counts on that.
    """
    if not isinstance(source, str):
        raise TypeError(f"expected a string, not {type(source).__name__}")
    try:
        return _value(ast.parse(source.strip(), mode="eval").body)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise ValueError(
            f"{source:.{_SHOWN}}: expected a literal, such as (0.9, 0.98) or [(512, 3)] * 20; anything else "
            "would be run as a program, and is not"
        ) from None


def _value(node: ast.expr):
    """The value of a part of the expression; ValueError unless it is an allowed one."""
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


# Lets torch load fairseq checkpoints with ``weights_only=True``.
#
# For fairseq 0.12.2 on torch 2.6 and later. There ``torch.load`` builds tensors, plain containers and only
# those other types that have been named as safe, and fairseq calls it without choosing. Its checkpoints
# also hold the command line (``argparse.Namespace``) and, in their meters, numpy arrays and scalars
# (``--eval-bleu`` logs counts as arrays), for which builders of our own stand. Building these runs no code
# from the file; every other type stays refused.


@patches("torch.serialization")
def allow_checkpoint_types(serialization: ModuleType) -> None:
    try:
        from torch import _weights_only_unpickler as unpickler

        from .plain_arrays import Array, Kind, reconstruct, scalar
    except ImportError:  # without numpy, modules/ alone can be used
        return
    ours = {"numpy.ndarray": Array, "numpy.dtype": Kind}
    for core in ("_core", "core"):  # numpy 2 and, in older files, numpy 1
        ours[f"numpy.{core}.multiarray._reconstruct"] = reconstruct
        ours[f"numpy.{core}.multiarray.scalar"] = scalar
    serialization.add_safe_globals(
        [argparse.Namespace, *((stand_in, name) for name, stand_in in ours.items())]
    )
    # Also where other code in this process names numpy's own types as safe.
    replace(unpickler, "_get_user_allowed_globals", lambda allowed: {**allowed(), **ours})


# Checks each checkpoint that fairseq loads; one sentence if it cannot be read.
#
# For fairseq 0.12.2 on any torch. A full disk or a killed process leaves files that are cut off, and a
# failing disk changes bytes of a tensor, which torch does not notice. Where a file holds a type that is
# refused for safety, torch explains how to load it all the same, which would run the file's program; ours
# names the type. What a model or its task cannot be made of is named, too.


@patches("fairseq.checkpoint_utils:get_maybe_sharded_checkpoint_filename")
def name_missing_checkpoint(original, *arguments):
    check_there(path := original(*arguments))
    return path


@patches("fairseq.checkpoint_utils:load_model_ensemble_and_task")
def name_unusable_checkpoint(original, filenames, *others, **options):
    with naming_file(", ".join(map(str, filenames))):
        return original(filenames, *others, **options)


@patches("fairseq.checkpoint_utils:load_checkpoint_to_cpu")
@patches("fairseq.checkpoint_utils:load_ema_from_checkpoint")
def name_unreadable_checkpoints(original, path, *others, **options):
    import torch

    try:
        with reading(path), naming_file(path, "its content"):
            if os.path.exists(path):  # before fairseq changes what is older
                state = torch.load(path, "cpu", mmap=is_archive(path), weights_only=True)
                check_content(path, state, has_config="ema" not in original.__name__)
            return original(path, *others, **options)
    except CutOffCheckpoint as error:
        raise UsageError(
            f"{error}: expected one of fairseq, in training by --restore-file; smoe import makes one of "
            "a folder of transformers"
        ) from None
