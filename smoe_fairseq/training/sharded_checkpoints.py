"""Checkpoints of sharded experts: one file per rank, saved and loaded as a set."""

import logging
import os
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from fairseq import checkpoint_utils

from smoe_fairseq.checkpoints import reading, trained_with
from smoe_fairseq.compat.checkpoint_names import (
    PENDING,
    pending,
    rank_file,
    rank_files,
    rank_of,
    set_name,
)
from smoe_fairseq.compat.replacing import replaces
from smoe_fairseq.errors import UsageError
from smoe_fairseq.models.checks import shared_but_differing
from smoe_fairseq.models.transformer import first_block
from smoe_fairseq.modules.parallel import Placement
from smoe_fairseq.training import launch
from smoe_fairseq.translate.directions import READING, other_flags

logger = logging.getLogger(__name__)
RESETS = "--reset-optimizer --reset-lr-scheduler --reset-dataloader --reset-meters"


@replaces("fairseq.checkpoint_utils:save_checkpoint")
def save_sets(original, cfg, trainer, epoch_itr, val_loss):
    """Save one file per rank, as a set, if experts are sharded.

    If the folder was moved, the run ends once fairseq has saved in a new folder of that name. With
    ``--no-epoch-checkpoints``, the checkpoint of an update is kept also at the end of an epoch.
    """
    if cfg.no_epoch_checkpoints:
        state = {"epoch": epoch_itr.epoch, "state_dict": epoch_itr.state_dict}
        epoch_itr = SimpleNamespace(**state, end_of_epoch=lambda: False)
    if getattr(trainer, "expert_placement", None) is None:
        original(cfg, trainer, epoch_itr, val_loss)
    else:
        os.makedirs(cfg.save_dir, exist_ok=True)  # it may be a local folder on each machine
        with _sets(trainer):
            original(cfg, trainer, epoch_itr, val_loss)
    if timer := getattr(trainer, "save_timer", None):
        timer.saved = time.monotonic()
    _check_folder(cfg.save_dir, trainer)


def _check_folder(save_dir: str, trainer) -> None:
    """Raise UsageError, on all ranks, if rank 0 has saved in another folder than at the start."""
    before, now = getattr(trainer, "folder", None), launch.folder_identity(save_dir)
    moved = before is not None and now not in (before, None)
    if launch.broadcast(moved) if launch.is_distributed() else moved:
        raise UsageError(
            f"{save_dir} was moved while training: update {trainer.get_num_updates()} is in a new folder of "
            "that name; to continue, move its checkpoints to the old folder, and that back"
        )


@contextmanager
def _sets(trainer):
    """Inside this context, files are published set by set, and all ranks list the same checkpoints."""
    paths, list_paths = checkpoint_utils.PathManager, checkpoint_utils.checkpoint_paths
    rank = trainer.expert_placement.rank

    class PublishedPaths(paths):
        @staticmethod
        def copy(source, target, overwrite=False):
            paths.copy(source, str(pending(target)), overwrite)
            publish(target)
            return True

    def checkpoint_paths(path, pattern=r"checkpoint(\d+)\.pt", keep_match=False):
        # fairseq saves and removes files depending on the existing ones. A run that was killed while
        # removing files may have left different ones on different ranks, so all ranks use rank 0's list.
        files = launch.broadcast(list_paths(path, pattern, keep_match) if rank == 0 else None)

        def own(file: str) -> str:
            return os.path.join(path, rank_file(set_name(file), rank).name)

        return [(own(file), match) for file, match in files] if keep_match else [*map(own, files)]

    checkpoint_utils.PathManager = PublishedPaths
    checkpoint_utils.checkpoint_paths = checkpoint_paths
    trainer.save_name = launch.broadcast(new_save_name())
    try:
        yield
    finally:
        checkpoint_utils.PathManager, checkpoint_utils.checkpoint_paths = paths, list_paths
        trainer.save_name = None


