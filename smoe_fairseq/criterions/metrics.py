"""Routing metrics that the criterion logs."""

import re
from collections.abc import Mapping
from itertools import chain
from typing import NamedTuple

import torch
from fairseq import metrics
from torch import Tensor

from smoe_fairseq.models.transformer import OBSERVED
from smoe_fairseq.modules import RoutingStats
from smoe_fairseq.modules.layer import StratifiedMoE

# Keys of the logging output end with a layer's name. Since values are summed over batches, the key also
# contains K, the choices per token, and whether they are ordered ("top", or "any" if experts choose).
_BLOCK = re.compile(r"moe_(top|any)(\d+) (.+)")
_CMR = "moe_cmr "
_LAST = 1000  # fairseq's priority: after everything else


def routing_sums(
    blocks: Mapping[str, StratifiedMoE], ran: Mapping[str, RoutingStats]
) -> dict[str, Tensor]:
    """Counts of one forward pass for each MoE layer, as tensors on the device, without waiting for it.

    Each layer has a row ``(3 + 2K + E)`` per stratum, which `log_routing` reads. Layers that LayerDrop
    skipped have zeros, since all ranks have to sum the same keys.

    Args:
        blocks: the MoE layers by name.
        ran: the statistics of those that were not skipped.
    """
    sums = {}
    for name, block in blocks.items():
        stats, zeros = ran.get(name), block.stratum_of_expert.new_zeros
        ordered = "top" if block.gates[0].ordered else "any"
        columns = 3 + 2 * block.choices + block.strata.num_experts
        key = f"moe_{ordered}{block.choices} {name}"
        sums[key] = _table(block, stats) if stats else zeros(len(block.gates), columns)
        if numbers := block.stats_builder.num_observed:
            observed = stats.observed if stats else zeros(len(block.gates), numbers)
            sums[f"{OBSERVED}{name}"] = observed
        if block.cmr is not None:
            pair = [stats.cmr_gate_sum, stats.cmr_tokens] if stats else [zeros(()), zeros(())]
            sums[f"{_CMR}{name}"] = torch.stack(pair).detach().float()
    return sums


def has_routed(block: StratifiedMoE, stats: RoutingStats) -> Tensor | int:
    """1, or 0 if ``--moe-gating-dropout`` left all tokens of the batch out."""
    return stats.first_choices.any().long() if block.config.gating_dropout else 1


def _table(block: StratifiedMoE, stats: RoutingStats) -> Tensor:
    visible, routed = block.visible_of_gate, has_routed(block, stats)
    head = torch.stack([torch.ones_like(visible), visible], dim=1) * routed
    tail = [stats.unused.unsqueeze(1) * routed, stats.chosen, stats.dropped, stats.first_choices]
    return torch.cat([head, *tail], dim=1)


def log_routing(logging_outputs: list[dict]) -> None:
    """Log weighted means of models with MoE layers, from the result of `on_host`:

    - ``requested_capacity``: gates passed per token and layer
    - ``overflow_expert1``, ``overflow_expert2``: percent of first and second choices that were dropped;
      ``overflow_further``: of further choices. Layers whose experts choose are left out
    - ``experts_per_token``: copies per token and stratum that were not dropped
    - ``unused_expert1_count``: experts per gate and batch that were no token's first choice
    - ``cmr_gate``: with CMR, the gate between the shared network (0) and the experts (1)

    `log_block` logs the values of each layer.
    """

    def summed(prefix):
        keys = dict.fromkeys(k for log in logging_outputs for k in log if k.startswith(prefix))
        return {key: sum(log[key] for log in logging_outputs if key in log) for key in keys}

    cmr = summed(_CMR)
    layers = {}
    for key, table in summed("moe_").items():
        if match := _BLOCK.fullmatch(key):
            ordered, top_k, name = match.groups()
            layers[name] = [_Row.of(row, int(top_k), ordered == "top") for row in table.tolist()]
    if not layers:
        return
    rows = [row for strata in layers.values() for row in strata]
    stops = sum(row.tokens for row in rows)
    _log_ratio("requested_capacity", stops, sum(strata[0].tokens for strata in layers.values()))
    _log_ratio("experts_per_token", sum(row.kept for row in rows), stops)
    _log_overflow(rows)
    _log_ratio("unused_expert1_count", sum(r.unused for r in rows), sum(r.batches for r in rows))
    if cmr:
        _log_ratio("cmr_gate", *sum(cmr.values()).tolist())
    for name, strata in layers.items():
        log_block(name, strata)


