"""Routing metrics: sums that add up over batches and ranks, and the means that are logged of them."""

from fairseq import metrics, utils

from smoe_fairseq.modules import RoutingStats


def routing_sums(moe_stats: list[RoutingStats]) -> dict:
    """Sums over all MoE layers of one forward pass; on the device, nothing is waited for."""
    sums = {
        "moe_requested": sum(s.requested_capacity.sum() for s in moe_stats),
        "moe_tokens": sum((s.requested_capacity > 0).sum() for s in moe_stats),
        "moe_unused": sum(s.unused.sum() for s in moe_stats),
        "moe_gates": sum(len(s.unused) for s in moe_stats),
    }
    if moe_stats[0].cmr_gate_sum is not None:
        sums["cmr_gate_sum"] = sum(s.cmr_gate_sum.detach() for s in moe_stats)
        sums["cmr_tokens"] = sum(s.cmr_tokens for s in moe_stats)
    top_k = moe_stats[0].chosen.shape[1]
    for k in range(top_k):
        sums[f"moe_chosen{k + 1}"] = sum(s.chosen[:, k].sum() for s in moe_stats)
        sums[f"moe_dropped{k + 1}"] = sum(s.dropped[:, k].sum() for s in moe_stats)
    return sums


def log_routing(logging_outputs: list[dict]) -> None:
    """Log, as means weighted by what they count:

    - ``requested_capacity``: strata per token and block
    - ``overflow_expert1``, ``overflow_expert2``: percent of first and second choices that were dropped
    - ``unused_expert1_count``: experts per gate and batch that were no token's first choice
    - ``cmr_gate``: with CMR, the gate between the shared network (0) and the experts (1)
    """

    def total(name):
        return utils.item(sum(log.get(name, 0) for log in logging_outputs))

    def log_ratio(name, part, whole, factor=1, digits=3):
        weight = total(whole)
        value = factor * total(part) / weight if weight else 0
        metrics.log_scalar(name, value, weight, round=digits)

    log_ratio("requested_capacity", "moe_requested", "moe_tokens")
    log_ratio("overflow_expert1", "moe_dropped1", "moe_chosen1", factor=100)
    log_ratio("overflow_expert2", "moe_dropped2", "moe_chosen2", factor=100)
    log_ratio("unused_expert1_count", "moe_unused", "moe_gates")
    if any("cmr_tokens" in log for log in logging_outputs):
        log_ratio("cmr_gate", "cmr_gate_sum", "cmr_tokens")
