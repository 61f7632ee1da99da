"""Steps and checks of all ranks before training starts."""

import inspect
import logging
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlparse

import torch.distributed as dist
from omegaconf import OmegaConf

from smoe_fairseq import locks
from smoe_fairseq.checkpoints import trained_with  # which may be the first to import fairseq
from smoe_fairseq.compat.replacing import replaces
from smoe_fairseq.ending import end_with_parent, restoring_signals
from smoe_fairseq.errors import UsageError, ends_with_sentence
from smoe_fairseq.flags import flag_of, values_of
from smoe_fairseq.modules.gates import GATES
from smoe_fairseq.training import screen


def is_distributed() -> bool:
    """Whether this run has several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def broadcast(value):
    """Rank 0's value, on all ranks."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def all_gather(value) -> list:
    """The values of all ranks, on all ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def refuse_together(message: str | None) -> None:
    """Raise UsageError, on all ranks, with the first rank's message; None is no message."""
    if is_distributed():
        message = next(filter(None, all_gather(message)), None)
    if message:
        raise UsageError(message)


# A run locks the folder that it saves in.


def folder_identity(folder: Path | str) -> tuple[int, int] | None:
    """Distinguishes a folder from a later one of the same name; None if it is missing."""
    try:
        state = os.stat(folder)
    except OSError:
        return None
    return state.st_dev, state.st_ino


def hold_folder(checkpoint) -> None:
    """Raise UsageError, on all ranks, if another run saves in ``--save-dir``.

    Rank 0 holds the lock: if each machine has its own disk, it is rank 0 that saves.

    Args:
        checkpoint: fairseq's ``CheckpointConfig``.
    """
    message = None
    folder = Path(checkpoint.save_dir)
    # fairseq has created the folder, unless nothing will be saved.
    if not (is_distributed() and dist.get_rank()) and not checkpoint.no_save and folder.is_dir():
        try:
            locks.lock_folder(folder)
        except UsageError as error:
            message = str(error)
    refuse_together(message)


# Options of ``fairseq-train`` that do not work with experts.

logger = logging.getLogger(__name__)
SUPPORTS_EXPERTS = ("legacy_ddp", "no_c10d")  # the second is the older name of the first


@replaces("fairseq.distributed.utils:call_main")
def check_before_training(call_main, cfg, *others, **options):
    """Check options, before the model is built, that do not work with experts, sharded or not."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun ends its ranks, unless it is killed itself
        end_with_parent()
    screen.begin(cfg)
    _check_packages(cfg)
    if cfg.common.cpu and cfg.distributed_training.distributed_backend == "nccl":
        cfg.distributed_training.distributed_backend = "gloo"  # fairseq's default is for GPUs only
    _expect_dropped_layers(cfg)
    own = getattr(cfg.criterion, "_name", None) == "smoe_label_smoothed_cross_entropy"
    # Of models with our options; fairseq-validate does not know the model yet.
    if own and hasattr(cfg.model, "moe_gate"):
        _check_weights(cfg)
    if _has_experts(cfg.model):
        if cfg.distributed_training.ddp_backend == "fully_sharded":
            raise UsageError(
                "--ddp-backend fully_sharded with experts: use legacy_ddp, with --expert-parallel and "
                "--zero-sharding os"
            )
        _check_criterion(cfg)
    with restoring_signals():  # in a program that trains, and then does something else
        return call_main(cfg, *others, **options)


_PACKAGES = {  # options of fairseq that need one
    "write_checkpoints_asynchronously": "iopath",
    "tpu": "torch_xla",
}


def _check_packages(cfg) -> None:
    for option, package in _PACKAGES.items():
        if (cfg.common.get(option) or cfg.checkpoint.get(option)) and find_spec(package) is None:
            raise UsageError(f"{flag_of(option)} needs: pip install {package}")


def _expect_dropped_layers(cfg) -> None:
    """Keep torch's wrapper from waiting for gradients of layers that LayerDrop skips."""
    distributed = cfg.distributed_training
    if distributed.ddp_backend not in ("pytorch_ddp", "c10d") or distributed.find_unused_parameters:
        return
    for side in ("encoder", "decoder"):
        if getattr(cfg.model, f"{side}_layerdrop", 0):
            distributed.find_unused_parameters = True
            logger.info(f"--{side}-layerdrop: --find-unused-parameters is on")
            return


