"""Opens fairseq's door to fairscale's FullyShardedDataParallel, and says that it leads to a GPU.

For fairseq 0.12.2 with fairscale 0.4.13, which has no ``fairscale.utils.testing``: from there fairseq takes
the group of a single process for ``--ddp-backend fully_sharded`` ("No module named 'fairscale.utils'").
With several processes, or once that is there, a CPU ends it in a stack trace of torch's: fairscale computes
on GPUs alone. What comes after that has not been tried.
"""

import sys
from types import ModuleType

from smoe_fairseq.system.errors import UsageErrorOfAll, checks_first

_GONE = "fairscale.utils.testing"


class DummyProcessGroup:
    """As fairscale's own, which it has moved among its tests."""

    def __init__(self, rank: int, size: int):
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def find_group_of_one(fully_sharded_data_parallel: ModuleType) -> None:
    stand_in = ModuleType(_GONE)
    stand_in.DummyProcessGroup = DummyProcessGroup
    sys.modules.setdefault(_GONE, stand_in)


def refuse_fully_sharded_on_cpu(utils: ModuleType) -> None:
    utils.call_main = checks_first(utils.call_main, _check)


def _check(cfg) -> None:
    if cfg.distributed_training.ddp_backend == "fully_sharded" and _without_gpu(cfg.common):
        raise UsageErrorOfAll(
            "--ddp-backend fully_sharded needs GPUs, and no --cpu; use --ddp-backend legacy_ddp, with "
            "--zero-sharding os where memory is short"
        )


def _without_gpu(common) -> bool:
    import torch

    return common.cpu or not torch.cuda.is_available()
