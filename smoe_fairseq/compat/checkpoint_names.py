"""File names of checkpoints; of a set with the experts in a file per rank, too.

``checkpoint_last.pt`` also names the set ``checkpoint_last-rank-0.pt``, ``checkpoint_last-rank-1.pt``, ...
"""

import re
from collections.abc import Iterable
from pathlib import Path

PENDING = ".pending"  # suffix of a complete file that has not been renamed yet
# ``checkpointEPOCH.pt``, at the epoch's end, and ``checkpoint_EPOCH_UPDATES.pt`` within it.
_NAME = re.compile(
    r"(checkpoint(?:_last|_best|(?:_(?=\d+_))?(?P<epoch>\d+)(?:_(?P<updates>\d+))?))"
    r"(?P<suffix>(?:-\w+-?\d+)*)\.pt"
)
_RANK = re.compile(r"-rank-(\d+)\.pt(\.pending)?$")


def rank_file(path: Path | str, rank: int) -> Path:
    """``checkpoint_last.pt`` -> ``checkpoint_last-rank-2.pt``, as fairseq names it."""
    path = Path(path)
    return path.with_name(f"{path.stem}-rank-{rank}{path.suffix}")


def rank_of(path: Path | str) -> int | None:
    match = _RANK.search(str(path))
    return int(match[1]) if match else None


def set_name(path: Path | str) -> Path:
    """The set's name: the path without ``-rank-N``."""
    return Path(_RANK.sub(".pt", str(path)))


def pending(path: Path | str) -> Path:
    return Path(f"{path}{PENDING}")


def rank_files(path: Path | str, suffix: str = "") -> dict[int, Path]:
    """The existing files of the set ``path`` (experts in a file per rank), by rank.

    Args:
        suffix: after the names, such as that of pending files.
    """
    path = Path(path)
    pattern = re.compile(
        rf"{re.escape(path.stem)}-rank-(\d+){re.escape(path.suffix)}{re.escape(suffix)}"
    )
    files = path.parent.iterdir() if path.parent.is_dir() else ()
    by_rank = {int(m[1]): file for file in files if (m := pattern.fullmatch(file.name))}
    return dict(sorted(by_rank.items()))


def files_read(path: Path) -> list[Path]:
    """The path itself and, if it names a set of ``--expert-parallel``, the files of the set."""
    return [path, *rank_files(set_name(path)).values()]


def saved(files: Iterable[Path]) -> dict[Path, tuple[int, int]]:
    """Epoch and updates (0: the epoch's end) of fairseq's regular checkpoints; a set is there once."""
    found = {path: _NAME.fullmatch(path.name) for path in map(set_name, files)}
    return {
        path: (int(match["epoch"]), int(match["updates"] or 0))
        for path, match in found.items()
        if match and match["epoch"] and not match["suffix"]
    }


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint, unless there is a ``checkpoint_last.pt``; None without any.

    Without that, training would start anew and replace the checkpoint.
    """
    checkpoints = {}
    for file in folder.glob("checkpoint*.pt"):
        if (name := _NAME.fullmatch(file.name)) and name[1] == "checkpoint_last":
            return None
        if name:
            order = int(name["epoch"] or 0), float(name["updates"] or "inf"), file.stat().st_mtime
            checkpoints[order] = folder / f"{name[1]}.pt"
    return checkpoints[max(checkpoints)] if checkpoints else None
