"""What is added to which module of fairseq."""

from smoe_fairseq.compat import when_imported
from smoe_fairseq.distributed.gradients import norm_over_all_experts, sum_over_replicas
from smoe_fairseq.distributed.loading import load_sets
from smoe_fairseq.distributed.saving import save_sets
from smoe_fairseq.distributed.start import start_together
from smoe_fairseq.distributed.trainer import tell_trainer

ADDITIONS = (
    ("fairseq.utils", norm_over_all_experts),
    ("fairseq.distributed.legacy_distributed_data_parallel", sum_over_replicas),
    ("fairseq.distributed.utils", start_together),
    ("fairseq.checkpoint_utils", save_sets),
    ("fairseq.checkpoint_utils", load_sets),
    ("fairseq.trainer", tell_trainer),
)


def install() -> None:
    for module, addition in ADDITIONS:
        when_imported(module, addition)
