"""Saving the files of all processes as one set: either all of them are new, or none.

Each process writes its file beside the old one. Only when all have done so do they give theirs the final
name. If they are killed between two of these renamings, the rest is made up for at the next start.
"""

import functools
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch.distributed as dist

from smoe_fairseq.checkpoint.record import Record, open_checkpoint
from smoe_fairseq.errors import UsageError

PENDING = ".pending"  # behind the name of a file that is complete but not yet in its place


def save_sets(checkpoint_utils: ModuleType) -> None:
    """Lets fairseq's ``save_checkpoint`` save sets where experts are sharded."""
    original = checkpoint_utils.save_checkpoint

    @functools.wraps(original)
    def save_checkpoint(cfg, trainer, epoch_itr, val_loss):
        # fairseq keeps the best score as an attribute of this name, which is now this function.
        if trainer.expert_placement is None:
            return original(cfg, trainer, epoch_itr, val_loss)
        os.makedirs(cfg.save_dir, exist_ok=True)  # of its own on every machine, perhaps
        with _sets(checkpoint_utils, trainer):
            return original(cfg, trainer, epoch_itr, val_loss)

    checkpoint_utils.save_checkpoint = save_checkpoint


@contextmanager
def _sets(checkpoint_utils: ModuleType, trainer):
    """In it, all that fairseq writes is published set by set."""
    paths = checkpoint_utils.PathManager

    class PublishedPaths(paths):
        @staticmethod
        def copy(source, target, overwrite=False):
            _link(source, target + PENDING)
            publish(target)
            return True

    checkpoint_utils.PathManager = PublishedPaths
    trainer.publishes = True
    try:
        yield
    finally:
        checkpoint_utils.PathManager = paths
        trainer.publishes = False


def _link(source: str, target: str) -> None:
    Path(target).unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


def publish(path: str) -> None:
    """``path + PENDING`` gets its name, once all processes have theirs on the disk."""
    with open(path + PENDING, "rb") as file:
        os.fsync(file.fileno())
    dist.barrier()
    os.replace(path + PENDING, path)


def recover(folder: Path, rank: int) -> None:
    """Finishes, on all processes together, what a killed run was about to publish, or drops it."""
    ending = f"-rank-{rank}.pt"
    own = {}
    for path in sorted(folder.glob(f"*{ending}*")) if folder.is_dir() else ():
        if path.name.endswith(ending + PENDING):
            name = path.name.removesuffix(PENDING)
            own[name.removesuffix(ending)] = (_save_of(folder / name), _save_of(path))
        elif path.name.endswith((".tmp", ".pending.tmp")):
            path.unlink()
    everyones = _gather(own)
    for name in sorted({name for processes in everyones for name in processes}):
        final = folder / f"{name}{ending}"
        pending = folder / f"{name}{ending}{PENDING}"
        if name not in own:
            own[name] = (_save_of(final), None)
        saves = _gather(own[name])
        common = set.intersection(*({save for save in pair if save} for pair in saves))
        if common and max(common) == own[name][1] != own[name][0]:
            os.replace(pending, final)
        else:
            pending.unlink(missing_ok=True)


def _save_of(path: Path) -> tuple[int, str] | None:
    """(updates, save) of a file; None where there is none that can be read."""
    try:
        record = Record.of(open_checkpoint(path))
    except UsageError:
        return None
    return record and (record.num_updates, record.save)


def _gather(mine) -> list:
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return everyones
