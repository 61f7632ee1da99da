"""Reshard the checkpoints of a run with sharded experts that resumes on another number of ranks."""

import os
import re
from pathlib import Path

from smoe_fairseq.compat.checkpoint_names import PENDING, rank_file, rank_files
from smoe_fairseq.files import whole_folder
from smoe_fairseq.recipes.commands import Step

LAST, RESUMED = "checkpoint_last.pt", ("checkpoint_last.pt", "checkpoint_best.pt")
_STAGED = re.compile(r"resharded-(\d+)-to-\d+(\.moving)?")


def reshard_lines(folder: Path, ranks: int) -> list[str | Step]:
    """The step, with a comment, to run before ``ranks`` share the experts (1: each has all), if any."""
    saved = _ranks_of(folder)
    unfinished = any(_STAGED.fullmatch(path.name) for path in folder.glob("resharded-*"))
    if not unfinished and saved in (0, ranks):
        return []
    return [
        f"# {folder}: reshard the experts of {saved} rank{'s' * (saved != 1)} for {ranks}; keep the old "
        f"checkpoints in {_backup_folder(folder, saved).name}/",
        Step("reshard", folder, ranks),
    ]


def _ranks_of(folder: Path) -> int:
    """Files of the last checkpoint: 1 if it is a single file, 0 without one."""
    files = rank_files(folder / LAST).keys() | rank_files(folder / LAST, PENDING).keys()
    return len(files) or int((folder / LAST).exists())


def _backup_folder(folder: Path, ranks: int) -> Path:
    return folder / f"of-{ranks}-ranks"


def reshard(folder: Path, ranks: int) -> None:
    """Reshard the last and the best checkpoint in ``folder``; move the old files to a backup folder.

    After an interruption, another call completes the work. A model without experts and a set for this number
    of ranks are not changed.

    Raises:
        UsageError: a set is incomplete, or the ranks cannot divide its experts.
    """
    from smoe_fairseq.checkpoints.reading import Record, open_checkpoint  # imports torch
    from smoe_fairseq.checkpoints.sets import Shards, write_set

    _finish(folder)
    saved = _ranks_of(folder)
    first = rank_file(folder / LAST, 0)
    if saved in (0, ranks):
        return
    if first.exists() or saved == 1:
        file = first if first.exists() else folder / LAST
        record = Record.of(open_checkpoint(file), file)
        if record is None:
            return
        Shards.open(folder / LAST)  # raises UsageError for an incomplete set
        if record.world_size == ranks:
            return
    with whole_folder(folder / f"resharded-{saved}-to-{ranks}", replace=True) as staged:
        for name in RESUMED:
            if (folder / name).exists() or rank_files(folder / name):
                write_set(Shards.open(folder / name), staged / name, ranks, force=False)
    _finish(folder)


def _finish(folder: Path) -> None:
    """Replace the old checkpoints by resharded ones that are complete."""
    for staged in sorted(folder.glob("resharded-*")):
        if (match := _STAGED.fullmatch(staged.name)) is None:
            continue
        if not match[2]:
            backup = _backup_folder(folder, int(match[1]))
            backup.mkdir(exist_ok=True)
            sets = sorted(folder.glob("checkpoint*-rank-*.pt*"))
            for file in sets if int(match[1]) > 1 else [folder / name for name in RESUMED]:
                if file.exists():
                    os.replace(file, backup / file.name)
            # After this rename, files of these names in `folder` are the new ones.
            moving = staged.with_name(f"{staged.name}.moving")
            os.replace(staged, moving)
            staged = moving
        for file in sorted(staged.iterdir()):
            os.replace(file, folder / file.name)
        staged.rmdir()