def new_save_name() -> str:
    """A unique name of a save, greater than earlier ones."""
    return f"{time.time_ns():020d}-{os.getpid()}"


def publish(path: str) -> None:
    """Rename the pending file to ``path`` when all ranks have written theirs. A collective call."""
    with open(pending(path), "rb") as file:
        os.fsync(file.fileno())
    names = {set_name(each).name for each in launch.all_gather(path)}
    if len(names) > 1:
        raise UsageError(f"the ranks save different files: {', '.join(sorted(names))}")
    os.replace(pending(path), path)


def recover(folder: Path, place: Placement) -> None:
    """Publish the pending files of a killed run if they are a complete set, or delete them.

    A collective call. Files of a set for another number of ranks are not touched.
    """
    files = folder.glob(f"*{PENDING}")
    own = [set_name(file).name for file in files if rank_of(file) == place.rank]
    for name in sorted({name for names in launch.all_gather(own) for name in names}):
        file = rank_file(folder / name, place.rank)
        final = waiting = message = None
        try:
            final, waiting = reading.record_of(file), reading.record_of(pending(file))
        except UsageError as error:  # the file may be intact, so nothing must be removed
            message = str(error)
        launch.refuse_together(message)
        gathered = launch.all_gather([record for record in (final, waiting) if record])
        if any(r.world_size != place.world_size for records in gathered for r in records):
            continue
        newest = reading.newest_whole([{r.save for r in records} for records in gathered])
        if newest is None and len(set(launch.all_gather(final and final.save))) > 1:
            continue  # no set is complete: the user decides which files to keep
        if newest and waiting and waiting.save == newest and not (final and final.save == newest):
            os.replace(pending(file), file)
        else:
            pending(file).unlink(missing_ok=True)
    for partial in folder.glob(f"*-rank-{place.rank}.pt*.tmp"):
        partial.unlink()


# Before a checkpoint is loaded: its files have to be one set for this number of ranks.

DEFAULT = "checkpoint_last.pt"


@replaces("fairseq.checkpoint_utils:load_checkpoint")
def load_sets(original, cfg, trainer, **options):
    """Check that all ranks have a checkpoint, or none has, before each rank loads its own."""
    place = getattr(trainer, "expert_placement", None)
    if place is not None:
        folder = Path(cfg.save_dir)
        recover(folder, place)
        last = rank_file(folder / DEFAULT, place.rank)
        files = launch.all_gather((str(last), last.exists(), reading.record_of(last)))
        if cfg.restore_file == DEFAULT and len({exists for _, exists, _ in files}) > 1:
            for file, _, record in files:
                _check_world_size(file, folder / DEFAULT, place, record)
            missing = next(file for file, exists, _ in files if not exists)
            raise UsageError(f"{missing} is missing: {folder / DEFAULT} is incomplete")
    return original(cfg, trainer, **options)


def check_files(trainer, path: Path, reset_optimizer: bool) -> None:
    """Raise UsageError, on all ranks, if the files cannot be loaded; the message names the bad file.

    Args:
        path: the file that fairseq is about to load on this rank; it may not exist.
    """
    place = trainer.expert_placement
    if place is None:
        if first_block(trainer.get_model()) is not None:
            _check_unsharded(trainer, path)
    elif rank_of(path) is None:  # --finetune-from-model: each rank selects its experts
        if path.exists() and not reset_optimizer:
            raise UsageError(f"{path} is of one rank: divide it first with smoe reshard")
    else:
        _check_sharded(trainer, path, place)


