"""A sentence for what ``--zero-sharding os`` lacks, and no error where a single process has nothing to share.

For fairseq 0.12.2 on any torch. Each process keeps the optimizer's state of a part of the parameters, by
fairscale, which fairseq does not install: without it, with flattened fp16 gradients or with BMUF training
ends in a stack trace once the model has been built; so it does with one process ("Default process group has
not been initialized").
"""

import functools
import os
import warnings
from types import ModuleType

from smoe_fairseq.system.errors import UsageErrorOfAll, checks_first


def name_missing_fairscale(utils: ModuleType) -> None:
    # Of torch's older names, some lines at the start of every command once fairscale is installed.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"fairscale\.")
    utils.call_main = checks_first(utils.call_main, _check)


def leave_one_process_whole(shard: ModuleType) -> None:
    import torch.distributed as dist

    original = shard.shard_

    @functools.wraps(original)
    def shard_(optimizer, group):
        if dist.is_initialized():
            original(optimizer, group)

    shard.shard_ = shard_


def _check(cfg) -> None:
    """Raise UsageErrorOfAll for what no process can shard."""
    if cfg.distributed_training.zero_sharding != "os":
        return
    from fairseq.optim import shard

    # torchrun says how many there are by the environment, which fairseq has not read yet.
    several = max(
        cfg.distributed_training.distributed_world_size, int(os.environ.get("WORLD_SIZE", 1))
    )
    if several > 1 and not shard._has_fairscale:
        raise UsageErrorOfAll(
            "--zero-sharding os needs the package fairscale: pip install fairscale, or leave the flag out"
        )
    if cfg.optimization.use_bmuf:
        raise UsageErrorOfAll(
            "--zero-sharding os does not go with --use-bmuf, whose processes have parameters of their own"
        )
    common = cfg.common
    if common.fp16 and not (
        common.memory_efficient_fp16 or common.memory_efficient_bf16 or common.fp16_no_flatten_grads
    ):
        raise UsageErrorOfAll(
            "--zero-sharding os with --fp16: flattened gradients are one parameter, which cannot be shared "
            "out; add --fp16-no-flatten-grads or use --memory-efficient-fp16"
        )
