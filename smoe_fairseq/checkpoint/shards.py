"""The files of one set, and what any other number of processes would have in theirs.

Tensors are left on disk until they are copied, so memory holds little more than the result.
"""

import functools
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from smoe_fairseq.checkpoint.content import open_checkpoint
from smoe_fairseq.checkpoint.names import PENDING, pending, rank_file, rank_files, rank_of, set_name
from smoe_fairseq.checkpoint.record import KEY, Record, check_set, newest_whole, record_of
from smoe_fairseq.modules.placement import Placement
from smoe_fairseq.system.errors import UsageError

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
        count = max([*files, *waiting]) + 1
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
        state[KEY] = {**state[KEY], "world_size": place.world_size, "rank": place.rank}
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
