"""The files of one set, and what any other number of processes would have in theirs.

Tensors are left on disk until they are copied, so memory holds little more than the result.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from smoe_fairseq.checkpoint.names import rank_file, rank_files, rank_of, set_name
from smoe_fairseq.checkpoint.record import KEY, Record, check_set, open_checkpoint
from smoe_fairseq.errors import UsageError
from smoe_fairseq.modules.placement import Placement

OPTIMIZER = "last_optimizer_state"
_EXPERTS = ".moe.experts."


class Shards:
    """Checkpoint files that hold all experts between them: one file per process, or one of one process.

    Args:
        files: in the order of ranks.

    Raises:
        UsageError: a file is missing, cut off, of another set or differs from the others where they
            have to agree; the sentence names it.
    """

    def __init__(self, files: list[Path]):
        self.files = files
        self.states = [open_checkpoint(file) for file in files]
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
        self.places = [
            Placement(self.record.num_experts, len(files), rank) for rank in range(len(files))
        ]

    @classmethod
    def open(cls, path: Path) -> "Shards":
        """``DIR/checkpoint_last.pt`` stands for its ``-rank-N`` files, or is a file of one process."""
        files = rank_files(set_name(path))
        if not files:
            return cls([path])
        if path.exists() and rank_of(path) is None:
            raise UsageError(
                f"{path} and {files[min(files)]} are both there: move the one away that is not meant"
            )
        count = max(files) + 1
        return cls([files.get(rank, rank_file(set_name(path), rank)) for rank in range(count)])

    def tensors(self, state: dict) -> Iterator[tuple[str, Tensor, bool]]:
        """(name, tensor, whether its first dimension counts experts) of model and optimizer."""
        for part in ("model", "ema"):
            content = state["model"] if part == "model" else state["extra_state"].get("ema") or {}
            for name, tensor in content.items():
                yield f"{part} {name}", tensor, _EXPERTS in name
        optimizer = state.get(OPTIMIZER)
        for index, name in enumerate(self._optimized(state)):
            for key, value in optimizer["state"].get(index, {}).items():
                if torch.is_tensor(value):
                    yield f"{name} {key}", value, _EXPERTS in name and value.dim() > 0

    def _optimized(self, state: dict) -> tuple[str, ...]:
        """Names of the optimizer's parameters, in its order."""
        optimizer = state.get(OPTIMIZER)
        if not optimizer:
            return ()
        groups = optimizer.get("param_groups", [])
        if len(groups) != 1 or list(groups[0]["params"]) != list(
            range(len(self.record.parameters))
        ):
            raise UsageError(
                f"{self.files[0]}: the state of an optimizer with several parameter groups cannot be "
                "divided"
            )
        return self.record.parameters

    def check_agreement(self) -> None:
        """What all processes share is the same in all files, as are the replicas of an expert."""
        wanted = self.states[0]
        parameters = {f"model {name}" for name in self.record.parameters}
        group = self.places[0].group_size
        for rank in range(1, len(self.states)):
            own = {n: t for n, t, experts in self.tensors(self.states[rank % group]) if experts}
            shared = {n: t for n, t, experts in self.tensors(wanted) if not experts}
            for name, tensor, is_expert in self.tensors(self.states[rank]):
                if name.startswith("model ") and name not in parameters:
                    continue  # a buffer, and fairseq has some that are never set
                other = (own if is_expert else shared).get(name)
                if other is None or not same_bits(tensor, other):
                    raise UsageError(
                        f"{self.files[rank]}: {name.removeprefix('model ')} is not as in the other files"
                    )

    def experts(self, name: str, wanted: range, by_rank: list[dict[str, Tensor]]) -> Tensor:
        """Experts ``wanted`` of one stacked tensor, copied from the files that hold them."""
        first = by_rank[0][name]
        result = first.new_empty(len(wanted), *first.shape[1:])
        for expert in wanted:
            rank, offset = divmod(expert, self.places[0].num_local)
            result[expert - wanted.start] = by_rank[rank][name][offset]
        return result

    def state_for(self, place: Placement, progress=lambda: None) -> dict:
        """The checkpoint of one process under another placement.

        Args:
            progress: called after each tensor.
        """
        by_rank = [
            {name: tensor for name, tensor, experts in self.tensors(state) if experts}
            for state in self.states
        ]
        taken = {}
        for name, _, experts in self.tensors(self.states[0]):
            if experts:
                taken[name] = self.experts(name, place.local, by_rank)
            progress()

        def placed(part: str, content: dict) -> dict:
            return {key: taken.get(f"{part} {key}", value) for key, value in content.items()}

        state = dict(self.states[0])
        state["model"] = placed("model", state["model"])
        state["extra_state"] = extra = dict(state["extra_state"])
        if extra.get("ema"):
            extra["ema"] = placed("ema", extra["ema"])
        if names := self._optimized(state):
            moments = state[OPTIMIZER]["state"]
            state[OPTIMIZER] = {
                **state[OPTIMIZER],
                "state": {i: placed(names[i], values) for i, values in moments.items()},
            }
        extra["train_iterator"] = self._position(extra["train_iterator"], place.world_size)
        record = {**state[KEY], "world_size": place.world_size, "rank": place.rank}
        state[KEY] = record
        return state

    def _position(self, iterator: dict, world_size: int) -> dict:
        """How far the epoch is, counted in batches of each process."""
        batches = iterator["iterations_in_epoch"] * len(self.files)
        return {**iterator, "iterations_in_epoch": batches // world_size}


def same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    as_bytes = (t.detach().reshape(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(*as_bytes)
