"""Changes to ``fairseq-train`` (position in an epoch, validation, early stopping) and to translation."""

import atexit
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import numpy as np
from fairseq.data.iterators import BackgroundConsumer, GroupedEpochBatchIterator
from omegaconf import OmegaConf

from smoe_fairseq.compat.replacing import replace, replaces
from smoe_fairseq.errors import UsageError
from smoe_fairseq.flags import flag_of
from smoe_fairseq.training.subword_sampling import SampledPairs

logger = logging.getLogger(__name__)
PROGRAM = "fairseq_cli.train"
LONGEST_LOADING = 10  # seconds for which the end of a run waits for a batch that is being loaded


@atexit.register
def stop_loading() -> None:
    """End the threads that load data ahead: one that computes when Python ends would abort the process."""
    for thread in threading.enumerate():
        if isinstance(thread, BackgroundConsumer):
            thread._max_len, end = 0, time.monotonic() + LONGEST_LOADING
            while thread.is_alive() and time.monotonic() < end:
                with suppress(queue.Empty):  # so that a full queue has room for its last batch
                    thread._queue.get(timeout=0.01)


# The position in an epoch, when a run resumes on another number of ranks. fairseq counts the batches of each
# rank, so it would repeat or skip a part of the epoch. Here batches of all ranks are counted. If the epoch
# has another number of batches now, since the batch size has changed, the position is scaled.

# Keys in addition to fairseq's.
RANKS, BATCHES, SENTENCES, TOKENS = "ranks", "batches", "sentences", "tokens"


def _amounts(dataset) -> dict[str, int]:
    """What tells other data apart: how much there is; tokens where each epoch has the same ones."""
    text = dataset.dataset if isinstance(dataset, SampledPairs) else dataset
    sizes, amounts = getattr(text, "sizes", None), {SENTENCES: len(dataset)}
    is_fixed = getattr(dataset, "can_reuse_epoch_itr_across_epochs", False)
    if isinstance(sizes, np.ndarray) and is_fixed:
        amounts[TOKENS] = int(sizes.sum())
    return amounts


@replaces("fairseq.data.iterators:EpochBatchIterator.state_dict")
def state_of_all_ranks(original, epochs):
    state = original(epochs)
    if isinstance(epochs, GroupedEpochBatchIterator):  # several data sets, in speech tasks
        return state
    now = {RANKS: epochs.num_shards, BATCHES: len(epochs.frozen_batches)}
    return {**state, **now, **_amounts(epochs.dataset)}


@replaces("fairseq.data.iterators:EpochBatchIterator._get_iterator_for_epoch")
def load_by_new_workers(original, epochs, *arguments, **options):
    """fairseq keeps the data loader of the first epoch.

    ``--curriculum`` would not shuffle it, and its workers would draw what they drew in the first epoch. With
    ``--skip-remainder-batch``, a resumed run would skip as many batches as it had done.
    """
    epochs.reuse_dataloader = False
    skips, epochs.skip_remainder_batch = epochs.skip_remainder_batch, False
    batches = original(epochs, *arguments, **options)
    epochs.skip_remainder_batch = skips
    return batches.take(batches.total - 1) if skips and batches is not None else batches


