"""Refuses invalid values that fairseq accepts for its own options.

For fairseq 0.12.2 on any Python. A negative ``--max-update`` saves an untrained model, a limit of NaN is
never reached, and a mistyped ``--restore-file`` trains from the beginning.
"""

import json
import logging
import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from smoe_fairseq.errors import UsageError, nearest

from .checkpoint_names import newest_checkpoint, rank_files
from .patches import is_fairseq_command
from .replacing import patches
from .safe_load import check_exists, evaluate

logger = logging.getLogger(__name__)

_MAX_INT = 2**63 - 1
_BOUNDS = {  # lowest and highest values of options, or of the elements if an option is a list
    (0, 2**32 - 1): "common.seed",
    (0.01, math.inf): "task.sampling_temperature",
    (-1, _MAX_INT): "dataset.batch_size dataset.batch_size_valid",  # -1: no limit
    (0, _MAX_INT): "dataset.num_workers optimization.max_epoch optimization.max_update "
    "lr_scheduler.warmup_updates",
    (1, _MAX_INT): "common.log_interval dataset.max_tokens dataset.max_tokens_valid "
    "dataset.required_batch_size_multiple dataset.required_seq_len_multiple "
    "dataset.validate_interval checkpoint.save_interval distributed_training.distributed_world_size "
    "optimization.update_freq generation.beam generation.nbest task.virtual_epoch_size",
    (-1e6, 1e6): "generation.lenpen generation.unkpen generation.temperature",
    (0, math.inf): "optimization.clip_norm optimization.lr optimization.stop_time_hours "
    "optimizer.adam_eps optimizer.weight_decay generation.max_len_a",
}
_DICTIONARIES = {  # how they are read: an example for a shell, and the options
    evaluate: (
        "\"{'name': 0.5}\"",
        "common_eval.model_overrides checkpoint.optimizer_overrides lr_scheduler.epoch2lr "
        "lr_scheduler.update2lr",
    ),
    json.loads: ("'{\"name\": 0.5}'", "task.eval_bleu_args task.eval_bleu_detok_args"),
}


@patches("fairseq.dataclass.utils:convert_namespace_to_omegaconf")
def check_generation(original, args):
    """For commands that do not use `call_main`, such as ``fairseq-generate``, and what precedes it."""
    import torch

    cfg = original(args)
    if is_fairseq_command() and cfg.get("optimizer") is None:
        check_options(cfg)
    elif is_fairseq_command() and cfg.common.profile and not torch.cuda.is_available():
        raise UsageError("--profile: expected a machine with a GPU")
    return cfg


@patches("fairseq.distributed.utils:call_main")
def check_values(call_main, cfg, *others, **options):
    check_options(cfg)
    import torch

    distributed, common = cfg.distributed_training, cfg.common
    on_cpu = not common.tpu and (common.cpu or not torch.cuda.is_available())
    works = common.memory_efficient_fp16 or common.fp16_no_flatten_grads
    if on_cpu and common.fp16 and not works and cfg.get("optimizer"):
        raise UsageError("--fp16 on a CPU: expected --fp16-no-flatten-grads with it, or --bf16")
    spawns = not (distributed.distributed_no_spawn or common.tpu or torch.cuda.device_count())
    method, port = distributed.distributed_init_method, distributed.distributed_port
    several = distributed.distributed_world_size > 1 and "RANK" not in os.environ
    in_slurm = "SLURM_STEP_NODELIST" in os.environ or "SLURM_JOB_NODELIST" in os.environ
    if several and port > 0 and not (method or in_slurm):
        raise UsageError(f"--distributed-port {port}: expected --distributed-init-method, or SLURM")
    if spawns and (method or several and port <= 0):
        raise UsageError(
            f"--distributed-{'init-method' if method else 'world-size'}: fairseq starts a process for each "
            "GPU, and this machine has none; expected torchrun, or --distributed-no-spawn with a rank"
        )
    return call_main(cfg, *others, **options)


