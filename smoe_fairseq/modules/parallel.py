"""Bring the copies of tokens to their experts, in this process or in others, and the outputs back.

Shapes: T tokens, K choices per token, N rows of copies and the padding row, D embedding, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from smoe_fairseq.modules.experts import Ends, Grouped, PerExpert, Placement
from smoe_fairseq.modules.rows import DispatchPlan


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
    ) -> Callable[[], Tensor]:
        """``sum_k weight[t, k] FFN_expert[t, k](x[t])``, ``(T, D)``; 0 for a token without any expert.

        The experts are computed; who calls what is returned, once, has their sum. In between it may
        compute what does not depend on it.

        Args:
            rank_TK, kept_E: as of `Routing`, of all experts.
            run: how the experts are computed.
        """
        ends = run.ends(kept_E)
        plan = DispatchPlan.of(expert_TK, rank_TK, kept_E, run.rows(ends, expert_TK.numel()))
        out_TD = run.mix(x_TD, weight_TK, plan, ends)
        return lambda: out_TD


@dataclass(frozen=True)
class Exchange:
    """One exchange of rows between processes: how many go where, and how they lie on arrival.

    The padding row stays where it is.
    """

    group: dist.ProcessGroup
    sent: list[int]  # rows to each process of the group
    received: list[int]  # rows from each
    by_expert_N: Tensor  # the rows received, from their order by sender to that by expert

    def to_experts(self, x_ND: Tensor) -> Tensor:
        arrived = start_exchange(x_ND, self.sent, self.received, self.group)
        return arrived().index_select(0, self.by_expert_N)

    def back(self, y_ND: Tensor) -> Callable[[], Tensor]:
        """Who calls what is returned waits for the rows."""
        by_sender_ND = torch.empty_like(y_ND).index_copy(0, self.by_expert_N, y_ND)
        return start_exchange(by_sender_ND, self.received, self.sent, self.group)


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
    ) -> Callable[[], Tensor]:
        """As of `LocalDispatcher`; in between the outputs travel.

        Which copies do is known on the host, whatever the execution.
        """
        exchange, ends = self._plan_exchange(kept_E, run)
        plan = DispatchPlan.of(expert_TK, rank_TK, kept_E, sum(exchange.sent) + 1)
        arrived = exchange.back(run.compute(exchange.to_experts(plan.take(x_TD)), ends))
        return lambda: plan.weighted_sum(arrived(), weight_TK)

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

    The padding row comes after the ``number`` of these.
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


def start_exchange(
    x_ND: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Callable[[], Tensor]:
    """``sent`` and ``received`` rows to and from each process; their gradients travel the other way.

    The padding row, 0 on arrival, is behind them. Returns a function that waits for the exchange and
    returns the rows. What is computed between the two calls overlaps with the exchange, forward and
    backward. torch's own differentiable exchange is deprecated, and its successor is not public.
    """
    transit = Transit(group)
    y_ND = Depart.apply(x_ND, sent, received, transit)
    return lambda: Arrive.apply(y_ND, sent, received, transit)


class Transit:
    """Rows on their way between the processes of ``group``, forward or backward."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

    def start(self, x_ND: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """What they are going to be on arrival."""
        x_ND = x_ND.contiguous()
        y_ND = x_ND.new_empty(sum(received) + 1, *x_ND.shape[1:])
        y_ND[-1] = 0
        self.rows = x_ND, y_ND  # not to be freed before
        self.work = dist.all_to_all_single(
            y_ND[:-1], x_ND[:-1], received, sent, group=self.group, async_op=True
        )
        return y_ND

    def wait(self) -> Tensor:
        """What has arrived."""
        self.work.wait()
        _, y_ND = self.rows
        del self.work, self.rows
        return y_ND


class Depart(torch.autograd.Function):
    """Forward, rows depart. Backward, their gradients arrive."""

    @staticmethod
    def forward(
        ctx, x_ND: Tensor, sent: list[int], received: list[int], transit: Transit
    ) -> Tensor:
        ctx.transit = transit
        return transit.start(x_ND, sent, received)

    @staticmethod
    def backward(ctx, _):
        return ctx.transit.wait(), None, None, None


class Arrive(torch.autograd.Function):
    """Forward, rows arrive. Backward, their gradients depart.

    A backward pass goes from the last to the first of what was computed: so what came between departure and
    arrival comes between these two there as well.
    """

    @staticmethod
    def forward(
        ctx, y_ND: Tensor, sent: list[int], received: list[int], transit: Transit
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.transit = sent, received, transit
        transit.wait()
        return y_ND

    @staticmethod
    def backward(ctx, grad_ND: Tensor):
        ctx.transit.start(grad_ND, ctx.received, ctx.sent)
        return grad_ND, None, None, None  # in place of what arrives, whose shape is another
