"""A run with sharded experts resumes on another number of ranks: its checkpoints are resharded."""

import os
import re
from pathlib import Path

from smoe_fairseq.files import rank_files, whole_folder
from smoe_fairseq.recipes.processes import step

LAST, RESUMED = "checkpoint_last.pt", ("checkpoint_last.pt", "checkpoint_best.pt")
_STAGED = re.compile(r"resharded-(\d+)-to-\d+(\.moving)?")


def reshard_lines(folder: Path, ranks: int) -> list[str]:
    """The step, with a comment, that a run needs before it resumes; often none.

    Args:
        ranks: how many share the experts; 1 if each has all.
    """
    saved = _ranks_of(folder)
    unfinished = any(_STAGED.fullmatch(path.name) for path in folder.glob("resharded-*"))
    if not unfinished and saved in (0, ranks):
        return []
    return [
        f"# {folder}: reshard the experts of {saved} rank{'s' * (saved != 1)} for {ranks}; keep the old "
        f"checkpoints in {_aside(folder, saved).name}/",
        step("reshard", folder, ranks),
    ]


def _ranks_of(folder: Path) -> int:
    """Files of the last checkpoint: 1 if it is a single file, 0 without one."""
    files = rank_files(folder / LAST).keys() | rank_files(folder / LAST, ".pending").keys()
    return len(files) or int((folder / LAST).exists())


def _aside(folder: Path, ranks: int) -> Path:
    return folder / f"of-{ranks}-ranks"


def reshard(folder: Path, ranks: int) -> None:
    """Reshard the last and the best checkpoint in ``folder``; the files of the old sets move aside.

    It can be interrupted anywhere, and is completed when it is called again. A model without experts,
    and a set that is for so many ranks already, stay as they are.

    Raises:
        UsageError: a set is incomplete, or its experts cannot be divided so.
    """
    from smoe_fairseq.checkpoints.io import Record, open_checkpoint, rank_file
    from smoe_fairseq.checkpoints.sets import Shards, write_set

    _finish(folder)
    saved = _ranks_of(folder)
    first = rank_file(folder / LAST, 0)
    if saved in (0, ranks):
        return
    if first.exists() or saved == 1:
        record = Record.of(open_checkpoint(first if first.exists() else folder / LAST))
        if record is None:
            return
        Shards.open(folder / LAST)  # raises UsageError for a set that is incomplete
        if record.world_size == ranks:
            return
    with whole_folder(folder / f"resharded-{saved}-to-{ranks}", replace=True) as staged:
        for name in RESUMED:
            if (folder / name).exists() or rank_files(folder / name):
                write_set(Shards.open(folder / name), staged / name, ranks, force=False)
    _finish(folder)


def _finish(folder: Path) -> None:
    """Put resharded checkpoints, which are complete, in the place of the old ones."""
    for staged in sorted(folder.glob("resharded-*")):
        if (found := _STAGED.fullmatch(staged.name)) is None:
            continue
        if not found[2]:
            aside = _aside(folder, int(found[1]))
            aside.mkdir(exist_ok=True)
            sets = sorted(folder.glob("checkpoint*-rank-*.pt*"))
            for file in sets if int(found[1]) > 1 else [folder / name for name in RESUMED]:
                if file.exists():
                    os.replace(file, aside / file.name)
            # From here on, files of these names in `folder` are the new ones.
            moving = staged.with_name(f"{staged.name}.moving")
            os.replace(staged, moving)
            staged = moving
        for file in sorted(staged.iterdir()):
            os.replace(file, folder / file.name)
        staged.rmdir()