def check_options(cfg) -> None:
    """Raise UsageError for invalid values in a config of fairseq."""
    for name, (lowest, highest) in ((n, b) for b, names in _BOUNDS.items() for n in names.split()):
        value = _value(cfg, name)
        values = [value] if isinstance(value, int | float) else value
        if values is not None and not (values and all(lowest <= v <= highest for v in values)):
            shown = value if values is not value else ",".join(map(str, values)) or "''"
            top = f" and at most {highest}" if values and max(values) > highest else ""
            raise UsageError(f"{_flag(name)} {shown}: expected a number of at least {lowest}{top}")
    best, beam = (_value(cfg, f"generation.{name}") for name in ("nbest", "beam"))
    if best is not None and best > beam:
        raise UsageError(f"--nbest {best}: expected at most --beam {beam}")
    window, sample = _value(cfg, "eval_lm.context_window"), _value(cfg, "task.tokens_per_sample")
    if window and window >= sample:
        raise UsageError(f"--context-window {window}: expected below --tokens-per-sample {sample}")
    scheduler, warm_up = (_value(cfg, f"lr_scheduler.{x}") for x in ("_name", "warmup_updates"))
    if scheduler == "inverse_sqrt" and not warm_up:
        raise UsageError(f"--warmup-updates 0 with --lr-scheduler {scheduler}: expected 1 or more")
    for option in ("adam_betas", "adamax_betas", "lamb_betas", "adafactor_eps"):
        pair = _value(cfg, name := f"optimizer.{option}")
        if pair is not None and not _is_pair(pair):
            raise UsageError(f"{_flag(name)} {pair}: expected two numbers below 1, '(0.9, 0.98)'")
    for read, (example, names) in _DICTIONARIES.items():
        for name in names.split():
            text = _value(cfg, name)
            found = _literal(text, read) if isinstance(text, str) else {}
            if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
                raise UsageError(f"{_flag(name)} {text}: expected a dictionary, as {example}")
    subset = _value(cfg, "dataset.valid_subset")
    if _value(cfg, "dataset.combine_valid_subsets") and subset != "valid":
        raise UsageError(f"--valid-subset {subset}: --combine-valid-subsets expects valid")
    metric = _value(cfg, "checkpoint.best_checkpoint_metric")
    if metric in ("bleu", "chrf", "accuracy"):
        translates = metric == "accuracy" or _value(cfg, "criterion.validate_sentences")
        if metric == "bleu":
            translates = translates or _value(cfg, "task.eval_bleu") or not _is_fairseqs(cfg.task)
        maximizes = _value(cfg, "checkpoint.maximize_best_checkpoint_metric")
        for flags, are_set in (
            (f"--validate-sentences{' or --eval-bleu' * (metric == 'bleu')}", translates),
            ("--maximize-best-checkpoint-metric", maximizes),
        ):
            if not are_set:
                raise UsageError(f"--best-checkpoint-metric {metric}: expected it with {flags}")
    if cfg.get("optimizer") is not None:
        _check_start(cfg.checkpoint)


def _check_start(checkpoint) -> None:
    """Raise UsageError for training from a checkpoint that is none; fairseq would silently start anew."""
    for option in ("finetune_from_model", "continue_once"):
        start = getattr(checkpoint, option)
        if start and os.path.isdir(start):
            flag = _flag(f"checkpoint.{option}")
            raise UsageError(f"{flag} {start} is a folder: expected a checkpoint in it")
    if rank_files(checkpoint.finetune_from_model or ""):
        check_exists(checkpoint.finetune_from_model)
    if not (folder := checkpoint.save_dir):
        raise UsageError("--save-dir is empty: expected a folder")
    last = os.path.join(folder, "checkpoint_last.pt")
    if checkpoint.continue_once and not (os.path.exists(last) or rank_files(last)):
        check_exists(checkpoint.continue_once)
    _check_restored(checkpoint.restore_file, folder)
    if is_fairseq_command():  # programs that call fairseq may train anew in a folder
        _check_replaced(checkpoint, Path(folder))


def _check_replaced(checkpoint, folder: Path) -> None:
    """Raise UsageError if training would start anew and replace checkpoints."""
    for file in folder.glob("checkpoint*.pt"):
        if not file.is_file():
            raise UsageError(f"{file} is a folder or a dead link: expected a checkpoint")
    others = (checkpoint.finetune_from_model, checkpoint.continue_once, checkpoint.no_save)
    if checkpoint.restore_file == "checkpoint_last.pt" and not any(others):
        if newest := newest_checkpoint(folder):
            raise UsageError(
                f"--save-dir {folder} has {newest.name}, which a new training would replace, and no "
                f"checkpoint_last.pt: expected --restore-file {newest} to resume, or another folder"
            )


def _check_restored(file: str, save_dir: str) -> None:
    """Raise UsageError if ``--restore-file`` is missing and its name is probably mistyped.

    fairseq's users write ``--restore-file x.pt`` for a new run, also beside the checkpoints of another.
    """
    if file == "checkpoint_last.pt" or "://" in file or os.path.isfile(file) or rank_files(file):
        return
    if os.path.dirname(file) or os.path.exists(file):
        raise UsageError(
            f"--restore-file {file} is missing, a folder, or in one that cannot be read"
        )
    for folder in filter(os.path.isdir, (".", save_dir)):
        if near := nearest(file, os.listdir(folder)):
            near = os.path.join(folder, near)
            raise UsageError(f"--restore-file {file} is missing; did you mean {near}?")
    if Path(file).name != "x.pt" and any(Path(save_dir).glob("checkpoint*.pt")):
        raise UsageError(f"--restore-file {file} is missing, and {save_dir} has other checkpoints")
    logger.warning("--restore-file %s is missing: a new run begins", file)


def _value(cfg, name: str):
    """The value of an option ``group.name``, or None; groups are configs or namespaces."""
    group, _, option = name.partition(".")
    return getattr(cfg.get(group), option, None)


def _is_fairseqs(task) -> bool:
    """Whether a task is none of the user's, which may compute BLEU otherwise."""
    from fairseq.tasks import TASK_REGISTRY

    kind = TASK_REGISTRY.get(getattr(task, "_name", None))
    return kind is not None and kind.__module__.startswith("fairseq.")


def _flag(name: str) -> str:
    return "--" + name.partition(".")[2].replace("_", "-")


def _literal(value: str, read: Callable = evaluate):
    """The value of a literal; None if the text is not a literal."""
    with suppress(ValueError):
        return read(value)


def _is_pair(value) -> bool:
    try:
        first, second = _literal(value) if isinstance(value, str) else value
        return 0 <= first < 1 and 0 <= second < 1
    except (TypeError, ValueError):
        return False