def _check_weights(cfg) -> None:
    """Refuse weights, except for 0 and the defaults, of losses that an option or a gate adds.

    Those of the balance loss and the z-loss, and all in a dense model, get a warning, since a data set's file
    may set them for all methods.
    """
    from fairseq.criterions import CRITERION_DATACLASS_REGISTRY

    from smoe_fairseq.models.options import DecoderOptions

    model, has_experts = DecoderOptions.of(cfg.model), _has_experts(cfg.model)
    default = CRITERION_DATACLASS_REGISTRY[cfg.criterion._name]
    kinds = [name for name, kind in GATES.items() if kind.has_entropy_loss]
    if (kind := GATES.get(str(model.moe_gate))) is None:  # which is refused later
        return
    learns = (kind.has_balance_loss or kind.in_decoder) and model.moe_balance == "loss"
    for name, has_loss, expected in (
        ("moe_gate_loss_wt", learns, "a --moe-gate with a balance loss, and --moe-balance loss"),
        ("moe_z_loss_wt", kind.has_logits, "a --moe-gate with logits"),
        ("moe_entropy_loss_wt", model.moe_gate in kinds, f"--moe-gate {' or '.join(kinds)}"),
        ("moe_losses", True, ""),
        ("cmr_gate_loss_wt", model.moe_cmr, "--moe-cmr"),
        ("cmr_gate_loss_p", model.moe_cmr, "--moe-cmr"),
        ("smoe_capacity_budget_wt", model.smoe_capacity_budget, "--smoe-capacity-budget"),
    ):
        value = getattr(cfg.criterion, name)
        if has_loss and has_experts or value in (0, getattr(default, name)):
            continue
        given, expected = f"{flag_of(name)} {value}", expected if has_experts else "experts"
        if has_experts and name not in ("moe_gate_loss_wt", "moe_z_loss_wt"):
            raise UsageError(f"{given}: expected it with {expected}")
        logger.warning(f"{given} has no effect; expected it with {expected}")


def _check_criterion(cfg) -> None:
    """Refuse, or warn about, a criterion of fairseq, which lacks the gates' losses and statistics."""
    from fairseq.criterions import CRITERION_REGISTRY

    name = getattr(cfg.criterion, "_name", None)
    kind = CRITERION_REGISTRY.get(name)
    # A user's criterion may contain ours, as may fairseq's composite_loss.
    if kind is None or not kind.__module__.startswith("fairseq.") or name == "composite_loss":
        return
    ours, gate = "--criterion smoe_label_smoothed_cross_entropy", getattr(cfg.model, "moe_gate", "")
    for flag, needs_it in (
        ("--moe-balance bias", getattr(cfg.model, "moe_balance", "") == "bias"),
        (f"--moe-gate {gate}", gate in GATES and GATES[gate].learns_by_counts),
        ("--moe-balance-over update", getattr(cfg.model, "moe_balance_over", "") == "update"),
        ("--smoe-capacity-budget", bool(getattr(cfg.model, "smoe_capacity_budget", 0))),
    ):
        if needs_it:
            raise UsageError(f"{flag} with --criterion {name} has no effect; expected {ours}")
    if not name.startswith(("cross_entropy", "label_smoothed_cross_entropy")):
        raise UsageError(f"--criterion {name} is for other models: expected {ours}")
    logger.warning(
        "--criterion %s has no loss for load balance, and logs nothing about experts; expected %s",
        *(name, ours),
    )


def _has_experts(model) -> bool:
    from smoe_fairseq.models.options import MoEOptions  # imports fairseq's models

    sides = [side for side in ("encoder", "decoder") if hasattr(model, f"{side}_moe_freq")]
    return any(MoEOptions.moe_freq_of(model, side) > 0 for side in sides)


def check_language_pairs(cfg, model) -> None:
    """Raise UsageError if gradients of a model per language pair would not be summed over ranks.

    The task calls each pair's model directly and so bypasses fairseq's wrapper. Only the back end that sums
    after the backward pass sees the gradients; on a CPU the others silently do not sum them.
    """
    from fairseq.models import FairseqMultiModel

    backend = str(cfg.distributed_training.ddp_backend)
    if (
        is_distributed()
        and isinstance(model, FairseqMultiModel)
        and backend not in SUPPORTS_EXPERTS
    ):
        raise UsageError(f"--ddp-backend {backend} with a model per language pair: use legacy_ddp")


