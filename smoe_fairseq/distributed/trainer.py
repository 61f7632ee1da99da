"""What fairseq's trainer does otherwise, above all where the experts are spread over processes."""

import copy
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy
import torch
from fairseq.trainer import Trainer
from omegaconf import open_dict
from torch import Tensor

from smoe_fairseq.checkpoint import dictionaries
from smoe_fairseq.checkpoint.names import pending
from smoe_fairseq.checkpoint.record import KEY, Record
from smoe_fairseq.distributed.folder import hold_folder
from smoe_fairseq.distributed.gradients import ExpertNorm
from smoe_fairseq.distributed.loading import check_dictionaries, check_files
from smoe_fairseq.distributed.options import check_language_pairs, check_options
from smoe_fairseq.distributed.same_run import check_data, check_flags
from smoe_fairseq.distributed.saving import new_save_name, publish
from smoe_fairseq.distributed.update_bias import update_biases
from smoe_fairseq.models.moe_layers import experts_of, first_block, moe_blocks, placement_of
from smoe_fairseq.modules.transfer import on_host
from smoe_fairseq.system.errors import UsageError, UsageErrorOfAll
from smoe_fairseq.system.memory import keep_freed_memory

logger = logging.getLogger(__name__)


def ask_for_ours(trainer: ModuleType) -> None:
    """Lets ``Trainer(...)`` make an `SMoETrainer`; subclasses of fairseq's stay what they are.

    ``fairseq_cli.train`` has taken the class out of its module before it reads ``--user-dir``, and may
    itself be ``__main__``: another class under the old one's name would be seen by neither. So it is what
    the class makes that is changed.
    """
    fairseqs = trainer.Trainer

    def __new__(cls, *arguments, **options):
        return object.__new__(SMoETrainer if cls is fairseqs else cls)

    fairseqs.__new__ = staticmethod(__new__)


