"""Our trainer: fairseq's, with checks, sharded checkpoints and routing statistics."""

import copy
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path

import numpy
import torch
from fairseq import checkpoint_utils
from fairseq.trainer import Trainer
from fairseq.utils import resolve_max_positions
from omegaconf import open_dict
from torch import Tensor, nn

from smoe_fairseq.checkpoints import reading, trained_with
from smoe_fairseq.checkpoints.reading import RECORD, Record
from smoe_fairseq.compat.checkpoint_names import pending, rank_file
from smoe_fairseq.criterions.metrics import on_host
from smoe_fairseq.errors import UsageError, naming_file
from smoe_fairseq.flags import flag_of, values_of
from smoe_fairseq.host_memory import keep_freed_memory
from smoe_fairseq.models import transformer
from smoe_fairseq.models.memory import same_batch
from smoe_fairseq.modules.experts import cast_once
from smoe_fairseq.modules.registry import number_text, plugins_of
from smoe_fairseq.training import (
    launch,
    program,
    reduction,
    saving,
    screen,
    sharded_checkpoints,
    text,
    translations,
)
from smoe_fairseq.training.foreach import full_precision
from smoe_fairseq.training.gradients import ExpertNorm
from smoe_fairseq.training.sharded_checkpoints import RESETS
from smoe_fairseq.training.subword_sampling import sample_subwords


def update_gates(model: nn.Module, logging_outputs: Iterable[Mapping]) -> None:
    """Update the gates that learn from counts, after an optimizer step, except for those of frozen blocks.

    Args:
        logging_outputs: of all ranks, on the host, so that the gates stay equal on all ranks.
    """
    logs, observed = list(logging_outputs), {}
    for name, block in transformer.moe_blocks(model).items():
        key = f"{transformer.OBSERVED}{name}"
        counts = [log[key] for log in logs if key in log]
        if counts and any(parameter.requires_grad for parameter in block.parameters()):
            observed[block] = torch.as_tensor(sum(counts), device=block.stratum_of_expert.device)
    for block, observed_LN in observed.items():
        if block.gates[0].shares_counts:
            observed_LN = sum(each.sum(0) for each in observed.values()).expand_as(observed_LN)
        block.end_update(observed_LN)


logger = logging.getLogger(__name__)
MAX_SKIPPED = 3  # consecutive updates for which all ranks ran out of memory


def learns_by_updates(models: Iterable[nn.Module]) -> str | None:
    """The flag with which gates learn from the counts of an update, not only from gradients."""
    for block in (block for model in models for block in transformer.moe_blocks(model).values()):
        if block.stats_builder.num_observed:
            bias = block.config.balance == "bias"
            return "--moe-balance bias" if bias else f"--moe-gate {block.config.gate}"
        if block.config.balance_over == "update" and block.config.learns_balance:
            return "--moe-balance-over update"
    return None


