"""Reading checkpoints: their content, and the record of experts in each file."""

import copy
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from smoe_fairseq.checkpoints.content import MADE_OF
from smoe_fairseq.compat.checkpoint_names import rank_file, rank_of, set_name
from smoe_fairseq.compat.replacing import replaces
from smoe_fairseq.compat.safe_load import InaccessibleCheckpoint, check_content, is_archive, reading
from smoe_fairseq.errors import UsageError
from smoe_fairseq.flags import values_of
from smoe_fairseq.forms import Number, fault
from smoe_fairseq.modules.parallel import Placement
from smoe_fairseq.modules.registry import missing_plugin

PLUGINS = "smoe_plugins"  # key of a result of `plugins_of`


def open_checkpoint(path: Path | str) -> dict:
    """Load a checkpoint with memory-mapped tensors, after comparing its checksums.

    Only plain data is loaded (``weights_only=True``). Files of torch before 1.6 are read into memory.

    Raises:
        UsageError: it is missing, cut off, damaged, refused, or not a checkpoint of fairseq.
        InaccessibleCheckpoint: it cannot be read now, but may be intact.
    """
    if Path(path).is_dir():
        raise UsageError(f"{path} is a folder; expected a checkpoint, such as checkpoint_best.pt")
    with reading(path):
        state = torch.load(path, map_location="cpu", mmap=is_archive(path), weights_only=True)
    check_content(path, state)
    return state


# fairseq reads these in any checkpoint; published files may lack them.
EXPECTED = {
    "optimizer_history": [{"num_updates": 0, "lr_scheduler_state": {}}],
    "extra_state": {"train_iterator": {"epoch": 1}},
}
_OLDER = {"optimizer_history": "best_loss", "extra_state": "epoch"}  # what earlier versions have


@replaces("fairseq.checkpoint_utils:_upgrade_state_dict")
def without_training_state(original, state):
    lacking = {n: v for n, v in EXPECTED.items() if not {n, _OLDER[n]} & state.keys()}
    return original(state | copy.deepcopy(lacking))


# A record in each file describes its experts, so that files of different sets cannot be combined.

RECORD = "smoe_experts"  # the record's key in a checkpoint
_LAYER = re.compile(r"\S+(?=\.experts\.)")
_FROM_0, _FROM_1 = Number(0, whole=True), Number(1, whole=True)
_RECORD = {
    **{"save": str, "num_updates": _FROM_0, "rank": _FROM_0, "parameters": [str]},
    **{"num_experts": _FROM_1, "world_size": _FROM_1, "other_layers": {str: _FROM_1}},
}


@dataclass(frozen=True)
class Record:
    """The experts in a file; stored in the checkpoint under `RECORD` as a plain dictionary.

    Args:
        save: the name of the save, equal in all files of a set; names of later saves are greater.
        num_updates: the number of updates when it was saved.
        num_experts: E of the MoE layers, except for ``other_layers``.
        world_size, rank: the file has the experts of rank ``rank`` of ``world_size``.
        parameters: names of all parameters of the optimizer, in its order.
        other_layers: E of MoE layers with another number, by name (``encoder.layers.1.moe``).
    """

    save: str
    num_updates: int
    num_experts: int
    world_size: int
    rank: int
    parameters: list[str]
    other_layers: Mapping[str, int]

    def placement(self, name: str, world_size: int, rank: int = 0) -> Placement:
        """The placement of the experts of the layer in a tensor's name."""
        layer = _LAYER.search(name).group()
        return Placement(self.other_layers.get(layer, self.num_experts), world_size, rank)

    @property
    def numbers_of_experts(self) -> list[int]:
        """The different numbers of experts per layer, sorted."""
        return sorted({self.num_experts, *self.other_layers.values()})

    @classmethod
    def of(cls, state: Mapping, path: Path | str = "a checkpoint") -> "Record | None":
        """The record of a checkpoint; None if it has no experts or is older than these records.

        Raises:
            UsageError: it is damaged, or of a later version; the message names ``path``.
        """
        content = state.get(RECORD)
        if content is None:
            return None
        if not fault(content, _RECORD) and content.keys() <= _RECORD.keys():
            record = cls(**content)
            if record.rank < record.world_size:
                return record
        raise UsageError(f"{path}: its {RECORD} is damaged, or of a later version")


def check_plugins(path: Path | str, state: Mapping) -> None:
    """Raise UsageError if the checkpoint's model has a part of a plugin that is not imported.

    Nothing is imported because a checkpoint names it.
    """
    plugins = state.get(PLUGINS)
    if isinstance(plugins, Mapping) and (sentence := missing_plugin(plugins)):
        raise UsageError(f"{path}: {sentence}")


def saved_task(state: Mapping) -> tuple[object, str | None]:
    """The saved settings of the task, with all others in a file of fairseq before 0.10, and its name."""
    saved = values_of(state.get("cfg")).get("task") or state.get("args")
    values = values_of(saved)
    return saved, values.get("task") or values.get("_name")


def record_of(path: Path | str) -> Record | None:
    """The record of a file; None if the file is missing, cut off, damaged, or has no record.

    Raises:
        InaccessibleCheckpoint: the file cannot be read now, but may be intact, so it must not be removed.
    """
    try:
        return Record.of(open_checkpoint(path), path)
    except InaccessibleCheckpoint:
        raise
    except UsageError:
        return None


def made_of(path: Path) -> dict[str, str]:
    """The fingerprints of the checkpoints that `smoe average` or `consolidate` read, by name; else empty."""
    return dict(values_of(content_of(path).get(MADE_OF))) if path.is_file() else {}


def newest_whole(saves: Sequence[Collection[str]]) -> str | None:
    """The newest save that every rank has; None if there is none."""
    return max(set.intersection(*map(set, saves)), default=None)


def check_set(records: Mapping[Path, Record | None]) -> None:
    """Check that files, in the order of ranks, are one complete set.

    Raises:
        UsageError: they are not; the message names the first file of another set, or a missing one.
    """
    first_path, first = next(iter(records.items()))
    for rank, (path, record) in enumerate(records.items()):
        if record is None:
            raise UsageError(f"{path} has no record of its experts ({RECORD})")
        if record.rank != rank or (rank_of(path) or 0) != rank:
            raise UsageError(f"{path} has rank {record.rank}'s experts: it was moved or copied")
        if record.world_size != first.world_size:
            raise UsageError(f"{path} belongs to {record.world_size} files, unlike {first_path}")
        if record.save != first.save:
            updates = f"update {record.num_updates}, not {first.num_updates}"
            raise UsageError(f"{path} was saved at another time than {first_path} ({updates})")
    if len(records) < first.world_size:  # not more, since each rank is below the world size
        missing = rank_file(set_name(first_path), len(records))
        raise UsageError(f"{missing} is missing: the set has {first.world_size} files")


def check_finite(path: Path | str, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raise UsageError if a weight is NaN or infinite; torch loads such weights silently."""
    for name, weight in weights:
        if not weight.isfinite().all():
            raise UsageError(
                f"{path}: {name} has NaN or infinite values: training has diverged; use an earlier one"
            )


def content_of(path: Path | str) -> Mapping:
    """The content of a checkpoint; empty if it is too old or cannot be read, which its loader reports."""
    try:
        return open_checkpoint(path) if is_archive(path) else {}  # older files have no checksums
    except (UsageError, OSError):
        return {}
