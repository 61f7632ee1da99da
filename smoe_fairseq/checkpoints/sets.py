"""Checkpoints of several ranks: read as a set, written whole, consolidated and resharded."""

import functools
import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from smoe_fairseq.checkpoints import reading
from smoe_fairseq.checkpoints.content import MADE_OF, fingerprint
from smoe_fairseq.compat.checkpoint_names import (
    PENDING,
    pending,
    rank_file,
    rank_files,
    rank_of,
    set_name,
)
from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import whole_file, whole_files
from smoe_fairseq.models.checks import same_bits
from smoe_fairseq.modules.parallel import Placement

MOST_PROCESSES = 10_000
OPTIMIZER = "last_optimizer_state"
EMA = ("ema", "ema_fp32_params")  # in the extra state
UNSET = "._float_tensor"  # suffix of a buffer that fairseq saves without ever setting it
_EXPERTS = ".moe.experts."


class Shards:
    """The checkpoint files that contain all experts of a model: one file per rank, or one file.

    Args:
        files: in the order of ranks.
        optimizer_state: whether to keep the optimizer's state.

    Raises:
        UsageError: a file is missing, cut off, of another set, or lacks parameters of its record.
    """

    def __init__(self, files: list[Path], optimizer_state: bool = True):
        self.files = files
        self.states = [reading.open_checkpoint(file) for file in files]
        if not optimizer_state:
            for state in self.states:
                state.pop(OPTIMIZER, None)
        states = dict(zip(files, self.states, strict=True))
        records = {file: reading.Record.of(state, file) for file, state in states.items()}
        reading.check_set(records)
        self.record = records[files[0]]
        for file, state in states.items():
            self._check_parts(file, state)

    @classmethod
    def open(cls, path: Path, optimizer_state: bool = True) -> "Shards":
        """Open a set by its name (``DIR/checkpoint_last.pt``) or one of its files; or a single file.

        If a run was killed while it saved, its newest complete set is opened.
        """
        name = set_name(path)
        files, pending = rank_files(name), rank_files(name, PENDING)
        if not files and not pending:
            return cls([path], optimizer_state)
        ranks = files.keys() | pending.keys()
        if path.exists() and rank_of(path) is None:
            other = rank_file(name, min(ranks))
            raise UsageError(f"{path} and {other} both exist: move one of them away")
        if missing := {*range(len(ranks))} - ranks:
            raise UsageError(f"{rank_file(name, min(missing))} is missing")
        paths = [rank_file(name, rank) for rank in range(len(ranks))]
        return cls(_newest_set(paths) if pending else paths, optimizer_state)

    def _check_parts(self, file: Path, state: dict) -> None:
        """Raise UsageError unless the file has all parameters of its record."""
        if not isinstance(state.get("extra_state"), dict):
            raise UsageError(f"{file} is not a checkpoint of fairseq: extra_state is missing")
        for name in self.record.parameters:
            tensor = state["model"].get(name)
            if not torch.is_tensor(tensor):
                raise UsageError(f"{file}: {name} is missing")
            local = self.placement(name).num_local if _EXPERTS in name else None
            if local and tensor.shape[:1] != (local,):
                raise UsageError(f"{file}: {name} is {[*tensor.shape]}; expected {local} experts")

    def placement(self, name: str) -> Placement:
        """The placement of a tensor's experts in the first file."""
        return self.record.placement(name, len(self.files))

    def tensors(self, state: dict) -> Iterator[tuple[str, Tensor, bool]]:
        """(name, tensor, whether its first dimension counts experts) of model and optimizer."""
        for part, content in self._parts(state).items():
            for name, tensor in content.items():
                if torch.is_tensor(tensor):
                    yield f"{part} {name}", tensor, _EXPERTS in name
        for index, name in enumerate(self._optimized(state)):
            for key, value in state[OPTIMIZER]["state"].get(index, {}).items():
                if torch.is_tensor(value):
                    # A state of another shape is shared by all experts of the parameter.
                    stacked = _EXPERTS in name and value.shape == state["model"][name].shape
                    yield f"{name} {key}", value, stacked

    def _parts(self, state: dict) -> dict[str, dict]:
        """The model and its averages (EMA): the parts with an entry per parameter."""
        extra = state["extra_state"]
        parts = {"model": state["model"], **{key: extra.get(key) for key in EMA}}
        return {part: content for part, content in parts.items() if content}

    def _optimized(self, state: dict) -> list[str]:
        """Names of the optimizer's parameters, in its order."""
        optimizer = state.get(OPTIMIZER)
        if not optimizer:
            return []
        names = self.record.parameters
        numbers = [list(group["params"]) for group in optimizer.get("param_groups", [])]
        if numbers == [[0]] and len(names) > 1:
            raise UsageError(
                f"{self.files[0]}: --fp16 has flattened the optimizer's state; train with "
                "--fp16-no-flatten-grads or --memory-efficient-fp16, or begin by --finetune-from-model"
            )
        if numbers != [list(range(len(names)))]:
            raise UsageError(f"{self.files[0]}: several parameter groups cannot be divided")
        return names

    def check_agreement(self) -> None:
        """Raise UsageError unless shared tensors, and the replicas of an expert, are equal in all files.

        Buffers are not compared: fairseq never sets some of them.
        """
        parameters = {f"{p} {name}" for p in ("model", *EMA) for name in self.record.parameters}
        parts = self._parts(self.states[0]).items()
        buffers = {f"{part} {name}" for part, content in parts for name in content} - parameters
        for rank in range(1, len(self.states)):
            for name, tensor, stacked in self.tensors(self.states[rank]):
                replica = rank % self.placement(name).group_size if stacked else 0
                other = self.by_rank[replica].get(name)
                if name in buffers or other is not None and same_bits(tensor, other):
                    continue
                if _EXPERTS in name and not stacked:
                    raise self._undivided(rank, name)
                shown = name.removeprefix("model ")
                raise UsageError(f"{self.files[rank]}: {shown} differs from the others")

    def check_division(self, world_size: int) -> None:
        """Raise UsageError if a state that all experts share would have to be divided."""
        if world_size == len(self.files):
            return
        for name, tensor, stacked in self.tensors(self.states[0]):
            if _EXPERTS in name and not stacked and tensor.dim():  # a single number is a step
                raise self._undivided(0, name)

    def _undivided(self, rank: int, name: str) -> UsageError:
        return UsageError(
            f"{self.files[rank]}: all experts of a rank share this optimizer's {name.split()[-1]}, which "
            "cannot be divided; smoe consolidate leaves it out"
        )

    @functools.cached_property
    def by_rank(self) -> list[dict[str, Tensor]]:
        """The tensors of each file, by name."""
        return [{name: tensor for name, tensor, _ in self.tensors(state)} for state in self.states]

    def experts(self, name: str, wanted: range) -> Tensor:
        """Experts ``wanted`` of a stacked tensor, copied from the files."""
        local = self.placement(name).num_local
        first = self.by_rank[0][name]
        result = first.new_empty(len(wanted), *first.shape[1:])
        for row, expert in enumerate(wanted):
            rank, offset = divmod(expert, local)
            result[row] = self.by_rank[rank][name][offset]
        return result

    def state_for(self, world_size: int, rank: int = 0) -> dict:
        """The checkpoint of rank ``rank`` of ``world_size``."""
        stacks = {
            name: self.experts(name, self.record.placement(name, world_size, rank).local)
            for name, _, stacked in self.tensors(self.states[0])
            if stacked
        }

        def resharded(part: str, content: dict) -> dict:
            return {key: stacks.get(f"{part} {key}", value) for key, value in content.items()}

        state = dict(self.states[0])
        state["extra_state"] = extra = dict(state["extra_state"])
        for part, content in self._parts(state).items():
            (state if part == "model" else extra)[part] = resharded(part, content)
        if names := self._optimized(state):
            moments = state[OPTIMIZER]["state"]
            state[OPTIMIZER] = {
                **state[OPTIMIZER],
                "state": {i: resharded(names[i], values) for i, values in moments.items()},
            }
        iterator = extra.get("train_iterator")  # missing in older files crash.pt
        if iterator and "ranks" not in iterator:  # an earlier version counted batches of each rank
            batches = iterator["iterations_in_epoch"] * len(self.files) // world_size
            extra["train_iterator"] = {**iterator, "iterations_in_epoch": batches}
        state[reading.RECORD] = {**state[reading.RECORD], "world_size": world_size, "rank": rank}
        return state


