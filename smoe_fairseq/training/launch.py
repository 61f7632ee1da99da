"""Steps and checks of all ranks before training starts."""

import inspect
import logging
import os
import time
from argparse import Namespace
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlparse

import torch.distributed as dist
from omegaconf import OmegaConf

from smoe_fairseq import files
from smoe_fairseq.checkpoints.io import noted
from smoe_fairseq.compat.replacing import replaces
from smoe_fairseq.errors import UsageError, end_with_parent, ends_with_sentence
from smoe_fairseq.modules.gates import GATES
from smoe_fairseq.training import screen


def is_distributed() -> bool:
    """Whether there are other processes in this run."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def broadcast(value):
    """The value of the first process, in all of them."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def all_gather(value) -> list:
    """The values of all processes, in all of them."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# The folder that a run saves in is its own, whatever the number of its processes.


def folder_identity(folder: Path | str) -> tuple[int, int] | None:
    """What tells a folder from another one of its name; None if it is missing."""
    try:
        found = os.stat(folder)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def hold_folder(checkpoint) -> None:
    """Raise UsageError, on all processes, where another run saves in ``--save-dir``.

    The first process holds it, for all: on machines with disks of their own it is the one that saves.
    A run with ``--no-save`` needs none.

    Args:
        checkpoint: fairseq's ``CheckpointConfig``.
    """
    refusal = None
    folder = Path(checkpoint.save_dir)
    # fairseq has made the folder; where it has not, nothing is going to be saved.
    if not (is_distributed() and dist.get_rank()) and not checkpoint.no_save and folder.is_dir():
        try:
            files.lock_folder(folder)
        except UsageError as error:
            refusal = str(error)
    if is_distributed():
        refusal = broadcast(refusal)
    if refusal:
        raise UsageError(refusal)


# Options of ``fairseq-train`` that do not go with experts, and the reason why.

logger = logging.getLogger(__name__)
KNOWS_EXPERTS = ("legacy_ddp", "no_c10d")  # the second is the older name of the first


@replaces("fairseq.distributed.utils:call_main")
def check_before_all(call_main, cfg, *others, **options):
    """Before the model is built, what goes with no experts, spread over processes or not."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun ends its ranks, unless it is killed
        end_with_parent()
    screen.begin(cfg)
    _expect_dropped_layers(cfg)
    if _has_experts(cfg.model):
        if cfg.distributed_training.ddp_backend == "fully_sharded":
            words = "use legacy_ddp, with --expert-parallel and --zero-sharding os"
            raise UsageError(f"--ddp-backend fully_sharded with experts: {words}")
        _check_criterion(cfg)
    return call_main(cfg, *others, **options)


def _expect_dropped_layers(cfg) -> None:
    """Has torch's wrapper not wait for the gradients of layers that LayerDrop has left out."""
    distributed = cfg.distributed_training
    if distributed.ddp_backend not in ("pytorch_ddp", "c10d") or distributed.find_unused_parameters:
        return
    for side in ("encoder", "decoder"):
        if getattr(cfg.model, f"{side}_layerdrop", 0):
            distributed.find_unused_parameters = True
            if distributed.distributed_world_size > 1:
                logger.info(f"--{side}-layerdrop: --find-unused-parameters is on")
            return


def _check_criterion(cfg) -> None:
    """Ours has the losses of the gates, and says how busy the experts are; any other trains without."""
    from fairseq.criterions import CRITERION_REGISTRY

    name = getattr(cfg.criterion, "_name", None)
    kind = CRITERION_REGISTRY.get(name)
    # One of the user's own may have ours inside, as fairseq's composite one may.
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
    logger.warning(
        "--criterion %s has no loss that keeps the experts equally busy, and its log nothing of them; "
        "expected %s",
        *(name, ours),
    )


def _has_experts(model) -> bool:
    from smoe_fairseq.models.options import MoEOptions

    sides = [side for side in ("encoder", "decoder") if hasattr(model, f"{side}_moe_freq")]
    return any(MoEOptions.moe_freq_of(model, side) > 0 for side in sides)


