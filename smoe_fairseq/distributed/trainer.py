"""What fairseq's trainer does otherwise, above all where the experts are spread over processes."""

import copy
import functools
import logging
import os
from pathlib import Path
from types import ModuleType

from omegaconf import open_dict

from smoe_fairseq.checkpoint.names import pending
from smoe_fairseq.checkpoint.record import KEY, Record
from smoe_fairseq.distributed.folder import hold_folder
from smoe_fairseq.distributed.gradients import ExpertNorm
from smoe_fairseq.distributed.loading import check_files
from smoe_fairseq.distributed.options import check_options
from smoe_fairseq.distributed.same_run import check_data, check_flags
from smoe_fairseq.distributed.saving import new_save_name, publish
from smoe_fairseq.models.moe_layers import first_block, placement_of
from smoe_fairseq.system.errors import UsageError, UsageErrorOfAll
from smoe_fairseq.system.memory import keep_freed_memory

logger = logging.getLogger(__name__)


def tell_trainer(trainer: ModuleType) -> None:
    """Each function below takes the place of the trainer's method of its name, and calls it."""
    for function in (
        *(__init__, state_dict, save_checkpoint, load_checkpoint, get_train_iterator),
        *(train_step, clip_grad_norm, _log_oom),
    ):
        _add_to(trainer.Trainer, function)
    saves = trainer.Trainer.should_save_checkpoint_on_current_rank
    trainer.Trainer.should_save_checkpoint_on_current_rank = property(
        lambda self: self.expert_placement is not None or saves.fget(self)
    )


def _add_to(cls, function) -> None:
    original = getattr(cls, function.__name__)

    @functools.wraps(original)
    def method(self, *arguments, **options):
        return function(original, self, *arguments, **options)

    setattr(cls, function.__name__, method)


def __init__(original, self, cfg, task, model, *others, **options):
    check_flags(cfg, task)
    self.expert_placement = place = placement_of(model)
    self.save_name = None  # of a set, while all processes save one
    if place is not None:
        check_options(cfg)
        with open_dict(cfg):
            cfg.checkpoint.checkpoint_suffix += f"-rank-{place.rank}"
            cfg.checkpoint.load_checkpoint_on_all_dp_ranks = True
    original(self, cfg, task, model, *others, **options)
    hold_folder(self.cfg.checkpoint)
    if not self.cuda:
        keep_freed_memory()


def state_dict(original, self):
    """The checkpoint's content says whose experts it holds; its config does not say how it was trained.

    So what `smoe consolidate` makes of it loads anywhere without a flag.
    """
    state = original(self)
    block = first_block(self.get_model())
    if block is None:
        return state
    place = block.experts.placement
    state["cfg"] = cfg = copy.copy(state["cfg"])
    cfg["model"] = model = copy.copy(cfg["model"])
    if isinstance(model, dict):
        model["expert_parallel"] = False
    else:
        model.expert_parallel = False
    cfg["checkpoint"] = {**cfg["checkpoint"], "checkpoint_suffix": ""}
    named = [*self.get_model().named_parameters(), *self.get_criterion().named_parameters()]
    state[KEY] = Record(
        save=self.save_name or new_save_name(),
        num_updates=self.get_num_updates(),
        num_experts=place.num_experts,
        world_size=place.world_size,
        rank=place.rank,
        parameters=tuple(name for name, parameter in named if parameter.requires_grad),
    ).as_dict()
    return state


def save_checkpoint(original, self, filename, extra_state):
    if self.expert_placement is None:
        return original(self, filename, extra_state)
    if self.save_name is not None:
        original(self, str(pending(filename)), extra_state)
        return publish(filename)
    # crash.pt, perhaps of this process alone: nothing that waits for others
    path, ending = os.path.splitext(filename)
    return original(self, f"{path}-rank-{self.expert_placement.rank}{ending}", extra_state)


def load_checkpoint(original, self, filename, reset_optimizer=False, *others, **options):
    check_files(self, Path(filename), reset_optimizer)
    try:
        extra_state = original(self, filename, reset_optimizer, *others, **options)
    except Exception as error:  # fairseq puts a sentence of its own in the place of the model's
        if isinstance(error.__context__, UsageError):
            raise error.__context__ from None
        raise
    optimization = self.cfg.optimization
    if 0 < optimization.max_update <= self.get_num_updates() and first_block(self.get_model()):
        # fairseq looks at --max-update only after an update, so that resuming a finished run makes one more.
        logger.info(f"--max-update {optimization.max_update}: nothing is left to train")
        optimization.max_epoch = -1
    return extra_state


def get_train_iterator(original, self, *arguments, **options):
    iterator = original(self, *arguments, **options)
    check_data(self.cfg.dataset.train_subset, iterator.dataset)
    return iterator


def train_step(original, self, *arguments, **options):
    try:
        return original(self, *arguments, **options)
    except FloatingPointError as error:  # which all processes come to, by the norm of all gradients
        raise UsageErrorOfAll(
            f"update {self.get_num_updates() + 1}: {str(error).partition(chr(10))[0]}; the log names the "
            "module where it begins, where there is one; lower --lr, lengthen --warmup-updates or set "
            "--clip-norm"
        ) from None


def clip_grad_norm(original, self, clip_norm):
    if self.expert_placement is None:
        return original(self, clip_norm)
    norm = ExpertNorm(self.expert_placement)
    return self.optimizer.clip_grad_norm(clip_norm, aggregate_norm_fn=norm)


def _log_oom(original, self, exc):
    original(self, exc)
    if self.expert_placement is not None:
        # fairseq would skip this batch, while the other processes wait for this one's tokens.
        raise UsageError(
            f"process {self.expert_placement.rank} is out of memory, and with --expert-parallel no "
            "process can skip a batch; lower --max-tokens"
        ) from exc