def _newest_set(files: list[Path]) -> list[Path]:
    choices = [
        {record.save: path for path in (file, pending(file)) if (record := reading.record_of(path))}
        for file in files
    ]
    newest = reading.newest_whole(choices)
    return files if newest is None else [choice[newest] for choice in choices]


# Shared by all conversions: read the weights, check them, write one file.


def weights_of(path: Path) -> dict:
    """The content of a checkpoint without optimizer state and EMA, its tensors checked.

    Args:
        path: a file, or the name of a set of ``--expert-parallel``, whose experts are joined.

    Raises:
        UsageError: it is missing or damaged, or not a complete set; or as `check_tensors`.
    """
    name = set_name(path)
    is_set = rank_of(path) is not None or rank_files(name) or rank_files(name, PENDING)
    if is_set or reading.Record.of(reading.open_checkpoint(path), path) is not None:
        shards = Shards.open(path, optimizer_state=False)
        for state in shards.states:
            state["extra_state"] = _without(state["extra_state"], EMA)
            check_tensors(path, state["model"])
        shards.check_agreement()
        return shards.state_for(world_size=1)
    state = _without(reading.open_checkpoint(path), (OPTIMIZER,))
    check_tensors(path, state["model"])
    return {**state, "extra_state": _without(state.get("extra_state", {}), EMA)}


