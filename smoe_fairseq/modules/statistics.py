"""What a pass of the block counts, and the losses and figures made from the counts.

Shapes: T tokens, K choices per token, E experts, L strata, B sentences, S positions.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smoe_fairseq.modules.branches import CMROutput
from smoe_fairseq.modules.config import MoEConfig
from smoe_fairseq.modules.routing import Capacity, Routing
from smoe_fairseq.modules.rows import IndexedTokens, MaskedTokens
from smoe_fairseq.modules.strata import Strata


class RoutingStats(NamedTuple):
    """What one pass through a block did; real tokens only, padding counts nowhere.

    Flat, tensors or None, so that activation checkpointing carries them, gradient of the loss included.
    """

    balance_loss: Tensor  # scalar, mean over the gates, without alpha
    requested_capacity: Tensor  # x.shape[:-1], strata that the token stopped at, 0 at padding
    first_choices: Tensor  # (L, E): tokens of stratum i whose first choice is expert e
    unused: Tensor  # (L,): experts seen by gate i that are no token's first choice
    chosen: Tensor  # (L, K): copies chosen at stratum i
    dropped: Tensor  # (L, K): of those, copies beyond their expert's capacity
    dropped_choices: Tensor  # x.shape[:-1] + (K,): the same of each token, over all strata
    z_loss: Tensor  # scalar, mean over the gates, without its weight
    cmr_gate_sum: Tensor | None  # scalar: sum of the CMR gate over the tokens; None without CMR
    cmr_tokens: Tensor | None  # scalar: tokens that it counts
    entropy: Tensor | None  # scalar, mean over the gates, without its weight; of top-p gates
    asked: Tensor | None  # (L, E + M): choices of each expert, where the balance counts all choices
    observed: Tensor | None  # (L, N): what `StratifiedMoE.end_update` takes
    l1: Tensor | None  # scalar, mean over the gates, with its coefficient; of ReLU gates
    mean_probs: Tensor | None  # (L, E + M), with gradient, where the loss is taken over an update
    stops: Tensor | None  # scalar, `expected_stops` where there is a budget of them
    gate_logits: Tensor | None  # x.shape[:-1] + (E + M,), of the first gate, for the next MoE layer

    def __repr__(self) -> str:
        """One line of means; the tensors are the attributes."""
        strata, shape = len(self.chosen), tuple(self.requested_capacity.shape)
        if self.chosen.is_meta:
            return f"RoutingStats(strata={strata}, shape={shape})"
        tokens = int((self.requested_capacity > 0).sum())
        requested = self.requested_capacity.sum().item() / max(tokens, 1)
        dropped = 100 * self.dropped.sum().item() / max(self.chosen.sum().item(), 1)
        return (
            f"RoutingStats(strata={strata}, tokens={tokens}, requested_capacity={requested:.2f}, "
            f"dropped={dropped:.1f}%, balance_loss={self.balance_loss.item():.3f})"
        )


class Visit(NamedTuple):
    """The tokens at one stratum in one pass."""

    here_T: Tensor  # marks them
    tokens: IndexedTokens | MaskedTokens
    routing: Routing


class Counting:
    """What is counted in a block's passes."""

    def __init__(self, config: MoEConfig, gates: Sequence[nn.Module]):
        self.strata = config.layout
        self.choices = max(gate.top_k for gate in gates)  # K of the gate with most
        self.null_experts, self.copy_experts = config.null_experts, config.copy_experts
        # Behind those of the strata.
        self.free_experts = config.constant_experts + config.copy_experts + config.null_experts
        self.observed = max(gate.observes for gate in gates)  # N of the gate that observes most
        self.entropy = config.gate == "top-p"
        self.mean_probs = config.balance_over == "update"
        self.stops = config.capacity_budget > 0
        self.l1 = config.gate == "relu"
        self.hands_on_logits = config.gate_residual == "layers"

    def stats(
        self,
        visits: list[Visit],
        shape: torch.Size,
        cmr: CMROutput | None,
    ) -> RoutingStats:
        """Of one pass over tokens of this shape, with a visit for each stratum."""
        routings = [visit.routing for visit in visits]
        requested_T = torch.zeros_like(visits[0].here_T, dtype=torch.long)
        dropped_TK = requested_T.unsqueeze(1).repeat(1, self.choices)
        for here_T, tokens, routing in visits:
            requested_T = requested_T + here_T
            dropped_TK = tokens.add(dropped_TK, self.on_all_choices(routing.dropped_TK))
        first_choices = [routing.first_choices_E for routing in routings]
        asked = None
        if self.free_experts:
            alike = self.null_experts, self.copy_experts
            asked = [average_null(r.asked_E, *alike) for r in routings]
        of_loss = asked if self.free_experts else first_choices
        observed = (
            [F.pad(r.observed_N, (0, self.observed - len(r.observed_N))) for r in routings]
            if self.observed
            else None
        )
        losses = [r.balance_loss(asked_E) for r, asked_E in zip(routings, of_loss, strict=True)]
        return RoutingStats(
            balance_loss=torch.stack(losses).mean(),
            requested_capacity=requested_T.view(shape),
            first_choices=self._stack(first_choices),
            unused=torch.stack([(f_E == 0).sum() for f_E in first_choices]),
            chosen=torch.stack([self.on_all_choices(r.chosen_K) for r in routings]),
            dropped=torch.stack([self.on_all_choices(r.dropped_TK.sum(0)) for r in routings]),
            dropped_choices=dropped_TK.view(*shape, self.choices),
            z_loss=torch.stack([r.z_loss() for r in routings]).mean(),
            cmr_gate_sum=cmr and cmr.gate_sum,
            cmr_tokens=cmr and cmr.tokens,
            entropy=torch.stack([r.entropy() for r in routings]).mean() if self.entropy else None,
            asked=asked and self._stack(asked),
            observed=observed and torch.stack(observed),
            l1=torch.stack([r.l1 for r in routings]).mean() if self.l1 else None,
            mean_probs=self._stack([r.mean_probs_E for r in routings]) if self.mean_probs else None,
            stops=expected_stops(self.strata, routings) if self.stops else None,
            gate_logits=self._gate_logits(visits[0], shape) if self.hands_on_logits else None,
        )

    def _gate_logits(self, first: Visit, shape: torch.Size) -> Tensor:
        """What `StratifiedMoE.forward` of the next layer takes: 0 at padding."""
        logits_TE = first.routing.own_logits_TE
        every_TE = logits_TE.new_zeros(shape.numel(), logits_TE.shape[1])
        return first.tokens.replace(every_TE, logits_TE).view(*shape, -1)

    def on_all_choices(self, number_K: Tensor) -> Tensor:
        """Numbers of a gate's choices ``(..., K)``, with 0 for those that only other gates have."""
        missing = self.choices - number_K.shape[-1]
        return F.pad(number_K, (0, missing)) if missing else number_K

    def _stack(self, numbers: list[Tensor]) -> Tensor:
        return torch.stack([on_all_experts(self.strata, i, n_E) for i, n_E in enumerate(numbers)])


