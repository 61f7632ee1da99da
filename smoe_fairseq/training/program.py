"""Changes to ``fairseq-train``: the position in an epoch, validation, early stopping; and to generation."""

import os
import sys
from collections.abc import Callable, Mapping

from fairseq.data.iterators import GroupedEpochBatchIterator

from smoe_fairseq.compat.replacing import replace, replaces
from smoe_fairseq.errors import UsageError

PROGRAM = "fairseq_cli.train"


# The position in an epoch, when a run resumes on another number of ranks. fairseq counts the batches of each
# rank, so it would repeat or skip a part of the epoch. Here batches of all ranks are counted. If the epoch
# has another number of batches now, since the batch size has changed, the position is scaled.

RANKS, BATCHES, SENTENCES = "ranks", "batches", "sentences"  # keys in addition to fairseq's


@replaces("fairseq.data.iterators:EpochBatchIterator.state_dict")
def state_of_all_ranks(original, epochs):
    state = original(epochs)
    if isinstance(epochs, GroupedEpochBatchIterator):  # several data sets, in speech tasks
        return state
    now = {RANKS: epochs.num_shards, BATCHES: len(epochs.frozen_batches)}
    return {**state, **now, SENTENCES: len(epochs.dataset)}


@replaces("fairseq.data.iterators:EpochBatchIterator.load_state_dict")
def resume_on_any_ranks(original, epochs, state):
    position = state.get("iterations_in_epoch", 0)
    if position and RANKS in state:  # earlier checkpoints lack it
        before, found = state.get(SENTENCES), len(epochs.dataset)
        if before not in (None, found):
            raise UsageError(
                f"the training data has {found} sentences, and had {before} when the checkpoint was saved "
                "within its epoch: expected the same data, or --reset-dataloader to begin anew with these"
            )
        epochs.epoch = state["epoch"]
        now = len(epochs.frozen_batches)
        if (epochs.num_shards, now) != (state[RANKS], state[BATCHES]):
            done = position * state[RANKS] * now // state[BATCHES]
            state = {**state, "iterations_in_epoch": min(done, now - 1) // epochs.num_shards}
    try:
        original(epochs, state)
    except RuntimeError:
        raise UsageError(
            f"the checkpoint was saved after batch {position} of its epoch, but the epoch has fewer batches "
            "now: expected the data and batch size of its training, or --reset-dataloader"
        ) from None


@replaces("fairseq_cli.generate:_main")
def share_sentences(original, cfg, output_file):
    """Lets ``--num-shards`` and ``--shard-id`` divide the sentences; fairseq reads other options."""
    if cfg.dataset.num_shards > 1:
        place, shards = cfg.distributed_training, cfg.dataset
        place.distributed_world_size, place.distributed_rank = shards.num_shards, shards.shard_id
    return original(cfg, output_file)


# Functions of ``fairseq_cli.train``, if it is running.


def change(name: str, function: Callable) -> None:
    """Replace a function of the program by ``function(original, ...)``; a second call changes nothing."""
    program = sys.modules.get(PROGRAM)
    if hasattr(program, name) and not hasattr(getattr(program, name), "__wrapped__"):
        replace(program, name, function)


def save_if_validation_fails(validate, cfg, trainer, task, epoch_itr, subsets):
    """Save a checkpoint if validation fails, for example because memory runs out."""
    try:
        return validate(cfg, trainer, task, epoch_itr, subsets)
    except Exception:
        if trainer.data_parallel_world_size == 1:
            save = sys.modules[PROGRAM].checkpoint_utils.save_checkpoint
            save(cfg.checkpoint, trainer, epoch_itr, None)
        elif not cfg.checkpoint.no_save:  # perhaps on this rank alone, as after a failed update
            trainer.in_update = True
            trainer.consolidate_optimizer()
            file = os.path.join(cfg.checkpoint.save_dir, "crash.pt")
            trainer.save_checkpoint(file, {"train_iterator": epoch_itr.state_dict()})
        raise


# The number of validations without improvement (--patience) is an attribute of a function of fairseq. Here
# it is saved in the checkpoint, so that a resumed run continues to count.

EARLY_STOP = "early_stop"  # key of a checkpoint's "extra_state"
_ATTRIBUTES = ("best", "num_runs")


def early_stop() -> dict[str, float]:
    """The best number so far and the validations since; empty before the first."""
    stop = getattr(sys.modules.get(PROGRAM), "should_stop_early", None)
    values = {name: getattr(stop, name, None) for name in _ATTRIBUTES}
    return {name: value for name, value in values.items() if value is not None}


def set_early_stop(state: Mapping[str, float]) -> None:
    """Continue to count from this state."""
    stop = getattr(sys.modules.get(PROGRAM), "should_stop_early", None)
    for name in _ATTRIBUTES if stop is not None else ():
        setattr(stop, name, state.get(name))
