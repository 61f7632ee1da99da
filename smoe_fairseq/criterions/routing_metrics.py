"""Routing metrics: sums that add up over batches and ranks, and the means that are logged of them."""

import torch
from fairseq import metrics, utils
from torch import Tensor

from smoe_fairseq.modules import RoutingStats
from smoe_fairseq.modules.blocks import moe_blocks
from smoe_fairseq.modules.capacity import by_position
from smoe_fairseq.modules.smoe import StratifiedMoE

_BLOCK = "moe_block "  # before a layer's name, among the keys of the logging output
_FIFTHS = "moe_fifths "  # likewise
_LAST = 1000  # fairseq's priority: after everything else


def routing_sums(moe_stats: list[RoutingStats]) -> dict:
    """Sums over all MoE layers of one forward pass; on the device, nothing is waited for."""
    sums = {
        "moe_requested": sum(s.requested_capacity.sum() for s in moe_stats),
        "moe_tokens": sum((s.requested_capacity > 0).sum() for s in moe_stats),
        "moe_unused": sum(s.unused.sum() for s in moe_stats),
        "moe_gates": sum(len(s.unused) for s in moe_stats),
        "moe_fifths": sum(by_position(s) for s in moe_stats),
    }
    if moe_stats[0].cmr_gate_sum is not None:
        sums["cmr_gate_sum"] = sum(s.cmr_gate_sum.detach() for s in moe_stats)
        sums["cmr_tokens"] = sum(s.cmr_tokens for s in moe_stats)
    top_k = moe_stats[0].chosen.shape[1]
    for k in range(top_k):
        sums[f"moe_chosen{k + 1}"] = sum(s.chosen[:, k].sum() for s in moe_stats)
        sums[f"moe_dropped{k + 1}"] = sum(s.dropped[:, k].sum() for s in moe_stats)
    return sums


def block_sums(model, moe_stats: list[RoutingStats]) -> dict[str, Tensor]:
    """The same for each MoE layer by itself, ``(L, 3 + 2K + E)``, a row per stratum.

    One tensor per layer, so that little has to wait for the device; `log_block` takes it apart.
    """
    blocks = moe_blocks(model)
    if len(blocks) != len(moe_stats):  # LayerDrop left some out, and which ones is not known here
        return {}
    sums = {}
    for (name, block), stats in zip(blocks.items(), moe_stats, strict=True):
        sums[f"{_BLOCK}{name}"] = _table(block, stats)
        sums[f"{_FIFTHS}{name}"] = by_position(stats)
    return sums


def _table(block: StratifiedMoE, stats: RoutingStats) -> Tensor:
    visible = [(1, gate.num_experts) for gate in block.gates]
    head = stats.unused.new_tensor(visible)
    tail = [stats.unused.unsqueeze(1), stats.chosen, stats.dropped, stats.first_choices]
    return torch.cat([head, *tail], dim=1)


def log_routing(logging_outputs: list[dict]) -> None:
    """Log, as means weighted by what they count:

    - ``requested_capacity``: strata per token and block
    - ``overflow_expert1``, ``overflow_expert2``: percent of first and second choices that were dropped
    - ``unused_expert1_count``: experts per gate and batch that were no token's first choice
    - ``overflow_fifth1`` to ``overflow_fifth5``: the first of these by position in the sentence, from
      its first fifth to its last, where any were dropped
    - ``cmr_gate``: with CMR, the gate between the shared network (0) and the experts (1)

    and of each MoE layer what `log_block` says.
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
    log_fifths(sum(log["moe_fifths"] for log in logging_outputs if "moe_fifths" in log))
    log_ratio("unused_expert1_count", "moe_unused", "moe_gates")
    if any("cmr_tokens" in log for log in logging_outputs):
        log_ratio("cmr_gate", "cmr_gate_sum", "cmr_tokens")
    names = dict.fromkeys(key for log in logging_outputs for key in log if key.startswith(_BLOCK))
    top_k = 2 if any("moe_chosen2" in log for log in logging_outputs) else 1
    for name in names:
        table = sum(log[name] for log in logging_outputs if name in log)
        name = name.removeprefix(_BLOCK)
        log_block(name, table.tolist(), top_k)
        fifths = [log[f"{_FIFTHS}{name}"] for log in logging_outputs if f"{_FIFTHS}{name}" in log]
        log_fifths(sum(fifths), f"{name}/", _LAST)


def log_fifths(table_25: Tensor, prefix: str = "", priority: int = 10) -> None:
    """Log the percentages of `by_position` as ``{prefix}overflow_fifth1`` and so on, if not all are 0."""
    if not table_25[1].any():
        return
    for fifth, (chosen, dropped) in enumerate(table_25.t().tolist(), start=1):
        percent = 100 * dropped / chosen if chosen else 0
        name = f"{prefix}overflow_fifth{fifth}"
        metrics.log_scalar(name, percent, chosen, priority=priority, round=3)


def log_block(name: str, table: list[list[float]], top_k: int) -> None:
    """Log of one MoE layer, ``encoder.layer.1``, and of each of its strata:

    - ``encoder.layer.1/requested_capacity``
    - ``encoder.layer.1/stratum.0/tokens``: percent of the layer's tokens that stop at the stratum
    - ``.../load_max``: first choices of the busiest expert over their mean; 1 when all are even
    - ``.../overflow_expert1``, ``.../overflow_expert2``, ``.../unused_expert1_count``: as for all layers

    ``encoder.layer.1/overflow_fifth1`` and so on are as for all layers. The console's lines leave them
    out (compat/progress_line.py).
    """
    sums = [sum(row[3 + 2 * top_k :]) for row in table]
    tokens = sums[0]

    def log(key, part, whole, factor=1):
        value = factor * part / whole if whole else 0
        metrics.log_scalar(f"{name}/{key}", value, whole, priority=_LAST, round=3)

    log("requested_capacity", sum(sums), tokens)
    for i, (batches, visible, unused, *counts) in enumerate(table):
        chosen, dropped, first = counts[:top_k], counts[top_k : 2 * top_k], counts[2 * top_k :]
        log(f"stratum.{i}/tokens", sums[i], tokens, factor=100)
        log(f"stratum.{i}/load_max", max(first), sums[i], factor=visible / max(batches, 1))
        for k in range(top_k):
            log(f"stratum.{i}/overflow_expert{k + 1}", dropped[k], chosen[k], factor=100)
        log(f"stratum.{i}/unused_expert1_count", unused, batches)