@replaces("fairseq.data.iterators:EpochBatchIterator.load_state_dict")
def resume_on_any_ranks(original, epochs, state):
    position = state.get("iterations_in_epoch", 0)
    if position and RANKS in state:  # earlier checkpoints lack it
        for name, found in _amounts(epochs.dataset).items():
            if (before := state.get(name)) not in (None, found):
                raise UsageError(
                    f"the training data has {found} {name}, and had {before} when the checkpoint was saved "
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


# The schedule reduce_lr_on_plateau, of which fairseq saves a part, before its step at the end of an epoch.

_PLATEAU = "fairseq.optim.lr_scheduler.reduce_lr_on_plateau:ReduceLROnPlateauLRSchedule"
_COUNTS = ("num_bad_epochs", "cooldown_counter")


@replaces(f"{_PLATEAU}.state_dict")
def save_counts(original, schedule):
    return original(schedule) | {name: getattr(schedule.lr_scheduler, name) for name in _COUNTS}


@replaces(f"{_PLATEAU}.load_state_dict")
def load_counts(original, schedule, state):
    original(schedule, state)
    for name in _COUNTS:
        setattr(schedule.lr_scheduler, name, state.get(name, 0))


# The scaler of ``--fp16``, of which fairseq saves the scale alone.

_HALVES = "fairseq.optim.fp16_optimizer:_FP16OptimizerMixin"
_HALF_MEMORY = "fairseq.optim.fp16_optimizer:_MemoryEfficientFP16OptimizerMixin"
_SCALER = "smoe_loss_scaler"


@replaces(f"{_HALVES}.state_dict")
@replaces(f"{_HALF_MEMORY}.state_dict")
def save_scaler(original, optimizer):
    if optimizer.scaler is None:
        return original(optimizer)
    counts = {name: n for name, n in vars(optimizer.scaler).items() if name.startswith("_")}
    return original(optimizer) | {_SCALER: counts}


@replaces(f"{_HALVES}.load_state_dict")
@replaces(f"{_HALF_MEMORY}.load_state_dict")
def load_scaler(original, optimizer, state, *overrides):
    original(optimizer, state, *overrides)
    if optimizer.scaler is not None:
        vars(optimizer.scaler).update(state.get(_SCALER, {}))


def end_epoch(trainer, extra_state: Mapping) -> None:
    """Make the step of the schedule for an epoch at whose end a checkpoint was saved."""
    position, loss = extra_state.get("train_iterator") or {}, extra_state.get("val_loss")
    by_loss = trainer.cfg.lr_scheduler._name == "reduce_lr_on_plateau"
    if by_loss and loss is not None and not position.get("iterations_in_epoch", 1):
        trainer.lr_step(position["epoch"] - 1, loss)


# The shard of training data of which an epoch reads a part, with ``--virtual-epoch-size``. A run of fairseq
# knows the next one only from the epochs that it has read.

SHARD = "shard"  # key of a checkpoint's "extra_state"


def shard_of(data) -> dict:
    """The number of the data set's shard, and whether the next epoch reads the next one."""
    if not hasattr(data, "shard_epoch"):
        return {}
    follows = bool(data.load_next_shard)
    return {"number": data.shard_epoch - follows, "follows": follows}


def continue_shard(task, extra_state: Mapping) -> None:
    """Let the task load a checkpoint's shard, or the next one if that follows the end of an epoch."""
    if shard := extra_state.get(SHARD):
        number, follows, stays = int(shard["number"]), bool(shard["follows"]), False
        if not extra_state["train_iterator"]["iterations_in_epoch"]:
            number, follows, stays = number + follows, False, not follows
        vars(task)[SHARD] = {"number": number, "follows": follows, "stays": stays}


@replaces(
    "fairseq.tasks.translation_multi_simple_epoch:TranslationMultiSimpleEpochTask.load_dataset"
)
def load_shard(original, task, split, epoch=1, **options):
    """Keeps what is loaded, for ``--train-subset valid``: fairseq fails unless the data has shards."""
    if split in task.datasets and not task.has_sharded_data(split):
        return
    reads_parts = task.args.virtual_epoch_size and split == getattr(task.args, "train_subset", None)
    shard = vars(task).pop(SHARD, None) if reads_parts else None
    if shard:
        task.data_manager.estimate_global_pass_epoch = lambda epoch: shard["number"]
    original(task, split, epoch=epoch, **options)
    if shard:
        data = task.dataset(split)
        begins = (epoch - 1) % data.num_virtual_epochs == 0
        if shard["follows"] or (shard["stays"] and begins):
            data.load_next_shard, data.shard_epoch = True, shard["number"] + 1


# Options of ``fairseq-generate`` and ``fairseq-interactive``.

_SEARCHES = ("sampling", "diverse_beam_groups", "match_source_len", "diversity_rate", "constraints")
_ITERATIVE = ("print_step", "retain_iter_history")


@replaces("fairseq.utils:load_align_dict")
def take_bare_flag(original, replace_unk):
    """For ``--replace-unk`` without a file, fairseq has the value "@@ ", which it takes for one."""
    return original("" if replace_unk == "@@ " else replace_unk)


@replaces("fairseq_cli.generate:_main")
def translate_data(original, cfg, output_file):
    shards = cfg.dataset
    if not 0 <= shards.shard_id < shards.num_shards:
        raise UsageError(f"--shard-id {shards.shard_id}: expected 0 to --num-shards minus 1")
    if shards.num_shards > 1:  # fairseq reads other options
        place = cfg.distributed_training
        place.distributed_world_size, place.distributed_rank = shards.num_shards, shards.shard_id
    if getattr(cfg.bpe, "_name", None) == "sentencepiece":
        # fairseq joins the pieces of the translation alone, and where both are joined, joins the words too.
        cfg.bpe, cfg.common_eval.post_process = None, "sentencepiece"
    _check_search(cfg, "generate")
    try:
        return original(cfg, output_file)
    except ZeroDivisionError:
        if shards.num_shards > 1:  # fewer batches than shards
            logger.warning(f"--shard-id {shards.shard_id}: no sentences")
            return None
        raise UsageError(
            f"--gen-subset {shards.gen_subset}: nothing was translated, since all sentences are skipped"
        ) from None


@replaces("fairseq_cli.interactive:main")
def translate_input(original, cfg):
    # There are no references, and fairseq would ignore the language model.
    for option in ("score_reference", "lm_path"):
        if getattr(cfg.generation, option):
            raise UsageError(f"{flag_of(option)}: expected it with fairseq-generate")
    if getattr(cfg.bpe, "_name", None) == "sentencepiece":
        cfg.common_eval.post_process = None  # it joins the pieces itself
    _check_search(cfg, "interactive")
    try:
        return original(cfg)
    except AssertionError as error:
        if not cfg.generation.constraints:
            raise
        most = "a translation reached its maximum length before it had them all"
        raise UsageError(f"--constraints: {most}; expected a larger --max-len-b") from error


@replaces("fairseq_cli.eval_lm:main")
def evaluate_whole_text(original, cfg, **others):
    # Each of several ranks evaluates all; fairseq would print the loss of the first one's part.
    place = getattr(cfg, "distributed_training", cfg)
    place.distributed_world_size, place.distributed_rank = 1, 0
    return original(cfg, **others)


def _check_search(cfg, command: str) -> None:
    """Raise UsageError for options of a search that exclude each other, or that the command cannot follow."""
    options = cfg.generation
    chosen = [
        flag_of(each) for each in _SEARCHES if getattr(options, each) not in (False, None, -1)
    ]
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(chosen)}: expected one of them")
    task = getattr(cfg.task, "_name", None) or getattr(cfg.task, "task", None)
    if options.constraints and (command, task) != ("interactive", "translation"):
        raise UsageError("--constraints: expected fairseq-interactive with --task translation")
    if options.score_reference and task == "multilingual_translation":
        raise UsageError(
            "--score-reference: a model of --task multilingual_translation has no score"
        )
    for option in _ITERATIVE:
        if getattr(options, option) and not str(task).endswith("_lev"):
            raise UsageError(f"{flag_of(option)}: expected a model that translates by iterations")


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
            save = sys.modules["fairseq.checkpoint_utils"].save_checkpoint
            save(cfg.checkpoint, trainer, epoch_itr, None)
        elif not cfg.checkpoint.no_save:  # perhaps on this rank alone, as after a failed update
            trainer.in_update = True
            trainer.consolidate_optimizer()
            file = os.path.join(cfg.checkpoint.save_dir, "crash.pt")
            trainer.save_checkpoint(file, {})
        raise