def on_all_experts(strata: Strata, i: int, number_E: Tensor) -> Tensor:
    """Numbers of the experts that gate ``i`` sees, with 0 for those that it does not see; then null ones."""
    first, visible = strata.first_experts[i], strata.visible[i]
    padding = (first, strata.num_experts - first - visible)
    if len(number_E) == visible:
        return F.pad(number_E, padding)
    return torch.cat([F.pad(number_E[:visible], padding), number_E[visible:]])


def balance_loss(asked_LE: Tensor, mean_probs_LE: Tensor, visible_L: Tensor) -> Tensor:
    """``mean_L E sum_e f_e p_e``, a scalar (paper, eq. 8 and 11); f may be of more batches than p.

    f of all batches of an update lets experts be busy with different ones (Qiu et al. 2025).

    Args:
        asked_LE: tokens that asked for each expert; f is their fraction. 0 for experts that a gate does
            not see.
        mean_probs_LE: p, the mean probability.
        visible_L: how many experts each gate sees.
    """
    asked_LE = asked_LE.to(mean_probs_LE.dtype)
    fraction_LE = asked_LE / asked_LE.sum(1, keepdim=True).clamp(min=1)
    return (visible_L * (fraction_LE * mean_probs_LE).sum(1)).mean()


def average_null(asked_E: Tensor, null_experts: int, copy_experts: int = 0) -> Tensor:
    """Averages the counts of the last ``null_experts`` of each row, which are all alike.

    Likewise those of the ``copy_experts`` before them.
    """
    if copy_experts:
        head_E, null_M = asked_E.tensor_split([asked_E.shape[-1] - null_experts], -1)
        asked_E = torch.cat([average_null(head_E, copy_experts), null_M], -1)
    if not null_experts:
        return asked_E
    exact = torch.float32 if asked_E.device.type == "mps" else torch.float64  # MPS has no float64
    true_E, null_M = asked_E.to(exact).split([asked_E.shape[-1] - null_experts, null_experts], -1)
    return torch.cat([true_E, null_M.mean(-1, keepdim=True).expand_as(null_M)], dim=-1)


