"""One sentence for values of fairseq's own options that it takes unseen, and that end in stack traces.

For fairseq 0.12.2 on any Python. Some end after minutes, as an iterator with a negative length, say.
"""

import functools
from collections.abc import Callable, Iterator
from types import ModuleType

from smoe_fairseq.system.errors import UsageError, checks_first

from .literal_eval import evaluate

_LARGEST = 2**63 - 1  # of what becomes a C integer
_RANGES = {  # option: lowest and highest value
    "common.seed": (0, 2**32 - 1),
    "common.log_interval": (1, _LARGEST),
    "dataset.num_workers": (0, _LARGEST),
    "dataset.batch_size": (-1, _LARGEST),  # -1: no limit
    "dataset.batch_size_valid": (-1, _LARGEST),
    "dataset.required_batch_size_multiple": (1, _LARGEST),
    "distributed_training.distributed_world_size": (1, _LARGEST),
}
_LISTS = {"optimization.update_freq": 1, "optimization.lr": 0}  # option: lowest of its values


def name_bad_values(utils: ModuleType) -> None:
    utils.call_main = checks_first(utils.call_main, _check)
    utils._infer_single_node_init = _name_missing_devices(utils._infer_single_node_init)


def _check(cfg) -> None:
    for sentence in _faults(cfg):
        raise UsageError(sentence)


def _faults(cfg) -> Iterator[str]:
    from omegaconf import OmegaConf

    for name, (lowest, highest) in _RANGES.items():
        value = OmegaConf.select(cfg, name)
        if value is not None and not lowest <= value <= highest:
            limit = f" and at most {highest}" if value > highest else ""
            yield f"{_flag(name)} {value}: expected a whole number of at least {lowest}{limit}"
    for name, lowest in _LISTS.items():
        values = OmegaConf.select(cfg, name)
        if values is not None and (not values or not min(values) >= lowest):
            given = ",".join(map(str, values)) or "''"
            numbers = f"a number of at least {lowest}, or one for each epoch"
            yield f"{_flag(name)} {given}: expected {numbers}"
    betas = OmegaConf.select(cfg, "optimizer.adam_betas")
    if betas is not None and not _are_betas(betas):
        yield f"--adam-betas {betas}: expected two numbers from 0 to below 1, as in '(0.9, 0.98)'"
    if cfg.optimizer is not None and _flattens_without_gpu(cfg.common):
        yield (
            "--fp16: flattened gradients need a GPU; expected --fp16-no-flatten-grads beside it, "
            "--memory-efficient-fp16 or --bf16 in its place, or none of these"
        )


def _flattens_without_gpu(common) -> bool:
    import torch

    flattens = common.fp16 and not (common.memory_efficient_fp16 or common.fp16_no_flatten_grads)
    return flattens and not common.tpu and (common.cpu or not torch.cuda.is_available())


def _flag(name: str) -> str:
    return "--" + name.partition(".")[2].replace("_", "-")


def _are_betas(value) -> bool:
    try:
        first, second = evaluate(value) if isinstance(value, str) else value
        return 0 <= first < 1 and 0 <= second < 1
    except (UsageError, TypeError, ValueError):
        return False


def _name_missing_devices(start: Callable) -> Callable:
    """Of a run that fairseq itself would start a process per GPU for."""

    @functools.wraps(start)
    def checked(cfg):
        import torch

        wanted, there = cfg.distributed_world_size, torch.cuda.device_count()
        if wanted > there:
            raise UsageError(
                f"--distributed-world-size {wanted}: expected at most this machine's {there} GPUs; without "
                f"GPUs, start --cpu by torchrun --nproc-per-node {wanted} --no-python fairseq-train ..."
            )
        return start(cfg)

    return checked