def _without(content: Mapping, keys: Iterable[str]) -> dict:
    return {key: value for key, value in content.items() if key not in keys}


def check_tensors(path: Path, model: Mapping) -> None:
    """Raise UsageError unless all tensors of a model are finite and stored completely."""
    for name, tensor in model.items():
        # An expanded tensor could have more elements than fit into any memory.
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise UsageError(f"{path}: {name} is larger than its content")
    reading.check_finite(path, ((name, t) for name, t in model.items() if not name.endswith(UNSET)))


def memory_key(tensor: Tensor) -> tuple:
    """Identifies the memory of a tensor: equal for tied tensors."""
    start = tensor.data_ptr()
    return (start, tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else (id(tensor),)


def add_file_arguments(
    parser: ArgumentParser, path: str, output: str = "file to write", metavar: str = "CHECKPOINT"
) -> None:
    """``CHECKPOINT``, ``--output FILE`` and ``--force``; the texts are their help."""
    parser.add_argument("path", type=Path, metavar=metavar, help=path)
    add_output_arguments(parser, output)


def add_output_arguments(parser: ArgumentParser, text: str = "file to write") -> None:
    parser.add_argument("--output", type=_output_path, required=True, metavar="FILE", help=text)
    parser.add_argument("--force", action="store_true", help="overwrite FILE")


def _output_path(text: str) -> Path:
    if not Path(text).name:
        raise ArgumentTypeError(f"{text!r}: expected the name of a file or folder to write")
    return Path(text)


def check_output(read: Iterable[Path], files: Iterable[Path], force: bool) -> None:
    """Raise UsageError before any work if one of ``files`` is among ``read``, exists, or is not writable."""
    read = {file.resolve() for file in read}
    for file in files:
        if file.resolve() in read:
            raise UsageError(f"--output: {file} is the input; choose another name or folder")
        if file.is_dir():
            raise UsageError(f"--output: {file} is a folder; expected a file's name")
        if file.exists() and not force:
            raise UsageError(f"--output: {file} exists already; --force overwrites it")
        folder = next(parent for parent in file.absolute().parents if os.path.exists(parent))
        if not folder.is_dir():
            raise UsageError(f"--output: {file} cannot be written: {folder} is not a folder")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"--output: {file} cannot be written: no permission in {folder}")


def write_converted(state: Mapping, output: Path, force: bool) -> None:
    """Write a checkpoint atomically.

    Args:
        force: replace an existing file.

    Raises:
        UsageError: the file cannot be written, or exists although ``force`` is false.
    """
    with whole_file(output, f"--output {output}", parents=True, replace=force) as partial:
        with open(partial, "wb") as opened:
            torch.save(state, opened)