# The number of validations without improvement (--patience) is an attribute of a function of fairseq. Here
# it is saved in the checkpoint, so that a resumed run continues to count.

EARLY_STOP = "early_stop"  # key of a checkpoint's "extra_state"
SELECTED_BY = "selected_by"  # likewise: by what the best checkpoint is selected
_ATTRIBUTES = ("best", "num_runs")
_NOT_IN_LOSS = {"save_interval_minutes", "subword_sampling", "report_accuracy"}


def selected_by(cfg) -> dict[str, str | int]:
    """The settings on which the number of a validation depends."""
    names, metric = ("validate_sentences", "validate_beam"), cfg.checkpoint.best_checkpoint_metric
    settings = {name: getattr(cfg.criterion, name, 0) for name in names}
    if metric == "loss":  # of whatever the criterion adds up
        own = OmegaConf.to_container(cfg.criterion) if OmegaConf.is_config(cfg.criterion) else {}
        settings |= {name: str(own[name]) for name in sorted(own.keys() - {*names, *_NOT_IN_LOSS})}
    return settings | {
        "metric": metric,
        "maximize": cfg.checkpoint.maximize_best_checkpoint_metric,
        "subset": cfg.dataset.valid_subset,
        "combined": cfg.dataset.combine_valid_subsets,
        "steps": cfg.dataset.max_valid_steps,
    }


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
