"""Checkpoints of sharded experts: one file of each rank, saved and loaded as a set."""

import os
import time
from contextlib import contextmanager
from pathlib import Path

from fairseq import checkpoint_utils

from smoe_fairseq.checkpoints import io
from smoe_fairseq.compat.replacing import replaces
from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import rank_files
from smoe_fairseq.models.transformer import first_block
from smoe_fairseq.modules.parallel import Placement
from smoe_fairseq.training import launch


@replaces("fairseq.checkpoint_utils:save_checkpoint")
def save_sets(original, cfg, trainer, epoch_itr, val_loss):
    """Save one file per rank, as a set, if experts are sharded.

    A run whose folder has been moved ends when fairseq has saved in a new one of that name.
    """
    if getattr(trainer, "expert_placement", None) is None:
        original(cfg, trainer, epoch_itr, val_loss)
    else:
        os.makedirs(cfg.save_dir, exist_ok=True)  # it may be a local folder on each machine
        with _sets(trainer):
            original(cfg, trainer, epoch_itr, val_loss)
    _check_folder(cfg.save_dir, trainer)


def _check_folder(save_dir: str, trainer) -> None:
    """Raise UsageError, on all ranks, if the first one has saved in another folder than at the start."""
    began, now = getattr(trainer, "folder", None), launch.folder_identity(save_dir)
    moved = began is not None and now not in (began, None)
    if launch.broadcast(moved) if launch.is_distributed() else moved:
        raise UsageError(
            f"{save_dir} was moved while training: update {trainer.get_num_updates()} is in a new folder of "
            "that name; put its checkpoints into the old one, and that back, to go on"
        )


@contextmanager
def _sets(trainer):
    """Inside this context, files are published set by set, and all ranks list the same checkpoints."""
    paths, listed = checkpoint_utils.PathManager, checkpoint_utils.checkpoint_paths
    rank = trainer.expert_placement.rank

    class PublishedPaths(paths):
        @staticmethod
        def copy(source, target, overwrite=False):
            paths.copy(source, str(io.pending(target)), overwrite)
            publish(target)
            return True

    def checkpoint_paths(path, pattern=r"checkpoint(\d+)\.pt", keep_match=False):
        # fairseq decides by the existing files what to save and remove. A run that was killed while
        # removing files may have left different ones on different ranks, so rank 0's list counts.
        found = launch.broadcast(listed(path, pattern, keep_match) if rank == 0 else None)

        def own(file: str) -> str:
            return os.path.join(path, io.rank_file(io.set_name(file), rank).name)

        return (
            [(own(file), match) for file, match in found] if keep_match else list(map(own, found))
        )

    checkpoint_utils.PathManager = PublishedPaths
    checkpoint_utils.checkpoint_paths = checkpoint_paths
    trainer.save_name = launch.broadcast(new_save_name())
    try:
        yield
    finally:
        checkpoint_utils.PathManager, checkpoint_utils.checkpoint_paths = paths, listed
        trainer.save_name = None


def new_save_name() -> str:
    """A unique name of a save, greater than earlier ones."""
    return f"{time.time_ns():020d}-{os.getpid()}"


def publish(path: str) -> None:
    """Rename the pending file to ``path`` when all ranks have written theirs. A collective call."""
    with open(io.pending(path), "rb") as file:
        os.fsync(file.fileno())
    names = {io.set_name(each).name for each in launch.all_gather(path)}
    if len(names) > 1:
        raise UsageError(f"the processes save different files: {', '.join(sorted(names))}")
    os.replace(io.pending(path), path)


def recover(folder: Path, place: Placement) -> None:
    """Publish the pending files of a killed run if they are a complete set, or delete them.

    A collective call. Files of a set for another number of ranks are not touched.
    """
    own = [
        io.set_name(file).name
        for file in (folder.glob(f"*{io.PENDING}") if folder.is_dir() else ())
        if io.rank_of(file) == place.rank
    ]
    for name in sorted({name for names in launch.all_gather(own) for name in names}):
        file = io.rank_file(folder / name, place.rank)
        final = waiting = unreadable = None
        try:
            final, waiting = io.record_of(file), io.record_of(io.pending(file))
        except UsageError as error:  # not for its content, so that nothing is to be removed
            unreadable = str(error)
        if unreadable := next(filter(None, launch.all_gather(unreadable)), None):
            raise UsageError(unreadable)
        found = launch.all_gather([record for record in (final, waiting) if record])
        if any(r.world_size != place.world_size for records in found for r in records):
            continue
        newest = io.newest_whole([{r.save for r in records} for records in found])
        if newest is None and len(set(launch.all_gather(final and final.save))) > 1:
            continue  # no set is complete: the user decides which files to keep
        if newest and waiting and waiting.save == newest and not (final and final.save == newest):
            os.replace(io.pending(file), file)
        else:
            io.pending(file).unlink(missing_ok=True)
    for half_written in folder.glob(f"*-rank-{place.rank}.pt*.tmp") if folder.is_dir() else ():
        half_written.unlink()