def check_content(trainer, path: Path, reset_optimizer: bool) -> None:
    """Raise UsageError, on all ranks, for a checkpoint that torch would load silently, but wrongly.

    It has other dictionaries of the same size, other values of parameters that the model shares, other
    language tokens, a model that computes otherwise, or more language pairs, of which those that are not
    trained on would be lost. ``--reset-optimizer`` permits the last three, the first two of them with a
    warning.
    """
    from smoe_fairseq.checkpoints.model import other_model  # imports the models, which import this

    message = None
    if trainer.expert_placement is not None or trainer.data_parallel_rank == 0:
        content = reading.content_of(path)
        message = trained_with.dictionary_mismatch(path, content, trainer.task)
        weights = content.get("model", {})
        pairs = {name.split(".")[1] for name in weights if name.startswith("models.")}
        others = sorted(pairs - {*getattr(trainer.get_model(), "models", pairs)})
        if others and not reset_optimizer:
            message = f"{path} has models for {', '.join(others)}: expected --lang-pairs with them"
        parameters = trainer.get_model().named_parameters()
        fits = all(name in weights and weights[name].shape == p.shape for name, p in parameters)
        others = other_model(content, trainer.cfg.model) if fits else {}  # else loading says more
        task = other_flags(reading.saved_task(content)[0], trainer.cfg.task)
        others |= {name: flag for name, flag in task.items() if name in READING}
        if others:
            had = f"{path}: its training had {' '.join(others.values())}"
            if reset_optimizer:
                logger.warning(f"{had}, unlike this one")
            else:
                message = message or f"{had}; expected the same, or {RESETS}"
        if names := shared_but_differing(trainer.get_model(), weights):
            flags = trained_with.flags_of_other_state(content, trainer.cfg)
            flags = " ".join(flag for flag in flags if "--share-" in flag)
            message = (
                f"{path}: {' and '.join(names)} differ, and this model shares them: expected the --share- "
                f"flags of its training{f' ({flags})' if flags else ''}"
            )
    launch.refuse_together(message)


def _check_unsharded(trainer, path: Path) -> None:
    """Raise UsageError if a run without sharded experts would start anew next to a set of sharded ones."""
    if trainer.data_parallel_rank > 0:
        return
    files = {} if path.exists() else rank_files(path)
    if files:
        raise UsageError(
            f"{files[min(files)]} is of {len(files)} ranks: resume with as many and --expert-parallel, "
            f"or make one file with smoe reshard {path} --world-size 1 --output another/folder/{path.name}"
        )
    record = reading.record_of(path)
    if record is not None and record.world_size > 1:
        raise UsageError(f"{path} is 1 of {record.world_size} files of a set: use smoe consolidate")


def _check_world_size(file: str, name: Path, place, record: reading.Record | None) -> None:
    if record is not None and record.world_size != place.world_size:
        raise UsageError(
            f"{file} is of a set for {record.world_size} ranks: make one for {place.world_size} with "
            f"smoe reshard {name} --world-size {place.world_size} --output another/folder/{name.name}"
        )


def _check_sharded(trainer, path: Path, place) -> None:
    """Check the files of all ranks. All ranks raise the same error."""
    own = None  # a record, or an error message
    if path.exists():
        try:
            record = reading.Record.of(reading.open_checkpoint(path), path)
            own = record or f"{path}: it has no record of its experts"
        except UsageError as error:
            own = str(error)
    records = launch.all_gather((str(path), own))
    name = set_name(records[0][0])
    if all(record is None for _, record in records):
        return _check_new_run(trainer, records[0][0])
    for file, record in records:
        if isinstance(record, str):
            raise UsageError(record)
        _check_world_size(file, name, place, record)
    for file, record in records:
        if record is None:
            raise UsageError(f"{file} is missing: {name} is incomplete")
    reading.check_set({Path(file): record for file, record in records})


def _check_new_run(trainer, path: str) -> None:
    """Raise UsageError if no rank has a file, but the user seems to resume a run."""
    name = set_name(path)
    if rank_of(name) is not None:
        raise UsageError(f"{name} is the file of one rank: expected {set_name(name)}")
    if name.exists():
        raise UsageError(
            f"{name} is of one rank: divide it with smoe reshard {name} --world-size "
            f"{trainer.expert_placement.world_size} --output another/folder/{name.name}, or choose another "
            "--save-dir"
        )