def check_options(cfg) -> None:
    """Raise UsageError for flags that do not work with sharded experts.

    Args:
        cfg: fairseq's ``FairseqConfig`` of a run with several ranks and ``--expert-parallel``.
    """
    distributed, common = cfg.distributed_training, cfg.common
    back_end = str(distributed.ddp_backend)
    flattens = not (common.fp16_no_flatten_grads or common.memory_efficient_fp16)
    instead = "use --fp16-no-flatten-grads or --memory-efficient-fp16"
    asynchronous = cfg.checkpoint.write_checkpoints_asynchronously
    pipeline = common.model_parallel_size > 1 or distributed.pipeline_model_parallel
    for flag, is_set, advice in (
        (f"--ddp-backend {back_end}", back_end not in SUPPORTS_EXPERTS, "use legacy_ddp"),
        ("--fp16", common.fp16 and flattens, instead),
        ("--amp", common.amp, "use --bf16, or --fp16 with --fp16-no-flatten-grads"),
        ("model or pipeline parallelism", pipeline, "leave it out"),
        ("--use-bmuf", cfg.optimization.use_bmuf, "it would average different experts"),
        ("--write-checkpoints-asynchronously", asynchronous, "leave it out"),
    ):
        if is_set:
            raise UsageError(f"{flag} with --expert-parallel: {advice}")


# All ranks have to have the same settings, which are compared at the start.
#
# A rank with another ``--max-update`` or ``--update-freq`` would stop making the collective calls of the
# others, which then wait; one with another ``--lr`` would silently train another model.

# These may differ: a rank's identity, and paths on its machine. Data is compared by content.
MAY_DIFFER = {
    *("distributed_rank", "device_id", "local_rank", "distributed_init_method", "distributed_port"),
    *("distributed_no_spawn", "distributed_num_procs", "nprocs_per_node", "checkpoint_suffix"),
    *("data", "user_dir", "log_file", "tensorboard_logdir", "plasma_path", "num_workers"),
    *("log_interval", "log_format", "no_progress_bar", "wandb_project", "aim_repo", "aim_run_hash"),
}


def check_flags(cfg, task) -> None:
    """Raise UsageError, on all ranks, if one has other flags, dictionaries or data than rank 0."""
    if is_distributed():
        settings = _settings(cfg)
        for name, dictionary in trained_with.dictionary_checksums(task).items():
            settings[f"the {name} dictionary"] = dictionary["sha256"][:12]
        for split, dataset in getattr(task, "datasets", {}).items():
            settings |= _data(split, dataset)
        _compare(settings)


def check_data(split: str, dataset) -> None:
    """Raise UsageError, on all ranks, if one has other data than rank 0."""
    if is_distributed():
        _compare(_data(split, dataset))


def _settings(cfg) -> dict[str, str]:
    """All flags of fairseq's config, whose groups are configs or, for older tasks, namespaces."""
    settings = {}
    for group in cfg.values():
        if OmegaConf.is_config(group):
            group = OmegaConf.to_container(group)
        for name, value in values_of(group).items():
            if name not in MAY_DIFFER and not name.startswith("_"):
                settings.setdefault(flag_of(name), str(value))
    return settings