# Before a checkpoint is loaded: the files have to be one set, made for this number of ranks.

DEFAULT = "checkpoint_last.pt"


@replaces("fairseq.checkpoint_utils:load_checkpoint")
def load_sets(original, cfg, trainer, **passed_on):
    """Check that all ranks have a checkpoint, or none has, before fairseq looks for it on each rank."""
    place = getattr(trainer, "expert_placement", None)
    if place is not None:
        folder = Path(cfg.save_dir)
        recover(folder, place)
        last = io.rank_file(folder / DEFAULT, place.rank)
        there = launch.all_gather((str(last), last.exists(), io.record_of(last)))
        if cfg.restore_file == DEFAULT and len({exists for _, exists, _ in there}) > 1:
            for file, _, record in there:
                _check_world_size(file, folder / DEFAULT, place, record)
            missing = next(file for file, exists, _ in there if not exists)
            raise UsageError(f"{missing} is missing: {folder / DEFAULT} is incomplete")
    return original(cfg, trainer, **passed_on)


def check_files(trainer, path: Path, reset_optimizer: bool) -> None:
    """Raise UsageError, on all ranks, if the files cannot be loaded; the message names the bad file.

    Args:
        path: the file that fairseq is about to load on this rank; it may not exist.
    """
    place = trainer.expert_placement
    if place is None:
        if first_block(trainer.get_model()) is not None:
            _check_unsharded(trainer, path)
    elif (
        io.rank_of(path) is None
    ):  # as --finetune-from-model may name it: each process takes its own
        if path.exists() and not reset_optimizer:
            raise UsageError(f"{path} is of one process: divide it first with smoe reshard")
    else:
        _check_sharded(trainer, path, place)


def check_dictionaries(trainer, path: Path) -> None:
    """Raise UsageError if the checkpoint was trained with other dictionaries of the same size."""
    loads = trainer.expert_placement is not None or trainer.data_parallel_rank == 0
    found = io.difference(path, io.content_of(path), trainer.task) if loads else None
    if launch.is_distributed():
        found = next(filter(None, launch.all_gather(found)), None)
    if found:
        raise UsageError(found)


def _check_unsharded(trainer, path: Path) -> None:
    """A run without sharded experts does not start anew beside the files of one with them."""
    if trainer.data_parallel_rank > 0:
        return
    files = {} if path.exists() else rank_files(path)
    if files:
        raise UsageError(
            f"{files[min(files)]} is of {len(files)} processes: resume with as many and --expert-parallel, "
            f"or make one file with smoe reshard {path} --world-size 1 --output {path}"
        )
    record = io.record_of(path)
    if record is not None and record.world_size > 1:
        raise UsageError(f"{path} is 1 of {record.world_size} files of a set: use smoe consolidate")


def _check_world_size(file: str, name: Path, place, record: io.Record | None) -> None:
    if record is not None and record.world_size != place.world_size:
        raise UsageError(
            f"{file} is of a set for {record.world_size} processes: make one for {place.world_size} with "
            f"smoe reshard {name} --world-size {place.world_size} --output another/folder/{name.name}"
        )


def _check_sharded(trainer, path: Path, place) -> None:
    """Check the files of all ranks. All ranks raise the same error."""
    found = None
    if path.exists():
        try:
            found = (
                io.Record.of(io.open_checkpoint(path)) or "it does not say whose experts it holds"
            )
        except UsageError as error:
            found = str(error)
    everyones = launch.all_gather((str(path), found))
    name = io.set_name(everyones[0][0])
    if all(record is None for _, record in everyones):
        return _check_nothing(trainer, everyones[0][0])
    for file, record in everyones:
        if isinstance(record, str):
            raise UsageError(record if file in record else f"{file}: {record}")
        _check_world_size(file, name, place, record)
    for file, record in everyones:
        if record is None:
            raise UsageError(f"{file} is missing: {name} is incomplete")
    io.check_set({Path(file): record for file, record in everyones})


def _check_nothing(trainer, path: str) -> None:
    """No rank has a file: this is a new run, unless the user asked to resume."""
    name = io.set_name(path)
    if io.rank_of(name) is not None:
        raise UsageError(f"{name} is the file of one rank: expected {io.set_name(name)}")
    if name.exists():
        raise UsageError(
            f"{name} is of one process: divide it with smoe reshard {name} --world-size "
            f"{trainer.expert_placement.world_size} --output {name}, or choose another --save-dir"
        )
