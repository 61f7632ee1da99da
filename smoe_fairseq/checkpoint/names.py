"""Names of the files of a set: ``checkpoint_last.pt`` stands for ``checkpoint_last-rank-0.pt`` and so on."""

import re
from pathlib import Path

PENDING = ".pending"  # behind the name of a file that is complete but not yet in its place
_RANK = re.compile(r"-rank-(\d+)\.pt(\.pending)?$")


def rank_file(path: Path | str, rank: int) -> Path:
    """``checkpoint_last.pt`` -> ``checkpoint_last-rank-2.pt``, as fairseq names it."""
    path = Path(path)
    return path.with_name(f"{path.stem}-rank-{rank}{path.suffix}")


def rank_of(path: Path | str) -> int | None:
    found = _RANK.search(str(path))
    return int(found[1]) if found else None


def set_name(path: Path | str) -> Path:
    """The name without ``-rank-N``, which stands for the set."""
    return Path(_RANK.sub(".pt", str(path)))


def pending(path: Path | str) -> Path:
    return Path(f"{path}{PENDING}")


def rank_files(path: Path | str, suffix: str = "") -> dict[int, Path]:
    """The files there are of the set that ``path`` stands for, by rank; or those pending."""
    path = Path(path)
    pattern = re.compile(
        rf"{re.escape(path.stem)}-rank-(\d+){re.escape(path.suffix)}{re.escape(suffix)}"
    )
    found = {}
    if path.parent.is_dir():
        for file in path.parent.iterdir():
            if match := pattern.fullmatch(file.name):
                found[int(match[1])] = file
    return dict(sorted(found.items()))


def files_read(path: Path) -> list[Path]:
    """A checkpoint and, where its name stands for a set of ``--expert-parallel``, the files of that."""
    return [path, *rank_files(set_name(path)).values()]
