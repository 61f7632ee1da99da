"""Options of ``fairseq-train`` that do not go with experts, and the reason why."""

import logging
from types import ModuleType

from smoe_fairseq.distributed.agree import several
from smoe_fairseq.system.errors import UsageErrorOfAll, checks_first

logger = logging.getLogger(__name__)
KNOWS_EXPERTS = ("legacy_ddp", "no_c10d")  # the second is the older name of the first


def check_before_all(utils: ModuleType) -> None:
    """Before the model is built, what goes with no experts, spread over processes or not."""
    utils.call_main = checks_first(utils.call_main, _check_all)


def _check_all(cfg) -> None:
    _expect_dropped_layers(cfg)
    if _has_experts(cfg.model):
        _check_back_end(cfg)
        _check_criterion(cfg)


def _check_back_end(cfg) -> None:
    if cfg.distributed_training.ddp_backend == "fully_sharded":
        raise UsageErrorOfAll(
            "--ddp-backend fully_sharded does not go with experts, whose parameters it would flatten; "
            "use --ddp-backend legacy_ddp, with --expert-parallel and --zero-sharding os where memory "
            "is short"
        )


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
    ours = "--criterion smoe_label_smoothed_cross_entropy"
    for flag, needs_it in (
        ("--moe-balance bias", getattr(cfg.model, "moe_balance", "") == "bias"),
        ("--moe-balance-over update", getattr(cfg.model, "moe_balance_over", "") == "update"),
        ("--smoe-capacity-budget", bool(getattr(cfg.model, "smoe_capacity_budget", 0))),
    ):
        if needs_it:
            raise UsageErrorOfAll(
                f"{flag} with --criterion {name}, by which it would have no effect; expected {ours}"
            )
    logger.warning(
        "--criterion %s has no loss that keeps the experts equally busy, and its log nothing of them; "
        "expected %s",
        *(name, ours),
    )


def _has_experts(model) -> bool:
    from smoe_fairseq.models.moe_options import MoEOptions

    sides = [side for side in ("encoder", "decoder") if hasattr(model, f"{side}_moe_freq")]
    return any(MoEOptions.moe_freq_of(model, side) > 0 for side in sides)


def check_language_pairs(cfg, model) -> None:
    """Raise UsageErrorOfAll where gradients of a model per language pair would not be summed over processes.

    Its task runs the models of the pairs, past what fairseq has wrapped around all of them. Only the one
    back end that sums after the backward pass sees their gradients; on a CPU the others say nothing.
    """
    from fairseq.models import FairseqMultiModel

    backend = str(cfg.distributed_training.ddp_backend)
    if several() and isinstance(model, FairseqMultiModel) and backend not in KNOWS_EXPERTS:
        raise UsageErrorOfAll(
            f"--ddp-backend {backend} with a model per language pair: it would leave each process its own "
            "gradients; use --ddp-backend legacy_ddp"
        )


def check_options(cfg) -> None:
    """Raise UsageErrorOfAll with one sentence that names the flag, before anything is trained.

    Args:
        cfg: fairseq's ``FairseqConfig`` of a run with more than one process and ``--expert-parallel``.
    """
    distributed, common = cfg.distributed_training, cfg.common
    if str(distributed.ddp_backend) not in KNOWS_EXPERTS:
        raise UsageErrorOfAll(
            f"--ddp-backend {distributed.ddp_backend} with --expert-parallel: it would mix the experts "
            "of different processes; use --ddp-backend legacy_ddp"
        )
    if common.fp16 and not (common.fp16_no_flatten_grads or common.memory_efficient_fp16):
        raise UsageErrorOfAll(
            "--fp16 with --expert-parallel: flattened gradients mix experts with shared parameters; "
            "add --fp16-no-flatten-grads or use --memory-efficient-fp16"
        )
    if common.amp:
        raise UsageErrorOfAll(
            "--amp with --expert-parallel: a process would skip an overflow of its own experts alone; "
            "use --bf16, or --fp16 with --fp16-no-flatten-grads"
        )
    if common.model_parallel_size > 1 or distributed.pipeline_model_parallel:
        raise UsageErrorOfAll("--expert-parallel does not go with model or pipeline parallelism")
    if cfg.optimization.use_bmuf:
        raise UsageErrorOfAll(
            "--use-bmuf with --expert-parallel: it would average different experts"
        )
    if cfg.checkpoint.write_checkpoints_asynchronously:
        raise UsageErrorOfAll(
            "--write-checkpoints-asynchronously with --expert-parallel: the files of all processes "
            "have to be complete at the same time; leave it out"
        )
