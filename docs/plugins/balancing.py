"""A plugin of one file: two gates that need no balance loss, a branch, and a term of the loss.

Shapes: T tokens, D embedding, E experts that the gate sees, K choices per token.
"""

import torch
from torch import Tensor, nn

from smoe_fairseq.modules.gates import register_gate
from smoe_fairseq.modules.gates.threshold import RunningThreshold
from smoe_fairseq.modules.gates.top_k import TopKGate
from smoe_fairseq.modules.losses import register_loss
from smoe_fairseq.modules.registry import register_branch

# Both choose the best K, without sampling, and have no free experts.
OPTIONS = frozenset({"top_k", "capacity_factor", "eval_capacity_factor", "gate_normalization"})


@register_gate("sinkhorn")
class SinkhornGate(TopKGate):
    """In training, the best K after making all experts equally likely in the batch (Clark et al. 2022)."""

    summary = "the k best of scores that a batch balances"
    options = OPTIONS | {"drop_order"}
    numbers = {"rounds": 20}  # --moe-gate-options rounds=10
    has_balance_loss = False

    def select(self, score_TE: Tensor, active_T: Tensor, first_T1: Tensor | None = None) -> Tensor:
        if self.training:
            score_TE = sinkhorn(score_TE * active_T.unsqueeze(1), int(self.numbers["rounds"]))
        return score_TE.topk(self.top_k, dim=1).indices


def sinkhorn(score_TE: Tensor, rounds: int) -> Tensor:
    """Scales rows and columns in turn, so that rows sum to 1 and columns equally; rows of 0 remain."""
    tiny = torch.finfo(score_TE.dtype).tiny
    for _ in range(rounds):
        score_TE = score_TE / score_TE.sum(0, keepdim=True).clamp(min=tiny)
        score_TE = score_TE / score_TE.sum(1, keepdim=True).clamp(min=tiny)
    return score_TE


@register_gate("quantile")
class QuantileGate(TopKGate):
    """The best K of ``p_e - b_e``, weighted by p (quantile balancing, kexue.fm/archives/11619).

    ``a_t`` is the score ``p_te - b_e`` of the best expert that token t does not choose. Of the T tokens of an
    update, ``k T / E`` exceed ``b_e`` by their ``p_te - a_t``, so that all experts get equally many; b is a
    running mean over updates.
    """

    summary = "the k best of scores minus a running quantile"
    options = OPTIONS | {"drop_order", "threshold_step"}
    has_balance_loss = False
    learner = "threshold"
    learns_by_counts = True

    def __init__(self, config, *sizes: int):
        super().__init__(config, *sizes)
        self.threshold = RunningThreshold(self.num_experts, config.threshold_step)

    def select(self, score_TE: Tensor, active_T: Tensor, first_T1: Tensor | None = None) -> Tensor:
        return (score_TE - self.threshold.value()).topk(self.top_k, dim=1).indices

    def decide(self, x_TD: Tensor, active_T: Tensor, *extra: Tensor):
        routing = super().decide(x_TD, active_T, *extra)
        score_TE = routing.probs_TE.detach()
        next_K = min(self.top_k + 1, self.num_experts)
        cutoff_T1 = (score_TE - self.threshold.value()).topk(next_K, dim=1).values[:, -1:]
        observed_N = self.threshold.observed(score_TE - cutoff_T1, active_T, self.top_k)
        return routing._replace(observed_N=observed_N)


@register_branch("scale")
class Scale(nn.Module):
    """``MoE(x) + s x`` with a learnt vector s."""

    def __init__(self, embed_dim: int, *others):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(embed_dim))

    def compute(self, x_TD: Tensor, routing) -> Tensor:
        return self.scale * x_TD

    def combine(self, moe_TD: Tensor, output_TD: Tensor) -> Tensor:
        return moe_TD + output_TD.to(moe_TD.dtype)


@register_loss("confidence_loss")
def confidence(block, stats) -> Tensor:
    """A tenth of the z-loss, as an example: any scalar of a pass's `RoutingStats`."""
    return 0.1 * stats.z_loss
