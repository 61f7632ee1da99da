"""Before a checkpoint is loaded: are the files those of one set, made for this number of processes?"""

import functools
from pathlib import Path
from types import ModuleType

from smoe_fairseq.checkpoint.content import open_checkpoint
from smoe_fairseq.checkpoint.dictionaries import content_of, difference
from smoe_fairseq.checkpoint.names import rank_file, rank_files, rank_of, set_name
from smoe_fairseq.checkpoint.record import Record, check_set, record_of
from smoe_fairseq.distributed.agree import from_all, several
from smoe_fairseq.distributed.saving import recover
from smoe_fairseq.models.moe_layers import first_block
from smoe_fairseq.system.errors import UsageError, UsageErrorOfAll

DEFAULT = "checkpoint_last.pt"


def load_sets(checkpoint_utils: ModuleType) -> None:
    """Before fairseq looks for a checkpoint, each process for itself, all have to have the same."""
    original = checkpoint_utils.load_checkpoint

    @functools.wraps(original)
    def load_checkpoint(cfg, trainer, **passed_on):
        place = getattr(trainer, "expert_placement", None)
        if place is not None:
            folder = Path(cfg.save_dir)
            recover(folder, place)
            last = rank_file(folder / DEFAULT, place.rank)
            there = from_all((str(last), last.exists(), record_of(last)))
            if cfg.restore_file == DEFAULT and len({exists for _, exists, _ in there}) > 1:
                for file, _, record in there:
                    _check_world_size(file, folder / DEFAULT, place, record)
                missing = next(file for file, exists, _ in there if not exists)
                raise UsageErrorOfAll(f"{missing} is missing: {folder / DEFAULT} is incomplete")
        return original(cfg, trainer, **passed_on)

    checkpoint_utils.load_checkpoint = load_checkpoint


def check_files(trainer, path: Path, reset_optimizer: bool) -> None:
    """Raise UsageError, on all processes, with one sentence that names the file at fault.

    Args:
        path: what fairseq is about to load in this process; perhaps there is no such file.
    """
    place = trainer.expert_placement
    if place is None:
        if first_block(trainer.get_model()) is not None:
            _check_unsharded(trainer, path)
    elif rank_of(path) is None:
        _check_whole(path, reset_optimizer)
    else:
        _check_sharded(trainer, path, place)


def check_dictionaries(trainer, path: Path) -> None:
    """Raise UsageErrorOfAll, on all processes, where the file's dictionaries are others of the same size."""
    loads = trainer.expert_placement is not None or trainer.data_parallel_rank == 0
    found = difference(path, content_of(path), trainer.task) if loads else None
    if several():
        found = next(filter(None, from_all(found)), None)
    if found:
        raise UsageErrorOfAll(found)


def _check_unsharded(trainer, path: Path) -> None:
    """A run without sharded experts does not start anew beside the files of one with them."""
    if trainer.data_parallel_rank > 0:
        return
    files = {} if path.exists() else rank_files(path)
    if files:
        raise UsageError(
            f"{files[min(files)]} is of a run over {len(files)} processes: resume with as many and "
            f"--expert-parallel, or make {path.name} of it with smoe reshard {path} --world-size 1 "
            f"--output {path}"
        )
    record = record_of(path)
    if record is not None and record.world_size > 1:
        raise UsageError(
            f"{path} holds one of {record.world_size} processes' experts: make one checkpoint of "
            "the set with smoe consolidate"
        )


def _check_whole(path: Path, reset_optimizer: bool) -> None:
    """A checkpoint with all experts, which --finetune-from-model may name: each process takes its own."""
    if not path.exists() and rank_files(path):
        raise UsageErrorOfAll(
            f"{path} stands for a set: make one checkpoint of it with smoe consolidate"
        )
    if path.exists() and not reset_optimizer:
        raise UsageErrorOfAll(
            f"{path} holds the optimizer's state of all experts: divide it first with smoe reshard"
        )


def _check_world_size(file: str, name: Path, place, record: Record | None) -> None:
    if record is not None and record.world_size != place.world_size:
        raise UsageErrorOfAll(
            f"{file} is of a set for {record.world_size} processes, and there are "
            f"{place.world_size}: make one for these with smoe reshard {name} --world-size "
            f"{place.world_size} --output another/folder/{name.name}"
        )


def _check_sharded(trainer, path: Path, place) -> None:
    """All processes give the same verdict, since each sees what all have found."""
    found = None
    if path.exists():
        try:
            found = Record.of(open_checkpoint(path)) or "it does not say whose experts it holds"
        except UsageError as error:
            found = str(error)
    everyones = from_all((str(path), found))
    name = set_name(everyones[0][0])
    if all(record is None for _, record in everyones):
        return _check_nothing(trainer, everyones[0][0])
    for file, record in everyones:
        if isinstance(record, str):
            raise UsageErrorOfAll(record if file in record else f"{file}: {record}")
        _check_world_size(file, name, place, record)
    for file, record in everyones:
        if record is None:
            raise UsageErrorOfAll(f"{file} is missing: {name} is incomplete")
    try:
        check_set({Path(file): record for file, record in everyones})
    except UsageError as error:
        raise UsageErrorOfAll(str(error)) from None


def _check_nothing(trainer, path: str) -> None:
    """No files: a new run, unless there is something to resume from."""
    name = set_name(path)
    if name.exists():
        raise UsageErrorOfAll(
            f"{name} is of one process: divide it with smoe reshard {name} --world-size "
            f"{trainer.expert_placement.world_size} --output {name}, or choose another --save-dir"
        )
    if trainer.cfg.checkpoint.restore_file != DEFAULT:
        raise UsageErrorOfAll(f"--restore-file: {path} is missing")