def check_language_pairs(cfg, model) -> None:
    """Raise UsageError where gradients of a model per language pair would not be summed over processes.

    Its task runs the models of the pairs, past what fairseq has wrapped around all of them. Only the one
    back end that sums after the backward pass sees their gradients; on a CPU the others say nothing.
    """
    from fairseq.models import FairseqMultiModel

    backend = str(cfg.distributed_training.ddp_backend)
    if is_distributed() and isinstance(model, FairseqMultiModel) and backend not in KNOWS_EXPERTS:
        raise UsageError(f"--ddp-backend {backend} with a model per language pair: use legacy_ddp")


def check_options(cfg) -> None:
    """Raise UsageError with one sentence that names the flag, before anything is trained.

    Args:
        cfg: fairseq's ``FairseqConfig`` of a run with more than one process and ``--expert-parallel``.
    """
    distributed, common = cfg.distributed_training, cfg.common
    back_end = str(distributed.ddp_backend)
    if back_end not in KNOWS_EXPERTS:
        raise UsageError(f"--ddp-backend {back_end} with --expert-parallel: use legacy_ddp")
    if common.fp16 and not (common.fp16_no_flatten_grads or common.memory_efficient_fp16):
        raise UsageError(
            "--fp16 with --expert-parallel: use --fp16-no-flatten-grads or --memory-efficient-fp16"
        )
    if common.amp:
        raise UsageError(
            "--amp with --expert-parallel: use --bf16, or --fp16 with --fp16-no-flatten-grads"
        )
    if common.model_parallel_size > 1 or distributed.pipeline_model_parallel:
        raise UsageError("--expert-parallel does not go with model or pipeline parallelism")
    if cfg.optimization.use_bmuf:
        raise UsageError("--use-bmuf with --expert-parallel: it would average different experts")
    if cfg.checkpoint.write_checkpoints_asynchronously:
        raise UsageError("--write-checkpoints-asynchronously with --expert-parallel: leave it out")


# All processes of a run have to do the same: asked once at the start, since afterwards they would
# wait.
#
# A process with another ``--max-update`` or ``--update-freq`` stops making the collective calls
# that the others make; one with another ``--lr`` trains another model without a word.

# What may differ: who a process is, and where on its machine things are. Data is compared by its content.
OF_EACH = {
    *("distributed_rank", "device_id", "local_rank", "distributed_init_method", "distributed_port"),
    *("distributed_no_spawn", "distributed_num_procs", "nprocs_per_node", "checkpoint_suffix"),
    *("data", "user_dir", "log_file", "tensorboard_logdir", "plasma_path", "num_workers"),
    *("log_interval", "log_format", "no_progress_bar", "wandb_project", "aim_repo", "aim_run_hash"),
}


def check_flags(cfg, task) -> None:
    """Raise UsageError on all processes where one has other flags or dictionaries than the first."""
    if is_distributed():
        found = _settings(cfg)
        for name, dictionary in noted(task).items():
            found[f"the {name} dictionary"] = dictionary["sha256"][:12]
        for split, dataset in getattr(task, "datasets", {}).items():
            found |= _data(split, dataset)
        _compare(found)


def check_data(split: str, dataset) -> None:
    """The same for data that has been loaded since."""
    if is_distributed():
        _compare(_data(split, dataset))


def _settings(cfg) -> dict[str, str]:
    """All flags of fairseq's config, whose groups are configs or the older flat name spaces."""
    found = {}
    for group in cfg.values():
        if OmegaConf.is_config(group):
            group = OmegaConf.to_container(group)
        values = vars(group) if isinstance(group, Namespace) else group
        if isinstance(values, dict):
            for name, value in values.items():
                if name not in OF_EACH and not name.startswith("_"):
                    found.setdefault(f"--{name.replace('_', '-')}", str(value))
    return found


