"""Saving the files of all processes as one set: either all of them are new, or none.

Each process writes its file beside the old one. Only when all have done so do they give theirs the final
name. If they are killed between two of these renamings, the rest is made up for at the next start.
"""

import functools
import os
import time
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from smoe_fairseq.checkpoint.names import PENDING, pending, rank_file, rank_of, set_name
from smoe_fairseq.checkpoint.record import newest_whole, record_of
from smoe_fairseq.distributed.agree import from_all, from_first
from smoe_fairseq.modules.placement import Placement
from smoe_fairseq.system.errors import UsageErrorOfAll


def save_sets(checkpoint_utils: ModuleType) -> None:
    """Lets fairseq's ``save_checkpoint`` save sets where experts are sharded."""
    original = checkpoint_utils.save_checkpoint

    @functools.wraps(original)
    def save_checkpoint(cfg, trainer, epoch_itr, val_loss):
        # fairseq keeps the best score as an attribute of this name, which is now this function.
        if getattr(trainer, "expert_placement", None) is None:
            return original(cfg, trainer, epoch_itr, val_loss)
        os.makedirs(cfg.save_dir, exist_ok=True)  # of its own on every machine, perhaps
        with _sets(checkpoint_utils, trainer):
            return original(cfg, trainer, epoch_itr, val_loss)

    checkpoint_utils.save_checkpoint = save_checkpoint


@contextmanager
def _sets(checkpoint_utils: ModuleType, trainer):
    """In it, all that fairseq writes is published set by set, and all processes see the same files."""
    paths, listed = checkpoint_utils.PathManager, checkpoint_utils.checkpoint_paths
    rank = trainer.expert_placement.rank

    class PublishedPaths(paths):
        @staticmethod
        def copy(source, target, overwrite=False):
            paths.copy(source, str(pending(target)), overwrite)
            publish(target)
            return True

    def checkpoint_paths(path, pattern=r"checkpoint(\d+)\.pt", keep_match=False):
        # What fairseq saves and removes depends on the files that there are; a run that was killed
        # while it removed some has left one process with others.
        found = from_first(listed(path, pattern, keep_match) if rank == 0 else None)

        def own(file: str) -> str:
            return os.path.join(path, rank_file(set_name(file), rank).name)

        return (
            [(own(file), match) for file, match in found] if keep_match else list(map(own, found))
        )

    checkpoint_utils.PathManager = PublishedPaths
    checkpoint_utils.checkpoint_paths = checkpoint_paths
    trainer.save_name = from_first(new_save_name())
    try:
        yield
    finally:
        checkpoint_utils.PathManager, checkpoint_utils.checkpoint_paths = paths, listed
        trainer.save_name = None


def new_save_name() -> str:
    """One that no other save has, and greater than those before."""
    return f"{time.time_ns():020d}-{os.getpid()}"


def publish(path: str) -> None:
    """What is pending for ``path`` gets its name, once all processes have theirs on the disk."""
    with open(pending(path), "rb") as file:
        os.fsync(file.fileno())
    names = {set_name(each).name for each in from_all(path)}
    if len(names) > 1:
        raise UsageErrorOfAll(
            f"the processes are about to save different files: {', '.join(sorted(names))}"
        )
    os.replace(pending(path), path)


def recover(folder: Path, place: Placement) -> None:
    """Finishes, on all processes together, what a killed run was about to publish, or drops it.

    Files of a set for another number of processes are left alone.
    """
    own = [
        set_name(file).name
        for file in (folder.glob(f"*{PENDING}") if folder.is_dir() else ())
        if rank_of(file) == place.rank
    ]
    for name in sorted({name for names in from_all(own) for name in names}):
        file = rank_file(folder / name, place.rank)
        final, waiting = record_of(file), record_of(pending(file))
        found = from_all([record for record in (final, waiting) if record])
        if any(r.world_size != place.world_size for records in found for r in records):
            continue
        newest = newest_whole([{r.save for r in records} for records in found])
        if newest is None and len(set(from_all(final and final.save))) > 1:
            continue  # no set is whole: which files to keep is for the user to say
        if newest and waiting and waiting.save == newest and not (final and final.save == newest):
            os.replace(pending(file), file)
        else:
            pending(file).unlink(missing_ok=True)
    for half_written in folder.glob(f"*-rank-{place.rank}.pt*.tmp") if folder.is_dir() else ():
        half_written.unlink()
