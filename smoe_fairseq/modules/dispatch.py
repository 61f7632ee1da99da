"""Bring the copies of tokens to their experts, in this process or in others, and the outputs back.

Shapes: T tokens, K choices per token, N rows of copies and nobody's, D embedding, E experts.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from smoe_fairseq.modules.execution import Ends, Grouped, PerExpert
from smoe_fairseq.modules.placement import Placement
from smoe_fairseq.modules.plan import DispatchPlan


class LocalDispatcher:
    """All experts are in this process.

    Args:
        num_experts: E; a copy for expert E is not dispatched.
    """

    def __init__(self, num_experts: int):
        self.num_experts = num_experts

    def mix(
        self,
        x_TD: Tensor,
        expert_TK: Tensor,
        weight_TK: Tensor,
        rank_TK: Tensor,
        kept_E: Tensor,
        run: PerExpert | Grouped,
    ) -> Tensor:
        """``sum_k weight[t, k] FFN_expert[t, k](x[t])``, ``(T, D)``; 0 for a token without any expert.

        Args:
            rank_TK, kept_E: as of `Routing`, of all experts.
            run: how the experts are computed.
        """
        ends = run.ends(kept_E)
        plan = DispatchPlan.of(expert_TK, rank_TK, kept_E, run.rows(ends, expert_TK.numel()))
        return run.mix(x_TD, weight_TK, plan, ends)


@dataclass(frozen=True)
class Exchange:
    """One exchange of rows between processes: how many go where, and how they lie on arrival.

    Nobody's row stays where it is.
    """

    group: dist.ProcessGroup
    sent: list[int]  # rows to each process of the group
    received: list[int]  # rows from each
    by_expert_N: Tensor  # the rows received, from their order by sender to that by expert

    def to_experts(self, x_ND: Tensor) -> Tensor:
        x_ND = AllToAll.apply(x_ND, self.sent, self.received, self.group)
        return x_ND.index_select(0, self.by_expert_N)

    def back(self, y_ND: Tensor) -> Tensor:
        by_sender_ND = torch.empty_like(y_ND).index_copy(0, self.by_expert_N, y_ND)
        return AllToAll.apply(by_sender_ND, self.received, self.sent, self.group)


class ShardedDispatcher(LocalDispatcher):
    """The experts are spread over processes: copies travel to theirs by all-to-all, outputs back.

    Every pass makes the same three collective calls on every process that holds the same set of experts,
    with tokens or without: one exchange of counts and two of rows; nothing is padded. How many rows go
    where has to be known on the host, so each pass waits for the device once.
    """

    def __init__(self, placement: Placement):
        super().__init__(placement.num_experts)
        self.placement = placement

    def mix(
        self,
        x_TD: Tensor,
        expert_TK: Tensor,
        weight_TK: Tensor,
        rank_TK: Tensor,
        kept_E: Tensor,
        run: PerExpert | Grouped,
    ) -> Tensor:
        """As of `LocalDispatcher`. Which copies travel is known on the host, whatever the execution."""
        exchange, ends = self._plan_exchange(kept_E, run)
        plan = DispatchPlan.of(expert_TK, rank_TK, kept_E, sum(exchange.sent) + 1)
        y_ND = exchange.back(run.compute(exchange.to_experts(plan.take(x_TD)), ends))
        return plan.weighted_sum(y_ND, weight_TK)

    def _plan_exchange(self, kept_E: Tensor, run: PerExpert | Grouped) -> tuple[Exchange, Ends]:
        """The exchange, and where the rows of each of this process's experts end after it."""
        place = self.placement
        group = place.process_group()
        to_send_PE = kept_E.view(place.group_size, place.num_local)
        received_PE = torch.empty_like(to_send_PE)
        dist.all_to_all_single(received_PE, to_send_PE, group=group)
        of_expert_E = received_PE.sum(0)
        sent, received, sizes = run.read(to_send_PE.sum(1), received_PE.sum(1), of_expert_E)
        rows = by_expert(received_PE, sum(received))
        return Exchange(group, sent, received, rows), run.ends(of_expert_E, sizes)


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
    def forward(
        ctx, x_ND: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return exchange_rows(x_ND, sent, received, group)

    @staticmethod
    def backward(ctx, grad_ND: Tensor):
        return exchange_rows(grad_ND, ctx.received, ctx.sent, ctx.group), None, None, None


def exchange_rows(
    x_ND: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    y_ND = x_ND.new_empty(sum(received) + 1, *x_ND.shape[1:])
    y_ND[-1] = 0
    dist.all_to_all_single(y_ND[:-1], x_ND.contiguous()[:-1], received, sent, group=group)
    return y_ND
