"""Bring the copies of tokens to their experts and the outputs back.

Shapes: T tokens, K choices per token, N = copies on their way to an expert, D embedding, E experts.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from smoe_fairseq.modules.execution import Grouped, PerExpert
from smoe_fairseq.modules.placement import Placement
from smoe_fairseq.modules.rows import WeightedSum


@dataclass(frozen=True)
class DispatchPlan:
    """What `dispatch` learnt and `combine` needs: which copy stands in which row."""

    copy_N: Tensor  # row n holds copy t * K + k
    token_N: Tensor  # of token t


class LocalDispatcher:
    """All experts are in this process.

    Args:
        num_experts: E; a copy for expert E or above is not dispatched.
    """

    def __init__(self, num_experts: int):
        self.num_experts = num_experts

    def dispatch(
        self, x_TD: Tensor, expert_TK: Tensor, run: PerExpert | Grouped
    ) -> tuple[Tensor, Tensor, DispatchPlan]:
        """Sort the copies by expert.

        Returns:
            those copies ``x_ND`` that the execution ``run`` computes, where each expert's rows end
            ``(E,)``, and the plan.
        """
        copy_N, ends_E = self.sort(expert_TK)
        copy_N = run.dispatched(copy_N, ends_E)
        token_N = copy_N // expert_TK.shape[1]
        return x_TD.index_select(0, token_N), ends_E, DispatchPlan(copy_N, token_N)

    def sort(self, expert_TK: Tensor) -> tuple[Tensor, Tensor]:
        """All T * K copies by expert, and where each expert's end ``(E,)``."""
        sorted_N, copy_N = expert_TK.flatten().sort(stable=True)
        experts_E = torch.arange(self.num_experts, device=expert_TK.device)
        return copy_N, torch.searchsorted(sorted_N, experts_E, right=True)

    def combine(self, y_ND: Tensor, weight_TK: Tensor, plan: DispatchPlan) -> Tensor:
        """Weighted sum of each token's expert outputs ``(T, D)``; 0 for a token without any."""
        weight_N = weight_TK.flatten().index_select(0, plan.copy_N).to(y_ND.dtype)
        return WeightedSum.apply(y_ND, weight_N, plan.token_N, len(weight_TK))


@dataclass(frozen=True)
class Exchange:
    """One exchange of rows between processes: how many go where, and how they lie on arrival."""

    sent: list[int]  # rows to each process
    received: list[int]  # rows from each process
    by_expert_N: Tensor  # the rows received, from their order by sender to that by expert

    def to_experts(self, x_ND: Tensor) -> Tensor:
        return AllToAll.apply(x_ND, self.sent, self.received).index_select(0, self.by_expert_N)

    def back(self, y_ND: Tensor) -> Tensor:
        by_sender_ND = torch.empty_like(y_ND).index_copy(0, self.by_expert_N, y_ND)
        return AllToAll.apply(by_sender_ND, self.received, self.sent)


@dataclass(frozen=True)
class ShardedPlan(DispatchPlan):
    """And by which way the copies came."""

    exchange: Exchange


class ShardedDispatcher(LocalDispatcher):
    """The experts are spread over processes: copies travel to theirs by all-to-all, outputs back.

    Every pass makes the same three collective calls on every process, with tokens or without: one
    exchange of counts and two of rows; nothing is padded. How many rows go where has to be known on the
    host, so each pass waits for the device once.
    """

    def __init__(self, placement: Placement):
        super().__init__(placement.num_experts)
        self.placement = placement

    def dispatch(
        self, x_TD: Tensor, expert_TK: Tensor, run: PerExpert | Grouped
    ) -> tuple[Tensor, Tensor, ShardedPlan]:
        """As `LocalDispatcher.dispatch`, but the copies and ends are those of this process's experts.

        Which copies travel is known on the host, whatever the execution.
        """
        copy_N, ends_E = self.sort(expert_TK)
        exchange, ends_E = self._plan_exchange(ends_E)
        copy_N = copy_N[: sum(exchange.sent)]
        token_N = copy_N // expert_TK.shape[1]
        x_ND = exchange.to_experts(x_TD.index_select(0, token_N))
        return x_ND, ends_E, ShardedPlan(copy_N, token_N, exchange)

    def combine(self, y_ND: Tensor, weight_TK: Tensor, plan: ShardedPlan) -> Tensor:
        return super().combine(plan.exchange.back(y_ND), weight_TK, plan)

    def _plan_exchange(self, ends_E: Tensor) -> tuple[Exchange, Tensor]:
        """The exchange, and where the rows of each of this process's experts end after it."""
        place = self.placement
        group = slice(place.group_ranks.start, place.group_ranks.stop)
        counts_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1))
        # A row per process; those of other replicas get nothing.
        to_send_PE = counts_E.new_zeros(place.world_size, place.num_local)
        to_send_PE[group] = counts_E.view(place.group_size, place.num_local)
        received_PE = torch.empty_like(to_send_PE)
        dist.all_to_all_single(received_PE, to_send_PE)

        sent, received = torch.stack([to_send_PE.sum(1), received_PE.sum(1)]).tolist()
        # The rows arrive by sender and, of each, by expert.
        expert_E = torch.arange(place.num_local, device=ends_E.device).repeat(place.world_size)
        expert_N = expert_E.repeat_interleave(received_PE.flatten(), output_size=sum(received))
        by_expert_N = expert_N.argsort(stable=True)
        return Exchange(sent, received, by_expert_N), received_PE.sum(0).cumsum(0)


class AllToAll(torch.autograd.Function):
    """``sent`` and ``received`` rows to and from each process; their gradients travel the other way.

    torch's own with gradient is deprecated, and what shall take its place is not public.
    """

    @staticmethod
    def forward(ctx, x_ND: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sent, ctx.received = sent, received
        return exchange_rows(x_ND, sent, received)

    @staticmethod
    def backward(ctx, grad_ND: Tensor):
        return exchange_rows(grad_ND, ctx.received, ctx.sent), None, None


def exchange_rows(x_ND: Tensor, sent: list[int], received: list[int]) -> Tensor:
    y_ND = x_ND.new_empty(sum(received), *x_ND.shape[1:])
    dist.all_to_all_single(y_ND, x_ND.contiguous(), received, sent)
    return y_ND