class SMoETrainer(Trainer):
    """fairseq's trainer with the checks of this package and sharded checkpoints.

    Attributes:
        expert_placement: None if every rank has all experts.
        folder: the identity of ``--save-dir`` at the start; None if there is none.
        save_name: the name of the set that is being saved, else None.
        crash_name: the beginning of the name of the set ``crash.pt``, equal on all ranks.
        epoch_iterator: of the training data; None before it is loaded.
        in_update: whether an update is running.
        lacks_memory: whether this rank ran out of memory in the running update.
        skipped: consecutive updates for which all ranks ran out of memory.
        save_timer: when to save between validations.
        known_logs: the last logging output, from which a rank without one makes zeros.

    Raises:
        UsageError: flags, data, folder or checkpoint do not fit the run.
    """

    def __init__(self, cfg, task, model, *others, **options):
        launch.check_flags(cfg, task)
        text.check_folders(cfg.task)
        launch.check_language_pairs(cfg, model)
        if cfg.optimization.use_bmuf and (flag := learns_by_updates([model])):
            raise UsageError(f"{flag} with --use-bmuf: gates would differ between ranks")
        numbers = [block.gates[0].numbers for block in transformer.moe_blocks(model).values()]
        if numbers and numbers[0] and all(numbers[0] == each for each in numbers):
            with open_dict(cfg):  # also the defaults, which a plugin may change
                cfg.model.moe_gate_options = number_text(numbers[0])
        if cfg.dataset.update_ordered_indices_seed:  # else fairseq keeps the first epoch's batches
            with open_dict(cfg):
                cfg.dataset.update_epoch_batch_itr = True
        self.expert_placement = place = transformer.placement_of(model)
        self.save_name = self.epoch_iterator = None
        self.crash_name = sharded_checkpoints.new_save_name()
        self.in_update = self.lacks_memory = False
        self.skipped, self.known_logs = 0, []
        if place is not None:
            launch.check_options(cfg)
            self.crash_name = launch.broadcast(self.crash_name)
            with open_dict(cfg):
                cfg.checkpoint.checkpoint_suffix += f"-rank-{place.rank}"
                cfg.checkpoint.load_checkpoint_on_all_dp_ranks = True
        super().__init__(cfg, task, model, *others, **options)
        task.train_step = excluding_dummies(task.train_step)
        launch.hold_folder(self.cfg.checkpoint)
        self.folder = launch.folder_identity(self.cfg.checkpoint.save_dir)
        program.set_early_stop({})
        # The best number of a training before, in this process.
        vars(checkpoint_utils.save_checkpoint).pop("best", None)
        translations.check(self.get_criterion(), self.get_model())
        program.change("get_valid_stats", translations.score_by_translations)
        program.change("validate", program.save_if_validation_fails)
        minutes = getattr(self.get_criterion(), "save_interval_minutes", 0)
        self.save_timer = saving.SaveTimer(minutes)
        program.change("validate_and_save", saving.save_in_time)
        if alpha := getattr(self.get_criterion(), "subword_sampling", 0):
            most = resolve_max_positions(
                task.max_positions(), self.get_model().max_positions(), cfg.dataset.max_tokens
            )
            sample_subwords(task, cfg.dataset.train_subset, alpha, cfg.common.seed, most)
        if not self.cuda:
            keep_freed_memory()

    @property
    def should_save_checkpoint_on_current_rank(self) -> bool:
        """With sharded experts, every rank saves a file."""
        return self.expert_placement is not None or super().should_save_checkpoint_on_current_rank

    def _full_precision(self) -> Iterator[tuple[str, Tensor]]:
        """The float32 copies of half-precision parameters, by name.

        fairseq saves the parameters, as float32 too, so that resuming would round the copies.
        """
        full = full_precision(self.optimizer)
        for name, parameter in self.get_model().named_parameters(remove_duplicate=False):
            if parameter in full:
                yield name, full[parameter]

    def state_dict(self):
        """fairseq's content, the dictionaries' checksums, and a record of the experts in this file.

        ``expert_parallel`` is false in its config, so that a consolidated checkpoint loads without flags.
        """
        state = super().state_dict()
        state["model"].update(self._full_precision())
        state[trained_with.DICTIONARIES] = trained_with.dictionary_checksums(self.task)
        block = transformer.first_block(self.get_model())
        if block is None:
            return state
        blocks = transformer.moe_blocks(self.get_model()).values()
        losses = {("loss", name) for name in getattr(self.get_criterion(), "loss_weights", ())}
        if plugins := plugins_of(losses.union(*(block.parts for block in blocks))):
            state[reading.PLUGINS] = plugins
        place = block.experts.placement
        state["cfg"] = cfg = copy.copy(state["cfg"])
        cfg["model"] = copy.copy(cfg["model"])  # a dictionary or a namespace
        values_of(cfg["model"])["expert_parallel"] = False
        cfg["checkpoint"] = {**cfg["checkpoint"], "checkpoint_suffix": ""}
        parameters = [
            *self.get_model().named_parameters(),
            *self.get_criterion().named_parameters(),
        ]
        record = Record(
            save=self.save_name or f"{self.crash_name}-{self.get_num_updates()}",
            num_updates=self.get_num_updates(),
            num_experts=place.num_experts,
            other_layers={
                layer: experts.placement.num_experts
                for layer, experts in transformer.experts_of(self.get_model()).items()
                if experts.placement.num_experts != place.num_experts
            },
            world_size=place.world_size,
            rank=place.rank,
            parameters=[name for name, parameter in parameters if parameter.requires_grad],
        )
        state[RECORD] = asdict(record)
        return state

    def consolidate_optimizer(self):
        """As fairseq's, when all ranks save.

        Inside an update, only crash.pt is saved, perhaps by this rank alone, which then cannot gather the
        optimizer's state from the others. So the file lacks this state.
        """
        if self.in_update and hasattr(self.optimizer.optimizer, "consolidate_state_dict"):
            self._gathered_optim_state = {}
        else:
            super().consolidate_optimizer()

    def save_checkpoint(self, filename, extra_state):
        """As fairseq's; with sharded experts, a collective call of all ranks.

        Inside an update it saves ``crash.pt``, with the position after the failed update, and warns if it
        cannot.
        """
        extra_state = {**extra_state, program.EARLY_STOP: program.early_stop()}
        extra_state[program.SELECTED_BY] = program.selected_by(self.cfg)
        data = self.task.datasets.get(self.cfg.dataset.train_subset)
        extra_state[program.SHARD] = program.shard_of(data)
        if self.epoch_iterator is not None:
            extra_state.setdefault("train_iterator", self.epoch_iterator.state_dict())
        if self.save_name is not None:
            super().save_checkpoint(str(pending(filename)), extra_state)
            sharded_checkpoints.publish(filename)
        else:
            if self.expert_placement is not None:  # perhaps by this rank alone, which must not wait
                filename = str(rank_file(filename, self.expert_placement.rank))
            try:
                super().save_checkpoint(filename, extra_state)
            except UsageError as error:
                if not self.in_update:
                    raise
                logger.warning(error)  # the error that ended the update is raised
                return
        screen.after_save(self.get_num_updates(), extra_state)

    def load_checkpoint(
        self,
        filename,
        reset_optimizer=False,
        reset_lr_scheduler=False,
        *rest,
        reset_meters=False,
        **more,
    ):
        """As fairseq's, after checking the files. A finished run does not train further."""
        sharded_checkpoints.check_files(self, Path(filename), reset_optimizer)
        sharded_checkpoints.check_content(self, Path(filename), reset_optimizer)
        if self._ema is None:
            self._build_ema()  # its copy of the model would keep the hook
        loaded: dict[str, Tensor] = {}
        hook = self.get_model()._register_load_state_dict_pre_hook(
            lambda state, *_: loaded.update(state)
        )
        with naming_file(filename, f"its state, which {RESETS} leave out,"):
            try:
                reset = reset_optimizer, reset_lr_scheduler
                extra_state = super().load_checkpoint(
                    filename, *reset, *rest, reset_meters=reset_meters, **more
                )
            except Exception as error:  # fairseq replaces the model's error by its own
                cause = error.__context__
                if isinstance(error, UsageError):
                    raise
                if isinstance(cause, UsageError):
                    raise UsageError(f"{filename}: {cause}") from None
                if flags := trained_with.flags_of_other_state(
                    reading.content_of(filename), self.cfg
                ):
                    raise UsageError(
                        f"{filename}: its training had {' '.join(flags)}; expected the same, or {RESETS}"
                    ) from error
                raise
            finally:
                hook.remove()
        if loaded:
            for name, full in self._full_precision():
                full.copy_(loaded[name])
        if extra_state is not None:
            self._check_loaded(filename, reset_optimizer)
            # For --finetune-from-model these arguments are set although the flags are not.
            if not (reset_optimizer or reset_meters):
                self._continue_selection(extra_state)
            if not (reset_optimizer or reset_lr_scheduler):
                program.end_epoch(self, extra_state)
            if not (reset_meters or self.cfg.checkpoint.reset_dataloader):
                with naming_file(filename, f"its state, which {RESETS} leave out,"):
                    program.continue_shard(self.task, extra_state)
        # fairseq checks these limits only after an update and a validation, so it would train further.
        optimization = self.cfg.optimization
        for flag, limit, count in (
            ("--max-update", optimization.max_update, self.get_num_updates()),
            ("--patience", self.cfg.checkpoint.patience, program.early_stop().get("num_runs", 0)),
        ):
            if 0 < limit <= count:
                logger.warning(f"{flag} {limit}: nothing is left to train")
                optimization.max_epoch = -1
        return extra_state

    def _continue_selection(self, extra_state: dict) -> None:
        """Continue to select the best checkpoint and to count for ``--patience``, if by the same numbers."""
        before, now = values_of(extra_state.get(program.SELECTED_BY)), program.selected_by(self.cfg)
        if all(now.get(name) == before[name] for name in before):  # earlier versions had fewer
            program.set_early_stop(extra_state.get(program.EARLY_STOP, {}))
            return
        changed = "validation has changed since the checkpoint was saved"
        logger.warning(f"{changed}: checkpoint_best.pt will be the best from now on")
        extra_state.pop("best", None)

    def _check_loaded(self, filename: str, reset_optimizer: bool) -> None:
        """Raise UsageError unless training can continue from the loaded state."""
        reading.check_finite(filename, self.get_model().named_parameters())
        if reset_optimizer:
            return
        updates = self._optim_history[-1]["num_updates"]
        state = getattr(self.optimizer.optimizer, "state", {})
        # The state may be empty for SGD without momentum, or if it is sharded over ranks.
        is_adam = self.cfg.optimizer._name == "adam"
        has_state = is_adam and self.cfg.distributed_training.zero_sharding == "none"
        if updates != self.get_num_updates() or (updates and has_state and not state):
            raise UsageError(
                f"{filename} lacks the optimizer state after its {updates} updates: expected "
                f"--finetune-from-model {filename} to start anew with its parameters, or {RESETS}"
            )
        for group in getattr(self.optimizer.optimizer, "param_groups", ()):
            betas = group.get("betas", ())
            if not all(0 <= beta < 1 for beta in betas):
                expected = f"expected numbers from 0 to below 1, or {RESETS}"
                raise UsageError(f"{filename}: its optimizer has betas {betas}: {expected}")
        for parameter, values in state.items():
            for name in {"exp_avg", "exp_avg_sq"} & values.keys():
                if values[name].shape != parameter.shape:
                    raise UsageError(
                        f"{filename}: {name} of its optimizer is {tuple(values[name].shape)} for a "
                        f"parameter of {tuple(parameter.shape)}; expected the optimizer of this model"
                    )
                reading.check_finite(filename, [(f"{name} of its optimizer", values[name])])

    def get_train_iterator(self, *arguments, **options):
        """As fairseq's; raises UsageError if ranks have different data.

        Validation's batches, which the task keeps, are made first: this fails before any training if a
        sentence is longer than ``--max-tokens``.
        """
        if not self.cfg.dataset.disable_validation:
            for subset in self.task.datasets.keys() - {self.cfg.dataset.train_subset}:
                self.get_valid_iterator(subset)
        self.epoch_iterator = super().get_train_iterator(*arguments, **options)
        launch.check_data(self.cfg.dataset.train_subset, self.epoch_iterator.dataset)
        return self.epoch_iterator

    def train_step(self, samples, *others, **options):
        """As fairseq's, with one message if the loss or gradients are no longer finite.

        At the end of an epoch, a rank without data gets an empty batch, so that it makes the same collective
        calls. Empty batches are sorted first, since fairseq treats all batches after one as the last.
        """
        if begin_update := getattr(self.get_criterion(), "begin_update", None):
            begin_update()
        self.in_update, self.lacks_memory = True, False
        self.save_timer.listen()
        try:
            # fully_sharded gathers the weights anew for each batch.
            casting = cast_once() if len(samples) > 1 and not self.is_fsdp else nullcontext()
            with self._advising(), casting:
                log = super().train_step(sorted(samples, key=bool), *others, **options)
            if log is not None:  # None if the update was skipped
                screen.after_update(self.get_num_updates())
                self.skipped = 0
            if self.lacks_memory:
                self.skipped += log is None
                if self.skipped >= MAX_SKIPPED:
                    raise UsageError(f"out of memory {self.skipped} times: {self._smaller_batch()}")
                logger.warning(f"a batch was skipped: {self._smaller_batch()}")
            return log
        except FloatingPointError as error:  # on all ranks, since the norm is over all gradients
            raise UsageError(
                f"update {self.get_num_updates() + 1}: {str(error).partition(chr(10))[0]}; see the log; "
                "lower --lr, lengthen --warmup-updates or set --clip-norm"
            ) from None
        finally:
            self.in_update = False

    def begin_valid_epoch(self, epoch):
        """As fairseq's; shows that a validation begins."""
        screen.before_validation(self.get_num_updates())
        super().begin_valid_epoch(epoch)

    def valid_step(self, sample, raise_oom=False):
        """As fairseq's; if memory runs out, the message advises a smaller batch."""
        with self._advising("_valid"):
            return super().valid_step(sample, raise_oom)

    @contextmanager
    def _advising(self, which: str = "") -> Iterator[None]:
        """If memory runs out, raise UsageError that advises a smaller batch."""
        try:
            yield
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            message = ". ".join(" ".join(str(error).split()).split(". ")[:2])
            raise UsageError(f"{message}: {self._smaller_batch(which)}") from error

    def _smaller_batch(self, which: str = "") -> str:
        """The flags to try: of training, or of validation (``which`` is "_valid")."""
        data = self.cfg.dataset
        name = f"max_tokens{which}" if data.max_tokens else f"batch_size{which}"
        size, frequency = getattr(data, name) or 1, self.cfg.optimization.update_freq[0]
        if which:
            return f"try {flag_of(name)} {max(1, size // 2)}"
        if size == 1:
            return f"try --checkpoint-activations or shorter sentences, since {flag_of(name)} is 1"
        size, frequency = same_batch(size, frequency, size // 2)
        return f"try {flag_of(name)} {size} --update-freq {frequency}, which is the same batch"

    def _prepare_sample(self, sample, is_dummy=False):
        """As fairseq's; marks a dummy batch, which a rank without data gets, by ``is_dummy``."""
        sample, is_dummy = super()._prepare_sample(sample, is_dummy)
        return {**sample, "is_dummy": True} if is_dummy else sample, is_dummy

    def _reduce_and_log_stats(self, logging_outputs, sample_size, grad_norm=None):
        """As fairseq's, but copies all numbers from the device at once; None if no rank had memory."""
        if not hasattr(self.get_criterion(), "gate_losses"):  # not our criterion
            if self.in_update and not float(sample_size):
                return None
            return super()._reduce_and_log_stats(logging_outputs, sample_size, grad_norm)
        logs = [*(logging_outputs or []), {"norm": grad_norm, "size": sample_size}]
        *logs, update = on_host(logs)
        if self.in_update and not update["size"]:
            return None
        if torch.is_tensor(grad_norm):
            grad_norm = torch.tensor(update["norm"])
        if self.model.training:
            update_gates(self.get_model(), logs)
        logs = None if logging_outputs is None else logs
        return super()._reduce_and_log_stats(logs, sample_size, grad_norm)

    def _aggregate_logging_outputs(self, logging_outputs, *numbers, ignore=False):
        """As fairseq's; a rank whose batches all ran out of memory contributes zeros."""
        if self.in_update:
            reduction.send_rest(self.model)
        if logging_outputs:
            self.known_logs = logging_outputs[:1]
        elif not self.known_logs:
            rank = self.data_parallel_rank
            raise UsageError(f"rank {rank} is out of memory: {self._smaller_batch()}")
        ignore = ignore or not logging_outputs
        return super()._aggregate_logging_outputs(
            self.known_logs if ignore else logging_outputs, *numbers, ignore=ignore
        )

    def clip_grad_norm(self, clip_norm):
        """Clip by the gradient norm over the experts of all ranks."""
        if self.expert_placement is None:
            return super().clip_grad_norm(clip_norm)
        placements = [
            experts.placement
            for experts in transformer.experts_of(self.get_model()).values()
            for parameter in experts.parameters()
            if parameter.requires_grad
        ]
        if not placements:  # --freeze
            return super().clip_grad_norm(clip_norm)
        return self.optimizer.clip_grad_norm(clip_norm, aggregate_norm_fn=ExpertNorm(placements))

    def _log_oom(self, exc):
        """As fairseq's, which then skips the batch; raises UsageError if other ranks wait for it."""
        super()._log_oom(exc)
        self.lacks_memory = True
        which = "" if self.in_update else "_valid"
        blocks = transformer.moe_blocks(self.get_model()).values()
        back_end = self.cfg.distributed_training.ddp_backend
        others_wait = {  # for this rank's tokens, counts or gradients
            "--expert-parallel": self.expert_placement is not None,
            "--moe-balance-over update": any(b.config.balance_over == "update" for b in blocks),
            f"--ddp-backend {back_end}": self.in_update and back_end not in launch.SUPPORTS_EXPERTS,
        }
        name = next((flag for flag, wait in others_wait.items() if wait), None)
        if name and self.data_parallel_world_size > 1:
            raise UsageError(
                f"rank {self.data_parallel_rank} is out of memory with {name}: {self._smaller_batch(which)}"
            ) from exc


def excluding_dummies(train_step: Callable) -> Callable:
    """A task's ``train_step``, with zeros in the log of a batch whose gradient is ignored."""

    @functools.wraps(train_step)
    def excluding(*arguments, ignore_grad=False, **options):
        loss, size, log = train_step(*arguments, ignore_grad=ignore_grad, **options)
        return (loss, size * 0, _zeros_like(log)) if ignore_grad else (loss, size, log)

    return excluding


def _zeros_like(value):
    if isinstance(value, Mapping):
        return {key: _zeros_like(each) for key, each in value.items()}
    numbers = Tensor | numpy.ndarray | numpy.number | int | float
    return value * 0 if isinstance(value, numbers) else value