def expected_stops(strata: Strata, routings: list[Routing]) -> Tensor:
    """Mean requested capacity of a pass, a scalar, with the gradient of the expected one.

    The recursion ``N_L = 1``, ``N_i = 1 + sum_{j=i..L-1} s_ij N_{j+1}``, where
    ``s_ij`` is the share of the tokens at stratum i that go on behind stratum j. With the counted first
    choices it is the mean requested capacity exactly. They have no gradient; ``s_ij`` gets that of the mean
    probability which gate i gives to the experts of stratum j (straight through, as in the balance loss f is
    counted and p learns). So a probability is moved by ``N_{j+1}``, the stops that tokens behind j really
    make on average, and by the tokens that are there to move. The estimate is biased in two ways: a first
    choice is the most likely expert and not a drawn one, and a token that would go elsewhere is taken to go
    on like those that are there already.

    A stratum where no token stops counts as under uniform routing, and has no gradient.

    Args:
        routings: of each stratum's gate; gates see later strata.
    """
    last = routings[-1].probs_TE.new_ones(())
    stops = [last]  # N of the strata behind the one at hand
    for i in reversed(range(len(strata) - 1)):
        rest = Strata(strata.sizes[i:])
        share_L = _shares(routings[i], rest.sizes)
        here = 1 + (share_L[:-1] * torch.stack(stops)).sum()  # behind the last one there are none
        some = routings[i].active_T.any()
        stops.insert(0, torch.where(some, here, rest.expected_requested_capacity()))
    return stops[0]


def _shares(routing: Routing, sizes: tuple[int, ...]) -> Tensor:
    """By the strata that a gate sees, of these sizes: the tokens that choose it first, out of all."""
    probs_E = routing.mean_true_probs_E
    counted_E = routing.first_choices_E.to(probs_E.dtype) / routing.num_tokens
    counted_L, probs_L = (
        torch.stack([part.sum() for part in number_E.split(sizes)])
        for number_E in (counted_E, probs_E)
    )
    return counted_L + probs_L - probs_L.detach()


def capacities_of(model: nn.Module) -> list[Capacity]:
    return [module for module in model.modules() if isinstance(module, Capacity)]


def on_host(logs: list[Mapping]) -> list[dict]:
    """Dictionaries in which numbers and numpy arrays stand in the place of tensors, in one transfer.

    Integers stay exact up to 2^53; other values are as they were.
    """
    tensors = [value for log in logs for value in log.values() if torch.is_tensor(value)]
    if not tensors:
        return [dict(log) for log in logs]
    # One copy for each type there is, and one to the host; fairseq with --cpu has its norm on the GPU.
    kinds = {(tensor.device, tensor.dtype): [] for tensor in tensors}
    for tensor in tensors:
        kinds[tensor.device, tensor.dtype].append(tensor)
    joined = {kind: torch.cat([t.detach().flatten() for t in of]) for kind, of in kinds.items()}
    flat = {
        device: torch.cat([v.double() for (of, _), v in joined.items() if of == device])
        .cpu()
        .numpy()
        for device in {tensor.device: None for tensor in tensors}
    }
    start, values = dict.fromkeys(flat, 0), {}
    for (device, dtype), group in kinds.items():
        for each in group:
            first = start[device]
            value = flat[device][first : first + each.numel()].reshape(tuple(each.shape))
            start[device] += each.numel()
            if not dtype.is_floating_point:
                value = value.astype("int64")
            values[id(each)] = value if each.dim() else value.item()
    return [{key: values.get(id(value), value) for key, value in log.items()} for log in logs]
