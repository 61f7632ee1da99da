"""The mean of several checkpoints' weights, summed in float64 and rounded once.

One file is read after the other, so memory holds the sums and the one checkpoint that is being added.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from smoe_fairseq.checkpoint import dictionaries
from smoe_fairseq.checkpoint.content import open_checkpoint
from smoe_fairseq.checkpoint.names import PENDING, rank_files, rank_of, set_name
from smoe_fairseq.checkpoint.record import Record
from smoe_fairseq.checkpoint.shards import EMA, OPTIMIZER, Shards
from smoe_fairseq.modules.placement import Placement
from smoe_fairseq.system.errors import UsageError

COUNTS = ".bias.steps"  # in whole numbers, of --moe-balance bias; they go on from update to update
_UNSET = "._float_tensor"  # a buffer that fairseq saves without ever setting it
# What the same tensors compute in translation depends on these too; shapes show all else.
_SETTINGS = (
    *("encoder_attention_heads", "decoder_attention_heads", "activation_fn"),
    *("encoder_normalize_before", "decoder_normalize_before"),
    *("no_scale_embedding", "no_token_positional_embeddings"),
    *("smoe_strata", "moe_gate", "moe_top_k", "moe_top_p", "moe_null_experts", "moe_bias_step"),
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
        _check_plain(path, state["model"])
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
        owners.update({name: places.setdefault(_place(t), name) for name, t in model.items()})
    for name, owner in owners.items():
        if owner != name and _place(model[name]) != _place(model[owner]):
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


def _place(tensor: Tensor) -> tuple:
    """The same for two tensors that are one."""
    start = tensor.data_ptr()
    return (start, tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else (id(tensor),)


def _check_plain(path: Path, model: Mapping) -> None:
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
        "dictionaries": state.get(dictionaries.KEY),
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
