"""Files of fairseq's branch for mixtures of experts: what is shared in one, experts in one per process.

``checkpoint_last-shared.pt`` has the weights that all processes have, ``checkpoint_last-rank-N.pt`` the
experts of process N, which each file counts from 0.
"""

from pathlib import Path

from torch import Tensor

from smoe_fairseq.checkpoint.average import check_plain
from smoe_fairseq.checkpoint.content import open_checkpoint
from smoe_fairseq.checkpoint.names import rank_file, rank_files, rank_of, set_name
from smoe_fairseq.conversion.foreign_names import EXPERT
from smoe_fairseq.system.errors import UsageError

_SHARED = "-shared"


def files_of(path: Path) -> list[Path]:
    """The shared file and those of the ranks, in order; a single file where it is no set.

    Args:
        path: any file of the set, or its name without ``-shared`` and ``-rank-N``.

    Raises:
        UsageError: a file of the set is missing.
    """
    name = set_name(path)
    if name.stem.endswith(_SHARED):
        name = name.with_name(name.stem.removesuffix(_SHARED) + name.suffix)
    shared = name.with_name(f"{name.stem}{_SHARED}{name.suffix}")
    ranks = rank_files(name)
    if not shared.exists() and not ranks:
        return [path]
    for file in (shared, *(rank_file(name, rank) for rank in range(len(ranks) or 1))):
        if not file.exists():
            raise UsageError(
                f"{file} is missing: expected {shared.name} and a -rank-N file per process"
            )
    return [shared, *ranks.values()]


def read_set(path: Path) -> dict:
    """The content of the shared file, with all experts in its model, numbered over all files.

    Raises:
        UsageError: a file is missing or damaged, or holds something else.
    """
    shared, *ranks = files_of(path)
    state = {**open_checkpoint(shared)}
    check_plain(shared, state["model"])
    weights = dict(state["model"])
    for file in ranks:
        own = open_checkpoint(file)["model"]
        check_plain(file, own)
        weights |= _numbered(file, own, weights)
    state["model"] = weights
    return state


def _numbered(file: Path, own: dict[str, Tensor], shared: dict) -> dict[str, Tensor]:
    """The experts of a file by their numbers in the whole; of what is shared it may have a copy."""
    found = {}
    for name, tensor in own.items():
        if match := EXPERT.fullmatch(name):
            found[name] = int(match[2]), match[1], match[3], tensor
        elif name not in shared:
            raise UsageError(f"{file} has {name}, which is no expert's and not in the shared file")
    local = 1 + max((number for number, *_ in found.values()), default=-1)
    first = rank_of(file) * local
    return {
        f"{layer}.moe_layer.experts.{first + number}.{part}": tensor
        for number, layer, part, tensor in found.values()
    }