class SMoETrainer(Trainer):
    """fairseq's trainer with the checks of this package, and with sets of checkpoints.

    ``expert_placement`` is None where every process has all experts, and ``save_name`` but while all
    processes save a set; ``in_update`` says whether an update is being made.

    Raises:
        UsageError, UsageErrorOfAll: flags, data, folder or checkpoint do not go with the run.
    """

    def __init__(self, cfg, task, model, *others, **options):
        check_flags(cfg, task)
        check_language_pairs(cfg, model)
        self.expert_placement = place = placement_of(model)
        self.save_name = None
        self.in_update = False
        if place is not None:
            check_options(cfg)
            with open_dict(cfg):
                cfg.checkpoint.checkpoint_suffix += f"-rank-{place.rank}"
                cfg.checkpoint.load_checkpoint_on_all_dp_ranks = True
        super().__init__(cfg, task, model, *others, **options)
        hold_folder(self.cfg.checkpoint)
        if not self.cuda:
            keep_freed_memory()

    @property
    def should_save_checkpoint_on_current_rank(self) -> bool:
        """With sharded experts each process has a file of its own."""
        return self.expert_placement is not None or super().should_save_checkpoint_on_current_rank

    def state_dict(self):
        """fairseq's content; also which words its numbers stand for, and whose experts it holds.

        Its config does not say how it was trained, so that what `smoe consolidate` makes of it loads
        anywhere without a flag.
        """
        state = super().state_dict()
        state[dictionaries.KEY] = dictionaries.noted(self.task)
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
            other_layers={
                layer: experts.placement.num_experts
                for layer, experts in experts_of(self.get_model()).items()
                if experts.placement.num_experts != place.num_experts
            },
            world_size=place.world_size,
            rank=place.rank,
            parameters=tuple(name for name, parameter in named if parameter.requires_grad),
        ).as_dict()
        return state

    def consolidate_optimizer(self):
        """As fairseq's, where all processes save.

        Within an update it is for crash.pt, perhaps of this process alone: it cannot ask the others for
        their part of an optimizer's state, and is saved without any.
        """
        if self.in_update and hasattr(self.optimizer.optimizer, "consolidate_state_dict"):
            self._gathered_optim_state = {}
        else:
            super().consolidate_optimizer()

    def save_checkpoint(self, filename, extra_state):
        """As fairseq's; with sharded experts, together with all others."""
        if self.expert_placement is None:
            super().save_checkpoint(filename, extra_state)
        elif self.save_name is not None:
            super().save_checkpoint(str(pending(filename)), extra_state)
            publish(filename)
        else:  # crash.pt, perhaps of this process alone: nothing that waits for others
            path, ending = os.path.splitext(filename)
            rank = self.expert_placement.rank
            super().save_checkpoint(f"{path}-rank-{rank}{ending}", extra_state)

    def load_checkpoint(self, filename, reset_optimizer=False, *others, **options):
        """As fairseq's, of files that have been checked; a run that has ended stays so."""
        check_files(self, Path(filename), reset_optimizer)
        check_dictionaries(self, Path(filename))
        try:
            extra_state = super().load_checkpoint(filename, reset_optimizer, *others, **options)
        except Exception as error:  # fairseq puts a sentence of its own in the place of the model's
            if isinstance(error.__context__, UsageError):
                raise error.__context__ from None
            if isinstance(error, ValueError | LookupError | TypeError | AttributeError):
                raise UsageErrorOfAll(
                    f"{filename} does not fit this run ({type(error).__name__}: "
                    f"{' '.join(str(error).split())}); with --reset-optimizer --reset-lr-scheduler "
                    "--reset-dataloader --reset-meters only its parameters are taken"
                ) from None
            raise
        optimization = self.cfg.optimization
        if 0 < optimization.max_update <= self.get_num_updates() and first_block(self.get_model()):
            # fairseq looks at --max-update only after an update: resuming a finished run makes one more.
            logger.info(f"--max-update {optimization.max_update}: nothing is left to train")
            optimization.max_epoch = -1
        return extra_state

    def get_train_iterator(self, *arguments, **options):
        """As fairseq's, of data that all processes have alike."""
        iterator = super().get_train_iterator(*arguments, **options)
        check_data(self.cfg.dataset.train_subset, iterator.dataset)
        return iterator

    def train_step(self, samples, *others, **options):
        """As fairseq's, with all batches of an update counted; one sentence where numbers stop being numbers.

        Where batches run out, one that keeps this process in step (empty) may follow others of the same
        update, and fairseq would take them for as empty as the last.
        """
        if begin_update := getattr(self.get_criterion(), "begin_update", None):
            begin_update()
        self.in_update = True
        try:
            with dummies_left_out(self.task):
                return super().train_step(sorted(samples, key=_is_there), *others, **options)
        except (
            FloatingPointError
        ) as error:  # which all processes come to, by the norm of all gradients
            raise UsageErrorOfAll(
                f"update {self.get_num_updates() + 1}: {str(error).partition(chr(10))[0]}; the log names "
                "the module where it begins, where there is one; lower --lr, lengthen --warmup-updates "
                "or set --clip-norm"
            ) from None
        finally:
            self.in_update = False

    def _prepare_sample(self, sample, is_dummy=False):
        """As fairseq's; a batch that only keeps this process in step with others says so."""
        sample, is_dummy = super()._prepare_sample(sample, is_dummy)
        return {**sample, "is_dummy": True} if is_dummy else sample, is_dummy

    def _reduce_and_log_stats(self, logging_outputs, sample_size, grad_norm=None):
        """As fairseq's, which reads each number from the device by itself."""
        if not hasattr(
            self.get_criterion(), "gate_losses"
        ):  # whose logs are as fairseq expects them
            return super()._reduce_and_log_stats(logging_outputs, sample_size, grad_norm)
        logs = [*(logging_outputs or []), {"norm": grad_norm}]
        *logs, norm = on_host(logs)
        if torch.is_tensor(grad_norm):
            grad_norm = torch.tensor(norm["norm"])
        kept = None if logging_outputs is None else logs
        if self.model.training:
            update_biases(self.get_model(), logs)
        return super()._reduce_and_log_stats(kept, sample_size, grad_norm)

    def clip_grad_norm(self, clip_norm):
        """By the norm over the experts of all processes."""
        if self.expert_placement is None:
            return super().clip_grad_norm(clip_norm)
        marked = (
            experts.placement
            for experts in experts_of(self.get_model()).values()
            for parameter in experts.parameters()
            if parameter.requires_grad
        )
        norm = ExpertNorm(list(marked))
        return self.optimizer.clip_grad_norm(clip_norm, aggregate_norm_fn=norm)

    def _log_oom(self, exc):
        super()._log_oom(exc)
        asking = [b for b in moe_blocks(self.get_model()).values() if b.balance_over == "update"]
        if self.expert_placement is not None or (asking and self.data_parallel_world_size > 1):
            # fairseq would skip this batch, while the other processes wait for this one's tokens or counts.
            flag = "--moe-balance-over update" if asking else "--expert-parallel"
            raise UsageError(
                f"process {self.data_parallel_rank} is out of memory, and with {flag} no process can skip "
                "a batch; lower --max-tokens"
            ) from exc


def _is_there(sample) -> bool:
    return sample is not None and len(sample) > 0


@contextmanager
def dummies_left_out(task) -> Iterator[None]:
    """Within it, a task's ``train_step`` says nothing of batches whose gradient is ignored."""
    of_task = task.train_step

    def train_step(*arguments, ignore_grad=False, **options):
        loss, size, log = of_task(*arguments, ignore_grad=ignore_grad, **options)
        return (loss, size * 0, _nothing_of(log)) if ignore_grad else (loss, size, log)

    task.train_step = train_step
    try:
        yield
    finally:
        del task.train_step  # which hides that of its class


def _nothing_of(value):
    if isinstance(value, Mapping):
        return {key: _nothing_of(each) for key, each in value.items()}
    numbers = Tensor | numpy.ndarray | numpy.number | int | float
    return value * 0 if isinstance(value, numbers) else value
