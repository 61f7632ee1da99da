"""``smoe average``: one checkpoint whose weights are the mean of several."""

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from smoe_fairseq.checkpoints import io
from smoe_fairseq.checkpoints.io import (
    PENDING,
    Record,
    files_read,
    open_checkpoint,
    rank_files,
    rank_of,
    set_name,
)
from smoe_fairseq.checkpoints.sets import EMA, OPTIMIZER, Shards
from smoe_fairseq.errors import UsageError, quietly
from smoe_fairseq.modules.parallel import Placement

COUNTS = (
    ".steps"  # in whole numbers, of --moe-balance bias and --moe-gate relu; they go on with updates
)
_UNSET = "._float_tensor"  # a buffer that fairseq saves without ever setting it
# What the same tensors compute in translation depends on these too; shapes show all else.
_SETTINGS = (
    *("encoder_attention_heads", "decoder_attention_heads", "activation_fn"),
    *("encoder_normalize_before", "decoder_normalize_before"),
    *("no_scale_embedding", "no_token_positional_embeddings"),
    *("smoe_strata", "moe_gate", "moe_top_k", "moe_top_p", "moe_null_experts", "moe_bias_step"),
    *("moe_copy_experts", "moe_constant_experts"),
    *("moe_gate_normalization", "moe_eval_capacity_factor", "smoe_norm", "moe_stacked"),
)


def weights_of(path: Path) -> dict:
    """A checkpoint without the optimizer's state and without averages that training has kept (EMA).

    Args:
        path: a file, or the name that stands for a set of files of ``--expert-parallel``, whose experts are
            brought together.

    Raises:
        UsageError: it is missing, damaged, or no whole set.
    """
    name = set_name(path)
    is_set = rank_of(path) is not None or rank_files(name) or rank_files(name, PENDING)
    if is_set or Record.of(open_checkpoint(path)) is not None:
        shards = Shards.open(path, optimizer_state=False)
        for state in shards.states:
            state["extra_state"] = _without(state["extra_state"], EMA)
        shards.check_agreement()
        return shards.state_for(Placement(shards.record.num_experts))
    state = _without(open_checkpoint(path), (OPTIMIZER,))
    return {**state, "extra_state": _without(state.get("extra_state", {}), EMA)}


def average(paths: Sequence[Path], progress: Callable = lambda count=0: None) -> dict:
    """An ordinary checkpoint of the mean weights; all else in it is the last one's.

    Numbers of less than 32 bits become float32: a mean has more digits than what it is of. Whole numbers have
    to be the same in all, except for `COUNTS`, which are the last one's.

    Args:
        progress: called before each checkpoint with its number of tensors, and after each tensor without one.

    Raises:
        UsageError: they are of different architectures or dictionaries, one has diverged, or a file is
            damaged; the sentence names it.
    """
    sums, owners, first = {}, {}, None
    for path in paths:
        state = None  # before there is another
        state = weights_of(path)
        check_plain(path, state["model"])
        if first is None:
            first = _outline(state)
        else:
            _check_alike(paths[0], first, path, _outline(state))
        progress(len(state["model"]))
        _add(sums, owners, path, state["model"], progress)
    last = state["model"]
    means = {}
    for name, owner in owners.items():
        if owner == name:
            means[name] = _mean(name, sums.pop(name), len(paths), last[name])
    state["model"] = {name: means[owners[name]] for name in last}
    return state


def _add(sums: dict, owners: dict, path: Path, model: Mapping, progress: Callable) -> None:
    """Adds a model to ``sums``. ``owners`` says under whose name each tensor is summed.

    Tensors that share their memory, such as tied embeddings, are summed once, and share it in the file.
    """
    if not owners:
        places = {}
        owners.update({name: places.setdefault(place_of(t), name) for name, t in model.items()})
    for name, owner in owners.items():
        if owner != name and place_of(model[name]) != place_of(model[owner]):
            sums[name] = sums[owner].clone()  # shared in the files before this one alone
            owners[name] = name
    for name, tensor in model.items():
        if owners[name] == name:
            if tensor.is_floating_point():
                _add_floating(sums, path, name, tensor)
            else:
                _take_whole(sums, path, name, tensor)
        progress()


