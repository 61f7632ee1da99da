"""Experts spread over the processes of ``fairseq-train`` (``--expert-parallel``).

The modules do the exchange of tokens (modules/placement.py, modules/dispatch.py). What fairseq's trainer
has to know of it is here, a file for each concern; each has a function that is called with the fairseq
module it adds to, and leaves runs without sharded experts as they are.
"""

from smoe_fairseq.compat import when_imported
from smoe_fairseq.distributed.gradients import norm_over_all_experts, sum_over_replicas
from smoe_fairseq.distributed.lifeline import end_together
from smoe_fairseq.distributed.saving import save_sets
from smoe_fairseq.distributed.trainer import tell_trainer

ADDITIONS = (
    ("fairseq.utils", norm_over_all_experts),
    ("fairseq.distributed.legacy_distributed_data_parallel", sum_over_replicas),
    ("fairseq.distributed.utils", end_together),
    ("fairseq.checkpoint_utils", save_sets),
    ("fairseq.trainer", tell_trainer),
)


def install() -> None:
    for module, addition in ADDITIONS:
        when_imported(module, addition)