def _data(split: str, dataset) -> dict[str, str]:
    """Of a data set, or of each language pair's, as many sentences, and as many tokens in some of them."""
    parts = getattr(dataset, "datasets", None)
    if isinstance(
        parts, Mapping
    ):  # which together have an order only as they are divided into batches
        found = (_data(f"{split} ({name})", part) for name, part in parts.items())
        return {name: value for part in found for name, value in part.items()}
    number = len(dataset)
    some = [int(dataset.num_tokens(i)) for i in (0, number // 2, number - 1)] if number else []
    return {f"the data of {split}": f"{number} sentences (tokens of some: {some})"}


def _compare(own: dict[str, str]) -> None:
    first, *others = all_gather(own)
    for rank, other in enumerate(others, start=1):
        for name in sorted({*first, *other}):
            if first.get(name) != other.get(name):
                raise UsageError(
                    f"process {rank} has {name} {other.get(name)}, and process 0 with {first.get(name)}"
                )


# How each process of ``fairseq-train`` begins.
#
# When one ends early, its launcher ends the others (torchrun, fairseq's own spawn, ``srun
# --kill-on-bad-exit``), and gloo and NCCL notice a closed connection.
#
# Kept light: a process that fairseq spawns imports this file before anything else of the plugin.

_original_main = []  # its own function, which ours takes the place of
REPORT_SECONDS, TIMEOUT_SECONDS = 30, 600  # between lines about missing ranks; until the end


@replaces("fairseq.distributed.utils:distributed_init")
def start_together(original, cfg):
    store = wait_for_all(getattr(cfg, "distributed_training", cfg))
    rank = original(cfg)
    del store  # torch has its own on the same port now
    return rank


@ends_with_sentence()
def distributed_main(i, main, cfg, kwargs):
    """As fairseq's: ``main`` in this process of several, whose flags are checked before.

    fairseq hands it to the processes that it spawns, which find it by this file's name.

    Raises:
        UsageError: a flag does not go with sharded experts.
    """
    import fairseq.distributed.utils  # noqa: F401  (in a spawned process the plugin registers now)

    if getattr(getattr(cfg, "model", None), "expert_parallel", False):
        check_options(cfg)  # before fairseq wraps anything
    return _original_main[0](i, main, cfg, kwargs)


@replaces("fairseq.distributed.utils")
def use_our_main(utils):
    _original_main.append(inspect.unwrap(utils.distributed_main))
    utils.distributed_main = distributed_main


def wait_for_all(distributed) -> "dist.TCPStore | None":
    """Wait until all ranks of a run are there; every 30 seconds a line says which are missing.

    torch alone waits for half an hour and says nothing: where ranks that were started by hand have
    different ports, or where one has ended at its flags.

    Args:
        distributed: fairseq's ``DistributedTrainingConfig``.

    Returns:
        The store over which they met, to be kept until torch has one; None where a launcher looks after
        the ranks (torchrun), and where they do not meet at a port.

    Raises:
        UsageError: after ten minutes a rank is missing, or the first one has ended.
    """
    where = _meeting_place(distributed)
    rank, size = distributed.distributed_rank, distributed.distributed_world_size
    if where is None or size < 2 or dist.is_initialized():
        return None
    end = time.monotonic() + TIMEOUT_SECONDS

    def miss(who: str) -> None:
        logger.warning(f"waiting for {who} at {where[0]}:{where[1]}")
        if time.monotonic() >= end:
            raise UsageError(
                f"{who} has not come to {where[0]}:{where[1]} within {TIMEOUT_SECONDS // 60} minutes: start "
                f"all {size} ranks with this address and port"
            )

    news, store = timedelta(seconds=REPORT_SECONDS), None
    while store is None:
        try:
            store = dist.TCPStore(
                *where, None, rank == 0, news, wait_for_workers=False, multi_tenant=True
            )
        except dist.DistNetworkError:
            if rank == 0:  # the port is in use
                raise
            miss("rank 0")
    store.set(f"smoe rank {rank}", "")
    missing = [f"smoe rank {other}" for other in range(1, size)] if rank == 0 else ["smoe all"]
    while missing:
        try:
            store.wait(missing, news)
            missing = []
        except dist.DistNetworkError:
            raise UsageError("rank 0 has ended before all ranks came: see its output") from None
        except dist.DistStoreError:  # not yet
            missing = [key for key in missing if not store.check([key])]
            ranks = ", ".join(key.removeprefix("smoe rank ") for key in missing[:10])
            more = ", ..." if len(missing) > 10 else ""
            if missing:
                miss(f"rank {ranks}{more}" if rank == 0 else "another rank")
    if rank == 0:
        store.set("smoe all", "")
    return store


def _meeting_place(distributed) -> tuple[str, int] | None:
    method = str(distributed.distributed_init_method)
    if method == "env://" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        method = f"tcp://{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        place = urlparse(method)
        return (place.hostname, place.port) if place.scheme == "tcp" and place.port else None
    except ValueError:  # no number; torch says so
        return None
