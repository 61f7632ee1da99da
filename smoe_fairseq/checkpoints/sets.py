"""Checkpoints of several ranks: read as a set, written whole, consolidated and resharded."""

import functools
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from smoe_fairseq.checkpoints.io import (
    PENDING,
    RECORD,
    Record,
    check_set,
    newest_whole,
    open_checkpoint,
    pending,
    rank_file,
    rank_files,
    rank_of,
    record_of,
    set_name,
)
from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import whole_file, whole_files
from smoe_fairseq.modules.parallel import Placement

MOST_PROCESSES = 10_000
OPTIMIZER = "last_optimizer_state"
_EXPERTS = ".moe.experts."
EMA = ("ema", "ema_fp32_params")  # in the extra state


class Shards:
    """Checkpoint files that hold all experts between them: one file per process, or one of one process.

    Args:
        files: in the order of ranks.
        optimizer_state: whether it is of interest; where it is not, it is as if it were not there.

    Raises:
        UsageError: a file is missing, cut off, of another set or differs from the others where they
            have to agree; the sentence names it.
    """

    def __init__(self, files: list[Path], optimizer_state: bool = True):
        self.files = files
        self.states = [open_checkpoint(file) for file in files]
        if not optimizer_state:
            for state in self.states:
                state.pop(OPTIMIZER, None)
        records = {file: Record.of(state) for file, state in zip(files, self.states, strict=True)}
        if len(files) > 1 or rank_of(files[0]) is not None:
            check_set(records)
        self.record = records[files[0]]
        if self.record is None:
            raise UsageError(
                f"{files[0]} does not say which experts it holds: it has none, or it is old"
            )
        if self.record.world_size != len(files):
            raise UsageError(
                f"{files[0]} holds one of {self.record.world_size} processes' experts, without the rest"
            )
        for file, state in zip(files, self.states, strict=True):
            self._check_parts(file, state)

    @classmethod
    def open(cls, path: Path, optimizer_state: bool = True) -> "Shards":
        """``DIR/checkpoint_last.pt`` stands for its ``-rank-N`` files, or is a file of one process."""
        name = set_name(path)
        files, waiting = rank_files(name), rank_files(name, PENDING)
        if not files and not waiting:
            return cls([path], optimizer_state)
        if path.exists() and rank_of(path) is None:
            raise UsageError(
                f"{path} and {rank_file(name, 0)} are both there: move the one away that is not meant"
            )
        there = files.keys() | waiting.keys()
        count = max(there) + 1
        if count > len(there):
            gap = next(rank for rank in range(count) if rank not in there)
            raise UsageError(f"{rank_file(name, gap)} is missing")
        chosen = [files.get(rank, rank_file(name, rank)) for rank in range(count)]
        if waiting:
            chosen = _newest_set(chosen)
        return cls(chosen, optimizer_state)

    def _check_parts(self, file: Path, state: dict) -> None:
        """Raise UsageError unless all is there that the file's record speaks of."""
        if not isinstance(state.get("extra_state"), dict):
            raise UsageError(f"{file} is not a checkpoint of fairseq: extra_state is missing in it")
        for name in self.record.parameters:
            tensor = state["model"].get(name)
            if not torch.is_tensor(tensor):
                raise UsageError(f"{file}: {name} is missing in its model")
            if _EXPERTS not in name:
                continue
            local = self.place_of(name).num_local
            if tensor.shape[:1] != (local,):
                raise UsageError(
                    f"{file}: {name} is {tuple(tensor.shape)} in its model; expected {local} experts"
                )

    def place_of(self, name: str) -> Placement:
        """Of the experts that a tensor is of, in the first file."""
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
                    # What is not of the parameter's shape says something of all its experts together.
                    stacked = _EXPERTS in name and value.shape == state["model"][name].shape
                    yield f"{name} {key}", value, stacked

    def _parts(self, state: dict) -> dict[str, dict]:
        """All that has an entry for each parameter of the model."""
        extra = state["extra_state"]
        parts = {"model": state["model"], **{key: extra.get(key) for key in EMA}}
        return {part: content for part, content in parts.items() if content}

    def _optimized(self, state: dict) -> tuple[str, ...]:
        """Names of the optimizer's parameters, in its order."""
        optimizer = state.get(OPTIMIZER)
        if not optimizer:
            return ()
        groups, names = optimizer.get("param_groups", []), self.record.parameters
        numbers = [list(group["params"]) for group in groups]
        if numbers == [[0]] and len(names) > 1:
            raise UsageError(
                f"{self.files[0]}: the optimizer's state is of all parameters in one row, as --fp16 keeps "
                "it, and cannot be divided; train with --fp16-no-flatten-grads or "
                "--memory-efficient-fp16, or begin with its model alone by --finetune-from-model"
            )
        if numbers != [list(range(len(names)))]:
            raise UsageError(
                f"{self.files[0]}: the state of an optimizer with several parameter groups cannot be "
                "divided"
            )
        return names

    def check_agreement(self) -> None:
        """What all processes share is the same in all files, as are the replicas of an expert."""
        parameters = {
            f"{part} {name}" for part in ("model", *EMA) for name in self.record.parameters
        }
        buffers = {
            f"{part} {name}"
            for part, content in self._parts(self.states[0]).items()
            for name in content
        } - parameters  # fairseq has some that are never set
        for rank in range(1, len(self.states)):
            for name, tensor, stacked in self.tensors(self.states[rank]):
                if name in buffers:
                    continue
                alike = rank % self.place_of(name).group_size if stacked else 0
                other = self.by_rank[alike].get(name)
                if other is not None and same_bits(tensor, other):
                    continue
                if _EXPERTS in name and not stacked:
                    raise self._undivided(rank, name)
                raise UsageError(
                    f"{self.files[rank]}: {name.removeprefix('model ')} is not as in the other files"
                )

    def check_division(self, world_size: int) -> None:
        """All of each expert can be told from the others', where so many processes are other ones."""
        if world_size == len(self.files):
            return
        for name, tensor, stacked in self.tensors(self.states[0]):
            if _EXPERTS in name and not stacked and tensor.dim():  # a number alone is a step
                raise self._undivided(0, name)

    def _undivided(self, rank: int, name: str) -> UsageError:
        return UsageError(
            f"{self.files[rank]}: this optimizer's {name.split()[-1]} is of all experts of a process "
            "together and cannot be divided; smoe consolidate leaves it out"
        )

    @functools.cached_property
    def by_rank(self) -> list[dict[str, Tensor]]:
        """The tensors of each file, by name."""
        return [{name: tensor for name, tensor, _ in self.tensors(state)} for state in self.states]

    def expert(self, name: str, expert: int) -> Tensor:
        """One expert's part of a stacked tensor, in the file that holds it."""
        rank, offset = divmod(expert, self.place_of(name).num_local)
        return self.by_rank[rank][name][offset]

    def experts(self, name: str, wanted: range) -> Tensor:
        """Experts ``wanted`` of one stacked tensor, copied from the files that hold them."""
        first = self.by_rank[0][name]
        result = first.new_empty(len(wanted), *first.shape[1:])
        for expert in wanted:
            result[expert - wanted.start] = self.expert(name, expert)
        return result

    def state_for(self, place: Placement, progress=lambda: None) -> dict:
        """The checkpoint of one process under another placement.

        Args:
            place: which process of how many; the number of experts is each layer's own.
            progress: called after each tensor.
        """
        taken = {}
        for name, _, experts in self.tensors(self.states[0]):
            if experts:
                own = self.record.placement(name, place.world_size, place.rank)
                taken[name] = self.experts(name, own.local)
            progress()

        def placed(part: str, content: dict) -> dict:
            return {key: taken.get(f"{part} {key}", value) for key, value in content.items()}

        state = dict(self.states[0])
        state["extra_state"] = extra = dict(state["extra_state"])
        for part, content in self._parts(state).items():
            (state if part == "model" else extra)[part] = placed(part, content)
        if names := self._optimized(state):
            moments = state[OPTIMIZER]["state"]
            state[OPTIMIZER] = {
                **state[OPTIMIZER],
                "state": {i: placed(names[i], values) for i, values in moments.items()},
            }
        if "train_iterator" in extra:  # not in a crash.pt
            extra["train_iterator"] = self._position(extra["train_iterator"], place.world_size)
        state[RECORD] = {**state[RECORD], "world_size": place.world_size, "rank": place.rank}
        return state

    def _position(self, iterator: dict, world_size: int) -> dict:
        """How far the epoch is, counted in batches of each process."""
        batches = iterator["iterations_in_epoch"] * len(self.files)
        return {**iterator, "iterations_in_epoch": batches // world_size}


def _newest_set(files: list[Path]) -> list[Path]:
    """Of a run that was killed while it saved, the newest files that belong together."""
    choices = [
        {record.save: path for path in (file, pending(file)) if (record := record_of(path))}
        for file in files
    ]
    newest = newest_whole(choices)
    return files if newest is None else [choice[newest] for choice in choices]


def same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    as_bytes = (t.detach().reshape(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(*as_bytes)


# Writes checkpoints that only appear under their names when they are complete and verified.


def output_files(output: Path, world_size: int) -> list[Path]:
    if world_size == 1:
        return [output]
    return [rank_file(output, rank) for rank in range(world_size)]


def write(shards: Shards, output: Path, world_size: int, force: bool) -> list[Path]:
    """The checkpoint, or set, for ``world_size`` processes; returns its files.

    Raises:
        UsageError: a file is there already and not to be overwritten, or what was read back differs, or
            the system refuses a file.
    """
    try:
        for num_experts in shards.record.numbers_of_experts:  # can each layer's be spread?
            places = [Placement(num_experts, world_size, rank) for rank in range(world_size)]
    except ValueError as error:
        raise UsageError(f"--world-size {world_size}: {error}") from None
    files = output_files(output, world_size)
    found = [*rank_files(output).values(), *rank_files(output, PENDING).values()]
    read = {file.resolve() for file in shards.files}
    if world_size == 1 and any(file.resolve() in read for file in found):
        raise UsageError(f"--output: {output} is the name of the set that is read; choose another")
    left_over = []  # of another set of this name
    if world_size > 1:
        left_over = [file for file in found if file not in files]
    check_output(shards.files, [*files, *left_over], force)
    shards.check_agreement()
    shards.check_division(world_size)

    per_file = sum(1 for _ in shards.tensors(shards.states[0]))
    with whole_files(files, called=f"--output {output}", parents=True) as partials:
        with tqdm(total=2 * per_file * world_size, unit=" tensors", desc=output.name) as bar:
            for place, file in zip(places, partials, strict=True):
                state = shards.state_for(place, bar.update)
                with open(file, "wb") as opened:
                    torch.save(state, opened)
                del state
                _verify(shards, place, Path(file), bar.update)
    for file in left_over:
        _remove(file)
    return files


def _remove(file: Path) -> None:
    try:
        file.unlink()
    except OSError as error:
        raise UsageError(
            f"{file} is of another set and cannot be removed: {error.strerror}; the new files are complete"
        ) from None


def check_output(read: Iterable[Path], files: Iterable[Path], force: bool) -> None:
    """Raise UsageError where a file to be written is one that is read, a folder, or there already.

    Or where it cannot be written: that is known before the work of which it is the result.
    """
    read = {file.resolve() for file in read}
    for file in files:
        if file.resolve() in read:
            raise UsageError(f"--output: {file} is what is read; choose another name or folder")
        if file.is_dir():
            raise UsageError(f"--output: {file} is a folder; expected a file's name")
        if file.exists() and not force:
            raise UsageError(f"--output: {file} is there already; --force overwrites it")
        folder = next(parent for parent in file.absolute().parents if os.path.exists(parent))
        if not folder.is_dir():
            raise UsageError(f"--output: {file} cannot be written: {folder} is not a folder")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(
                f"--output: {file} cannot be written: nothing may be written in {folder}"
            )


def write_content(state: dict, output: Path, progress: Callable) -> None:
    """One checkpoint of this content; ``progress`` is called for each tensor that was read back.

    Raises:
        UsageError: what was read back differs, or the system refuses the file.
    """
    with whole_file(output, called=f"--output {output}", parents=True) as partial:
        with open(partial, "wb") as opened:
            torch.save(state, opened)
        written = open_checkpoint(partial)["model"]
        for name, source in state["model"].items():
            _check_written(partial, name, [(written[name], source)])
            progress()


def _verify(shards: Shards, place: Placement, file: Path, progress: Callable) -> None:
    """Every tensor in ``file`` has the bits of the one it was made of."""
    written = {name: tensor for name, tensor, _ in shards.tensors(open_checkpoint(file))}
    for name, source, is_expert in shards.tensors(shards.states[0]):
        progress()
        if name not in written:
            raise UsageError(f"{file}: {name} has not been written; is the disk sound?")
        copies = [(written[name], source)]
        if is_expert:
            local = shards.record.placement(name, place.world_size, place.rank).local
            copies = [
                (written[name][expert - local.start], shards.expert(name, expert))
                for expert in local
            ]
        _check_written(file, name, copies)


def _check_written(file: Path | str, name: str, copies: list[tuple[Tensor, Tensor]]) -> None:
    if not all(same_bits(copy, original) for copy, original in copies):
        raise UsageError(f"{file}: {name} was not written as it was read; is the disk sound?")


# What conversions share: what a checkpoint says of its model, how it is written.


def with_model_options(state: Mapping, options: Mapping) -> dict:
    """The content of a checkpoint that says that its model is of these options (with ``_name``)."""
    if state.get("cfg"):
        return {**state, "cfg": {**state["cfg"], "model": dict(options)}}
    # The flat command line of before fairseq had a config.
    args = vars(state["args"]) | dict(options) | {"arch": options["_name"]}
    return {**state, "args": Namespace(**args)}


def write_converted(state: Mapping, output: Path) -> None:
    """Writes a checkpoint whole and reads it back, with progress.

    Raises:
        UsageError: the system refuses ``output``, or what was read back differs.
    """
    with tqdm(total=len(state["model"]), unit=" tensors", desc=output.name) as bar:
        write_content(state, output, bar.update)


# ``smoe consolidate``: one ordinary checkpoint of a run with sharded experts.


def add_consolidate_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "path",
        type=Path,
        metavar="DIR/checkpoint_last.pt",
        help="the set of files: its name without -rank-N",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="what to write")
    parser.add_argument(
        "--optimizer-state",
        action="store_true",
        help="keep the optimizer's state, for training on in one process",
    )
    parser.add_argument("--force", action="store_true", help="overwrite FILE")


def run_consolidate(args: Namespace) -> None:
    """Reads the set, writes FILE, and says what it holds."""
    name = set_name(args.path)
    if not rank_files(name) and not rank_files(name, PENDING):
        raise UsageError(f"{rank_file(name, 0)} is missing: {name} stands for no set")
    # By rank 0's file, since a checkpoint of the plain name may lie beside it, from an earlier time perhaps.
    shards = Shards.open(rank_file(name, 0), args.optimizer_state)
    write(shards, args.output, 1, args.force)
    record = shards.record
    numbers = " or ".join(map(str, record.numbers_of_experts))
    print(
        f"{args.output}: {numbers} experts per MoE layer, of {len(shards.files)} "
        f"processes, update {record.num_updates}"
    )


# ``smoe reshard``: the checkpoint for another number of processes, optimizer state included.


def add_reshard_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "path",
        type=Path,
        metavar="DIR/checkpoint_last.pt",
        help="a checkpoint of one process, or the set of files: its name without -rank-N",
    )
    parser.add_argument(
        "--world-size", type=int, required=True, metavar="M", help="processes to write it for"
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="what to write: its name without -rank-N; train on with its folder as --save-dir",
    )
    parser.add_argument("--force", action="store_true", help="overwrite what is there")


def run_reshard(args: Namespace) -> None:
    """Reads the set, writes that for M processes, and says what changes for training."""
    if args.world_size < 1:
        raise UsageError(
            f"--world-size {args.world_size}: expected a number of processes, 1 or more"
        )
    if args.world_size > MOST_PROCESSES:
        raise UsageError(
            f"--world-size {args.world_size}: expected at most {MOST_PROCESSES:,} processes"
        )
    shards = Shards.open(args.path)
    files = write(shards, args.output, args.world_size, args.force)
    before = len(shards.files)
    ranks = "1 process" if args.world_size == 1 else f"{args.world_size} processes"
    print(
        f"{files[0]}{f' to {files[-1].name}' if len(files) > 1 else ''}: update "
        f"{shards.record.num_updates}, for {ranks} instead of {before}"
    )
    if args.world_size != before:
        print(
            f"for the same global batch, train on with --update-freq times "
            f"{before / args.world_size:g}"
        )
