"""What a checkpoint says of the experts in it, so that the files of a set are never mixed up."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from smoe_fairseq.checkpoint.content import open_checkpoint
from smoe_fairseq.checkpoint.names import rank_file, rank_of, set_name
from smoe_fairseq.modules.placement import Placement
from smoe_fairseq.system.checkpoint_file import InaccessibleCheckpoint
from smoe_fairseq.system.errors import UsageError

KEY = "smoe_experts"  # of the record in a checkpoint
_LAYER = re.compile(r"\S+(?=\.experts\.)")


@dataclass(frozen=True)
class Record:
    """Stands in a checkpoint under `KEY`, as a plain dictionary.

    Args:
        save: one word for the save that the file belongs to, the same in all files of a set; of two the
            later one is the greater.
        num_updates: when that was.
        num_experts: E of each MoE layer but the others.
        world_size, rank: the file holds the share of process ``rank`` of ``world_size``.
        parameters: all names that the optimizer knows, in its order.
        other_layers: E of MoE layers that have another number, by their names (``encoder.layers.1.moe``).
    """

    save: str
    num_updates: int
    num_experts: int
    world_size: int
    rank: int
    parameters: tuple[str, ...]
    other_layers: Mapping[str, int] = field(default_factory=dict)

    def placement(self, name: str, world_size: int, rank: int = 0) -> Placement:
        """Of the experts that a tensor is of, by its name, whatever stands around the parameter's."""
        layer = _LAYER.search(name).group()
        return Placement(self.other_layers.get(layer, self.num_experts), world_size, rank)

    @property
    def numbers_of_experts(self) -> list[int]:
        """That there are, each once."""
        return sorted({self.num_experts, *self.other_layers.values()})

    def as_dict(self) -> dict:
        return {**asdict(self), "parameters": list(self.parameters)}

    @classmethod
    def of(cls, state: Mapping) -> "Record | None":
        """None where a checkpoint has no experts, or is older than these records."""
        content = state.get(KEY)
        if content is None:
            return None
        try:
            parameters = tuple(content["parameters"])
            other_layers = dict(content.get("other_layers", {}))  # older ones have none
            return cls(**{**content, "parameters": parameters, "other_layers": other_layers})
        except (TypeError, LookupError, ValueError):
            raise UsageError(
                f"what a checkpoint says of its experts ({KEY}) is of another kind: it is damaged, or of "
                "a later version"
            ) from None


def record_of(path: Path | str) -> Record | None:
    """Of a file; None where it is missing, cut off or damaged, or has no record.

    What is not for this user to read is an error, lest it be taken for a file of no use and removed.
    """
    try:
        return Record.of(open_checkpoint(path))
    except InaccessibleCheckpoint:
        raise
    except UsageError:
        return None


def newest_whole(saves: Sequence[Collection[str]]) -> str | None:
    """The newest of the saves that every process has, if there is one."""
    return max(set.intersection(*map(set, saves)), default=None)


def check_set(records: Mapping[Path, Record | None]) -> None:
    """Are these files, in the order of ranks, one whole set?

    Raises:
        UsageError: names the first file that does not belong to the first one's set.
    """
    first_path, first = next(iter(records.items()))
    for rank, (path, record) in enumerate(records.items()):
        if record is None:
            raise UsageError(f"{path} does not say whose experts it holds: it is not of such a set")
        if record.rank != rank or rank_of(path) != rank:
            raise UsageError(
                f"{path} holds the experts of process {record.rank}, not of process {rank}: "
                "a file has been swapped or copied"
            )
        if record.world_size != first.world_size:
            raise UsageError(
                f"{path} is of a set of {record.world_size} files, and {first_path} of one of "
                f"{first.world_size}"
            )
        if record.save != first.save:
            raise UsageError(
                f"{path} is of another save (update {record.num_updates}) than {first_path} (update "
                f"{first.num_updates})"
            )
    for rank in range(len(records), first.world_size):
        missing = rank_file(set_name(first_path), rank)
        raise UsageError(f"{missing} is missing: the set has {first.world_size} files")
    if len(records) > first.world_size:
        extra = list(records)[first.world_size]
        raise UsageError(f"{extra} is one too many: the set has {first.world_size} files")