def _data(split: str, dataset) -> dict[str, str]:
    """The number of sentences, and the lengths of three, of a data set or of each language pair's."""
    parts = getattr(dataset, "datasets", None)
    if isinstance(parts, Mapping):
        pairs = [_data(f"{split} ({name})", part) for name, part in parts.items()]
        return {name: value for pair in pairs for name, value in pair.items()}
    number = len(dataset)
    some = [int(dataset.num_tokens(i)) for i in (0, number // 2, number - 1)] if number else []
    return {f"the data of {split}": f"{number} sentences (tokens of some: {some})"}


def _compare(settings: dict[str, str]) -> None:
    first, *others = all_gather(settings)
    for rank, other in enumerate(others, start=1):
        for name in sorted({*first, *other}):
            if first.get(name) != other.get(name):
                raise UsageError(
                    f"rank {rank} has {name} {other.get(name)}, and rank 0 with {first.get(name)}"
                )


# The start of each rank of ``fairseq-train``.
#
# When a rank ends early, its launcher ends the others (torchrun, fairseq's own spawn, ``srun
# --kill-on-bad-exit``), and gloo and NCCL notice a closed connection.
#
# A process that fairseq spawns imports this file before anything else of the plugin.

_original_main = []  # fairseq's function, which ours replaces
REPORT_SECONDS, TIMEOUT_SECONDS = 30, 600  # between lines about missing ranks; until the end


@replaces("fairseq.distributed.utils:distributed_init")
def start_together(original, cfg):
    store = wait_for_all(getattr(cfg, "distributed_training", cfg))
    rank = original(cfg)
    del store  # torch has its own on the same port now
    return rank


@ends_with_sentence()
def distributed_main(i, main, cfg, kwargs):
    """fairseq's function for one of several ranks, after a check of flags.

    fairseq passes it to spawned processes, which import it from this file.

    Raises:
        UsageError: a flag does not work with sharded experts.
    """
    import fairseq.distributed.utils  # noqa: F401  (registers the plugin in a spawned process)

    if getattr(getattr(cfg, "model", None), "expert_parallel", False):
        check_options(cfg)
    return _original_main[0](i, main, cfg, kwargs)


@replaces("fairseq.distributed.utils")
def use_our_main(utils):
    _original_main.append(inspect.unwrap(utils.distributed_main))
    utils.distributed_main = distributed_main


def wait_for_all(distributed) -> "dist.TCPStore | None":
    """Wait until all ranks have connected; a line every 30 seconds lists the missing ones.

    torch alone would silently wait for half an hour, for example if ranks were started by hand with
    different ports, or if a rank has ended because of its flags.

    Args:
        distributed: fairseq's ``DistributedTrainingConfig``.

    Returns:
        The store over which they connected, to be kept until torch has one; None if a launcher (torchrun)
        watches the ranks, or if they do not use a port.

    Raises:
        UsageError: after ten minutes a rank is missing, or rank 0 has ended.
    """
    address = _master_address(distributed)
    rank, size = distributed.distributed_rank, distributed.distributed_world_size
    if address is None or size < 2 or dist.is_initialized():
        return None
    end = time.monotonic() + TIMEOUT_SECONDS

    def report(missing: str) -> None:
        logger.warning(f"waiting for {missing} at {address[0]}:{address[1]}")
        if time.monotonic() >= end:
            raise UsageError(
                f"{missing} has not connected to {address[0]}:{address[1]} within {TIMEOUT_SECONDS // 60} "
                f"minutes: start all {size} ranks with this address and port"
            )

    interval, store = timedelta(seconds=REPORT_SECONDS), None
    connecting = interval if rank > 0 else timedelta(minutes=5)  # rank 0 connects to itself
    while store is None:
        try:
            store = dist.TCPStore(
                *address, None, rank == 0, connecting, wait_for_workers=False, multi_tenant=True
            )
        except dist.DistNetworkError:
            if rank == 0:  # the port is in use
                raise
            report("rank 0")
    store.set(f"smoe rank {rank}", "")
    missing = [f"smoe rank {other}" for other in range(size)]
    while missing:
        try:
            store.wait(missing, interval)
            missing = []
        except dist.DistNetworkError:
            raise UsageError(
                "rank 0 has ended before all ranks connected: see its output"
            ) from None
        except dist.DistStoreError:  # not yet
            missing = [key for key in missing if not store.check([key])]
            ranks = ", ".join(key.removeprefix("smoe rank ") for key in missing[:10])
            more = ", ..." if len(missing) > 10 else ""
            if missing:
                report(f"rank {ranks}{more}")
    return store


def _master_address(distributed) -> tuple[str, int] | None:
    """Host and port of rank 0; None if torchrun's store, or no port, is used."""
    method = str(distributed.distributed_init_method)
    if method == "env://" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        method = f"tcp://{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        url = urlparse(method)
        return (url.hostname, url.port) if url.scheme == "tcp" and url.port else None
    except ValueError:  # the port is not a number, which torch reports
        return None
