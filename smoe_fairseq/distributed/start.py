"""How the processes of ``fairseq-train`` begin and end: together.

Kept light: a process that fairseq spawns imports this file before anything else of the plugin.
"""

import inspect
import os
from types import ModuleType

from smoe_fairseq.system.errors import ends_with_sentence

_fairseqs = []  # its own function, which ours takes the place of


def start_together(utils: ModuleType) -> None:
    # Without what ends it with a sentence: ours does so, after it has told the others.
    _fairseqs.append(inspect.unwrap(utils.distributed_main))
    utils.distributed_main = distributed_main


@ends_with_sentence
def distributed_main(i, main, cfg, kwargs):
    """As fairseq's: ``main`` in this process of several; with sharded experts, on a lifeline.

    fairseq hands it to the processes that it spawns, which find it by this file's name.
    """
    import fairseq.distributed.utils  # noqa: F401  (in a spawned process the plugin registers now)
    import torch.distributed as dist

    from smoe_fairseq.distributed import lifeline
    from smoe_fairseq.distributed.options import check_options
    from smoe_fairseq.system.errors import UsageErrorOfAll

    if getattr(getattr(cfg, "model", None), "expert_parallel", False):
        check_options(cfg)  # before fairseq wraps anything
        then = kwargs.get("after_distributed_init_fn")

        def after_init(cfg):
            lifeline.start(cfg)
            return then(cfg) if then else cfg

        kwargs = {**kwargs, "after_distributed_init_fn": after_init}
    reason = ""
    try:
        return _fairseqs[0](i, main, cfg, kwargs)
    except UsageErrorOfAll:
        raise
    except BaseException as error:
        # A DistNetworkError in newer torch, in 2.6 any RuntimeError.
        if isinstance(error, RuntimeError) and "EADDRINUSE" in str(error):
            raise _port_in_use(cfg) from None
        words = str(error).strip().partition("\n")[0]
        reason = f"process {dist.get_rank() if dist.is_initialized() else '?'} has ended: "
        reason += words or type(error).__name__
        raise
    finally:
        lifeline.close(reason)


def _port_in_use(cfg) -> Exception:
    from smoe_fairseq.system.errors import UsageErrorOfAll

    where = os.environ.get("MASTER_PORT") or cfg.distributed_training.distributed_init_method
    return UsageErrorOfAll(
        f"MASTER_PORT {where} is in use by another program on this machine: choose another one "
        "(MASTER_PORT, or torchrun --master-port), the same for all processes"
    )
