"""Bring the copies of tokens to their experts and the outputs back.

Copies lie by expert, and behind them is one row of nobody: a copy without an expert reads 0 there.

Shapes: T tokens, K choices per token, N rows of copies and nobody's, D embedding, E experts.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from smoe_fairseq.modules.execution import Ends, Grouped, PerExpert
from smoe_fairseq.modules.placement import Placement
from smoe_fairseq.modules.rows import TakeRows, WeightedSum


@dataclass(frozen=True)
class DispatchPlan:
    """What `dispatch` learnt and `combine` needs: which copy stands in which row."""

    row_TK: Tensor  # of each copy
    copy_N: Tensor  # row n holds copy t * K + k

    @classmethod
    def of(cls, expert_TK: Tensor, rank_TK: Tensor, kept_E: Tensor, rows: int) -> "DispatchPlan":
        """Each copy behind those before it for the same expert, and these behind all earlier experts'."""
        start_E1 = torch.cat([kept_E.new_zeros(1), kept_E.cumsum(0)])
        row_TK = start_E1[expert_TK] + rank_TK
        row_TK = row_TK.masked_fill_(expert_TK == len(kept_E), rows - 1)
        copy_N = torch.arange(row_TK.numel(), device=row_TK.device)
        return cls(row_TK, row_TK.new_zeros(rows).scatter_(0, row_TK.flatten(), copy_N))

    def take(self, x_TD: Tensor) -> Tensor:
        """``(N, D)``: the token of each row; nobody's is any."""
        return TakeRows.apply(x_TD, self.copy_N // self.row_TK.shape[1], self.row_TK)


class LocalDispatcher:
    """All experts are in this process.

    Args:
        num_experts: E; a copy for expert E is not dispatched.
    """

    def __init__(self, num_experts: int):
        self.num_experts = num_experts

    def dispatch(
        self,
        x_TD: Tensor,
        expert_TK: Tensor,
        rank_TK: Tensor,
        kept_E: Tensor,
        run: PerExpert | Grouped,
    ) -> tuple[Tensor, Ends, DispatchPlan]:
        """Lay the copies by expert.

        Args:
            rank_TK, kept_E: as of `Routing`, of all experts.

        Returns:
            those copies ``x_ND`` that the execution ``run`` computes, where each expert's rows end, and
            the plan.
        """
        ends = run.ends(kept_E)
        plan = DispatchPlan.of(expert_TK, rank_TK, kept_E, run.rows(ends, expert_TK.numel()))
        return plan.take(x_TD), ends, plan

    def combine(self, y_ND: Tensor, weight_TK: Tensor, plan: DispatchPlan) -> Tensor:
        """Weighted sum of each token's expert outputs ``(T, D)``; 0 for a token without any."""
        return WeightedSum.apply(y_ND, weight_TK.to(y_ND.dtype), plan.row_TK, plan.copy_N)


@dataclass(frozen=True)
class Exchange:
    """One exchange of rows between processes: how many go where, and how they lie on arrival.

    Nobody's row stays where it is.
    """

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
        self,
        x_TD: Tensor,
        expert_TK: Tensor,
        rank_TK: Tensor,
        kept_E: Tensor,
        run: PerExpert | Grouped,
    ) -> tuple[Tensor, Ends, ShardedPlan]:
        """As `LocalDispatcher.dispatch`, but the copies and ends are those of this process's experts.

        Which copies travel is known on the host, whatever the execution.
        """
        exchange, ends = self._plan_exchange(kept_E, run)
        plan = DispatchPlan.of(expert_TK, rank_TK, kept_E, sum(exchange.sent) + 1)
        x_ND = exchange.to_experts(plan.take(x_TD))
        return x_ND, ends, ShardedPlan(plan.row_TK, plan.copy_N, exchange)

    def combine(self, y_ND: Tensor, weight_TK: Tensor, plan: ShardedPlan) -> Tensor:
        return super().combine(plan.exchange.back(y_ND), weight_TK, plan)

    def _plan_exchange(self, kept_E: Tensor, run: PerExpert | Grouped) -> tuple[Exchange, Ends]:
        """The exchange, and where the rows of each of this process's experts end after it."""
        place = self.placement
        group = slice(place.group_ranks.start, place.group_ranks.stop)
        # A row per process; those of other replicas get nothing.
        to_send_PE = kept_E.new_zeros(place.world_size, place.num_local)
        to_send_PE[group] = kept_E.view(place.group_size, place.num_local)
        received_PE = torch.empty_like(to_send_PE)
        dist.all_to_all_single(received_PE, to_send_PE)
        of_expert_E = received_PE.sum(0)
        sent, received, sizes = run.read(to_send_PE.sum(1), received_PE.sum(1), of_expert_E)
        rows = by_expert(received_PE, sum(received))
        return Exchange(sent, received, rows), run.ends(of_expert_E, sizes)


def by_expert(received_PE: Tensor, number: int) -> Tensor:
    """Rows that lie by sender and, of each, by expert: where they are in the order of experts ``(N,)``.

    Nobody's row comes after the ``number`` of these.
    """
    counts_EP = received_PE.t()
    starts_EP = (received_PE.flatten().cumsum(0).view_as(received_PE) - received_PE).t()
    lie_N = torch.arange(number + 1, device=received_PE.device)
    to_come_N = counts_EP.flatten().cumsum(0) - counts_EP.flatten()
    move_N = (starts_EP.flatten() - to_come_N).repeat_interleave(
        counts_EP.flatten(), output_size=number
    )
    lie_N[:-1] += move_N
    return lie_N


class AllToAll(torch.autograd.Function):
    """``sent`` and ``received`` rows to and from each process; their gradients travel the other way.

    Behind them is nobody's row, 0 on arrival. torch's own with gradient is deprecated, and what shall
    take its place is not public.
    """

    @staticmethod
    def forward(ctx, x_ND: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sent, ctx.received = sent, received
        return exchange_rows(x_ND, sent, received)

    @staticmethod
    def backward(ctx, grad_ND: Tensor):
        return exchange_rows(grad_ND, ctx.received, ctx.sent), None, None


def exchange_rows(x_ND: Tensor, sent: list[int], received: list[int]) -> Tensor:
    y_ND = x_ND.new_empty(sum(received) + 1, *x_ND.shape[1:])
    y_ND[-1] = 0
    dist.all_to_all_single(y_ND[:-1], x_ND.contiguous()[:-1], received, sent)
    return y_ND