def _add_floating(sums: dict, path: Path, name: str, tensor: Tensor) -> None:
    summand = tensor.to(torch.float64, copy=True)
    if not name.endswith(_UNSET) and not summand.isfinite().all():
        raise UsageError(
            f"{path}: {name} has values that are not numbers (NaN or infinity): its training has diverged; "
            "leave it out"
        )
    sums[name] = sums[name].add_(summand) if name in sums else summand


def _take_whole(sums: dict, path: Path, name: str, tensor: Tensor) -> None:
    if name in sums and not name.endswith(COUNTS) and not torch.equal(sums[name], tensor):
        raise UsageError(
            f"{path}: {name} is of whole numbers, which have no mean, and others than in the file before; "
            "expected checkpoints of one run"
        )
    sums[name] = tensor


def _mean(name: str, total: Tensor, count: int, like: Tensor) -> Tensor:
    if name.endswith(_UNSET) or not like.is_floating_point():
        return like
    return (total / count).to(torch.promote_types(like.dtype, torch.float32))


def place_of(tensor: Tensor) -> tuple:
    """The same for two tensors that are one."""
    start = tensor.data_ptr()
    return (start, tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else (id(tensor),)


def check_plain(path: Path, model: Mapping) -> None:
    """Raise UsageError unless all in a model are tensors with numbers of their own."""
    for name, tensor in model.items():
        if not (isinstance(name, str) and torch.is_tensor(tensor) and _is_plain(tensor)):
            raise UsageError(
                f"{path} is not a checkpoint of fairseq: {name} in its model is no tensor of real numbers"
            )


def _is_plain(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        return False
    # One that is expanded could stand for more numbers than any memory holds.
    size = tensor.numel() * tensor.element_size()
    return size <= tensor.untyped_storage().nbytes() and not tensor.is_complex()


def _outline(state: Mapping) -> dict:
    """What checkpoints have to have in common."""
    options = (state.get("cfg") or {}).get("model") or state.get("args") or {}
    options = options if isinstance(options, Mapping) else getattr(options, "__dict__", {})
    return {
        "tensors": {
            name: f"{tuple(tensor.shape)} {tensor.dtype}" for name, tensor in state["model"].items()
        },
        "settings": {name: str(options[name]) for name in _SETTINGS if name in options},
        "dictionaries": state.get(io.DICTIONARIES),
    }


def _check_alike(first_path: Path, first: dict, path: Path, other: dict) -> None:
    """Raise UsageError where they are not; what an older checkpoint does not say is not compared."""
    tensors, there = other["tensors"], first["tensors"]
    settings = first["settings"].keys() & other["settings"].keys()
    for name in {**there, **tensors}:
        _check_same(first_path, path, name, there.get(name), tensors.get(name))
    for name in sorted(settings):
        shown = f"the setting {name}"
        _check_same(first_path, path, shown, first["settings"][name], other["settings"][name])
    words = [outline["dictionaries"] for outline in (first, other)]
    if None not in words and words[0] != words[1]:
        raise UsageError(
            f"{path} was trained with another dictionary than {first_path}: its numbers stand for other words"
        )


def _check_same(first_path: Path, path: Path, what: str, there: str, here: str) -> None:
    if there != here:
        raise UsageError(
            f"{path} is of another architecture than {first_path}: {what} is {here or 'missing'} in it and "
            f"{there or 'missing'} in the other"
        )


def _without(content: Mapping, keys: Sequence[str]) -> dict:
    return {key: value for key, value in content.items() if key not in keys}


# ``smoe average``: one checkpoint whose weights are the mean of several.

with quietly():
    from smoe_fairseq.checkpoints.sets import check_output, write_content

# How fairseq names what it saves at the end of an epoch, and after so many updates.
KINDS = {
    "epoch": re.compile(r"checkpoint(\d+)\.pt"),
    "update": re.compile(r"checkpoint_\d+_(\d+)\.pt"),
}


def add_average_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="checkpoints, or sets of --expert-parallel by their names without -rank-N; or a run's folder "
        "with --last",
    )
    parser.add_argument(
        "--last", type=int, metavar="N", help="the N newest checkpoints of a folder"
    )
    parser.add_argument(
        "--by",
        choices=sorted(KINDS),
        help="with --last: those saved after so many updates, or at the end of epochs; by default those "
        "that there are",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="what to write")
    parser.add_argument("--force", action="store_true", help="overwrite FILE")


def run_average(args: Namespace) -> None:
    """Averages, writes, and says of what."""
    paths = chosen(args.paths, args.last, args.by)
    read = [file for path in paths for file in files_read(path)]
    check_output(read, [args.output], args.force)
    with tqdm(unit=" tensors", desc=args.output.name) as bar:

        def progress(count: int = 0) -> None:
            if count and not bar.total:
                bar.total = count * (len(paths) + 1)  # once more to read what has been written
            bar.update(0 if count else 1)

        state = average(paths, progress)
        write_content(state, args.output, progress)
    print(f"{args.output}: mean of {len(paths)} checkpoints, {paths[0]} to {paths[-1].name}")
    if any(name.endswith(COUNTS) for name in state["model"]):
        print(f"the experts' counts (*{COUNTS}), which are whole numbers, are those of {paths[-1]}")


def chosen(paths: Sequence[Path], last: int | None, by: str | None) -> list[Path]:
    """The checkpoints to average, the newest last; a set by its name without ``-rank-N``.

    Raises:
        UsageError: there are too few, or it is not clear which are meant.
    """
    folders = [path for path in paths if path.is_dir()]
    if last is None:
        if by is not None:
            raise UsageError(f"--by {by}: expected --last with it, and a run's folder")
        if folders:
            raise UsageError(
                f"{folders[0]} is a folder: add --last N for its newest checkpoints, or name files"
            )
        return _named(paths)
    if last < 2:
        raise UsageError(f"--last {last}: expected 2 or more")
    if len(paths) > 1 or not folders:
        raise UsageError(f"--last {last}: expected one folder, not {', '.join(map(str, paths))}")
    return _newest(folders[0], last, by)


def _named(paths: Sequence[Path]) -> list[Path]:
    """The same without the further files of a set, which a shell's ``*`` names one by one."""
    found = []
    for path in paths:
        is_rank = rank_of(path) is not None
        name = set_name(path) if is_rank else path
        if name in found and not is_rank:
            raise UsageError(f"{path} is named twice: it would count twice")
        if name not in found:
            found.append(name)
    if len(found) < 2:
        raise UsageError(
            f"{found[0]} is one checkpoint: expected two or more, or a folder with --last N"
        )
    return found


def _newest(folder: Path, last: int, by: str | None) -> list[Path]:
    names = {set_name(file).name for file in folder.iterdir() if file.suffix in (".pt", PENDING)}
    found = {kind: {} for kind in KINDS}
    for name in names:
        for kind, pattern in KINDS.items():
            if match := pattern.fullmatch(name):
                found[kind][int(match[1])] = folder / name
    if by is None:
        there = [kind for kind in KINDS if found[kind]]
        if len(there) > 1:
            raise UsageError(
                f"{folder} has checkpoints by update and by epoch: add --by update or --by epoch"
            )
        by = there[0] if there else "update"
    if len(found[by]) < last:
        raise UsageError(
            f"--last {last}: {folder} has {len(found[by])} checkpoints by {by}; fairseq-train keeps them by "
            "update with --save-interval-updates, by epoch without --no-epoch-checkpoints"
        )
    return [found[by][number] for number in sorted(found[by])[-last:]]