class _Row(NamedTuple):
    """The counts of one stratum of one layer, summed over batches."""

    ordered: bool  # whether a token's choices are ordered
    batches: float
    visible: float  # experts that its gate sees, summed over batches
    unused: float
    chosen: list[float]  # first choices, second choices, and so on
    dropped: list[float]
    first: list[float]  # first choices by expert

    @classmethod
    def of(cls, row: list[float], top_k: int, ordered: bool) -> "_Row":
        counts = row[3:]
        return cls(
            ordered, *row[:3], counts[:top_k], counts[top_k : 2 * top_k], counts[2 * top_k :]
        )

    @property
    def tokens(self) -> float:
        """Tokens of the stratum; each has one first choice there."""
        return sum(self.first)

    @property
    def kept(self) -> float:
        """Copies that were not dropped."""
        return sum(self.chosen) - sum(self.dropped)


def _log_ratio(name: str, part, whole, factor=1, priority: int = 10) -> None:
    value = factor * part / whole if whole else 0
    metrics.log_scalar(name, value, whole, priority=priority, round=3)


def _log_overflow(rows: list[_Row], prefix: str = "", priority: int = 10) -> None:
    rows = [row for row in rows if row.ordered]
    parts = {"expert1": slice(0, 1), "expert2": slice(1, 2), "further": slice(2, None)}
    for name, part in parts.items():
        dropped, chosen = (
            sum(sum(getattr(row, kind)[part]) for row in rows) for kind in ("dropped", "chosen")
        )
        if any(row.chosen[part] for row in rows) or (name == "expert2" and not prefix):
            _log_ratio(f"{prefix}overflow_{name}", dropped, chosen, 100, priority)


def log_block(name: str, strata: list[_Row]) -> None:
    """Log one MoE layer, for example ``encoder.layer.1``, and each of its strata:

    - ``encoder.layer.1/requested_capacity``
    - ``encoder.layer.1/stratum.0/tokens``: percent of the layer's tokens that visit the stratum
    - ``.../load_max``: first choices of the busiest expert over the mean; 1 if all are equal
    - ``.../overflow_expert1``, ``.../overflow_expert2``, ``.../overflow_further``, ``.../experts_per_token``,
      ``.../unused_expert1_count``: as for all layers

    The console does not show these fields (compat/patches.py).
    """
    tokens = strata[0].tokens

    def log(key, part, whole, factor=1):
        _log_ratio(f"{name}/{key}", part, whole, factor, _LAST)

    log("requested_capacity", sum(row.tokens for row in strata), tokens)
    for i, row in enumerate(strata):
        log(f"stratum.{i}/tokens", row.tokens, tokens, factor=100)
        even = row.visible / max(row.batches, 1)
        log(f"stratum.{i}/load_max", max(row.first), row.tokens, factor=even)
        log(f"stratum.{i}/experts_per_token", row.kept, row.tokens)
        _log_overflow([row], f"{name}/stratum.{i}/", _LAST)
        log(f"stratum.{i}/unused_expert1_count", row.unused, row.batches)


def on_host(logs: list[Mapping]) -> list[dict]:
    """Replaces tensors by numbers and numpy arrays, in one transfer; integers are exact up to 2^53."""
    tensors = [value for log in logs for value in log.values() if torch.is_tensor(value)]
    values = {}
    # fairseq with --cpu has its gradient norm on the GPU.
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        groups = {}  # by type, since torch joins tensors of one type faster
        for tensor in tensors:
            if tensor.device == device:
                groups.setdefault(tensor.dtype, []).append(tensor)
        joined = [torch.cat([t.detach().flatten() for t in group]) for group in groups.values()]
        numbers = torch.cat([numbers_N.double() for numbers_N in joined]).cpu().numpy()
        for tensor in chain(*groups.values()):
            size = tensor.numel()
            value, numbers = numbers[:size].reshape(tensor.shape), numbers[size:]
            if not tensor.is_floating_point():
                value = value.astype("int64")
            values[id(tensor)] = value if tensor.dim() else value.item()
    return [{key: values.get(id(value), value) for key, value in log.items()} for log in logs]