def write_set(shards: Shards, output: Path, world_size: int, force: bool) -> list[Path]:
    """Write the checkpoint, or set, for ``world_size`` ranks, all files or none; returns the files.

    Raises:
        UsageError: the experts cannot be divided among the ranks, a file exists although ``force`` is
            false, or a file cannot be written.
    """
    try:
        for num_experts in shards.record.numbers_of_experts:
            Placement(num_experts, world_size)
    except ValueError as error:
        raise UsageError(f"--world-size {world_size}: {error}") from None
    files = [output] if world_size == 1 else [rank_file(output, rank) for rank in range(world_size)]
    existing = [*rank_files(output).values(), *rank_files(output, PENDING).values()]
    read = {file.resolve() for file in shards.files}
    if world_size == 1 and any(file.resolve() in read for file in existing):
        raise UsageError(f"--output: {output} is the name of the input set; choose another")
    other_set = [file for file in existing if world_size > 1 and file not in files]
    check_output(shards.files, [*files, *other_set], force)
    if world_size > 1 and output.exists():
        raise UsageError(f"--output: {output} exists, and would be another checkpoint of that name")
    shards.check_agreement()
    shards.check_division(world_size)
    with whole_files(files, f"--output {output}", parents=True, replace=force) as partials:
        for rank, partial in enumerate(tqdm(partials, output.name, unit=" files")):
            with open(partial, "wb") as opened:
                torch.save(shards.state_for(world_size, rank), opened)
    for file in other_set:
        file.unlink()
    return files


# ``smoe consolidate``: one ordinary checkpoint of a run with sharded experts.


def add_consolidate_arguments(parser: ArgumentParser) -> None:
    add_file_arguments(parser, "the files' name without -rank-N", metavar="DIR/checkpoint_last.pt")
    words = "keep the optimizer's state, to continue training in one process"
    parser.add_argument("--optimizer-state", action="store_true", help=words)


def run_consolidate(args: Namespace) -> None:
    name = set_name(args.path)
    if not rank_files(name) and not rank_files(name, PENDING):
        if name.is_file():
            raise UsageError(f"{name} is an ordinary checkpoint already")
        inside = ", as DIR/checkpoint_best.pt does" * name.is_dir()
        raise UsageError(
            f"{rank_file(name, 0)} is missing: {name} is not the name of a set{inside}"
        )
    made_of = {name.name: fingerprint(name)}
    # By the file of rank 0, since an older checkpoint may have the plain name.
    shards = Shards.open(rank_file(name, 0), args.optimizer_state)
    shards.states[0][MADE_OF] = made_of
    write_set(shards, args.output, 1, args.force)
    numbers = " or ".join(map(str, shards.record.numbers_of_experts))
    ranks, update = len(shards.files), shards.record.num_updates
    print(f"{args.output}: {numbers} experts per MoE layer, of {ranks} ranks, update {update}")


# ``smoe reshard``: the checkpoint for another number of ranks, including the optimizer's state.


def add_reshard_arguments(parser: ArgumentParser) -> None:
    read = "a checkpoint of one process, or the name of several files without -rank-N"
    written = "name of the files to write, without -rank-N; to train on, their folder is --save-dir"
    add_file_arguments(parser, read, written, "DIR/checkpoint_last.pt")
    words = "number of ranks to write it for"
    parser.add_argument("--world-size", type=int, required=True, metavar="M", help=words)


def run_reshard(args: Namespace) -> None:
    if not 1 <= args.world_size <= MOST_PROCESSES:
        raise UsageError(f"--world-size {args.world_size}: expected 1 to {MOST_PROCESSES:,}")
    shards = Shards.open(args.path)
    files = write_set(shards, args.output, args.world_size, args.force)
    before, update = len(shards.files), shards.record.num_updates
    ranks = "1 rank" if args.world_size == 1 else f"{args.world_size} ranks"
    last = f" to {files[-1].name}" if len(files) > 1 else ""
    print(f"{files[0]}{last}: update {update}, for {ranks} instead of {before}")
    if args.world_size != before:
        factor = before / args.world_size
        flags = "--update-freq" if factor >= 1 else "--update-freq, or --max-tokens,"
        print(f"to keep the global batch, continue training with {flags} times {factor:g}")
