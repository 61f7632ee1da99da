"""Experts over ranks: which rank holds which, and how copies of tokens get to them and outputs back.

Shapes: T tokens, K choices per token, N rows of copies and the padding row, D embedding, P ranks of a group,
E experts.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from smoe_fairseq.modules.rows import Copies, DispatchPlan, read_on_host


@dataclass(frozen=True)
class Placement:
    """E experts over N processes; each holds the same number of consecutive ones.

    Where there are more processes than experts, every E consecutive ones are a group with one expert
    each, and the groups are replicas of one another: tokens stay in their group, gradients are summed
    over the replicas of an expert.

    Raises:
        ValueError: neither of E and N is a multiple of the other.
    """

    num_experts: int
    world_size: int = 1
    rank: int = 0

    def __post_init__(self):
        if self.num_experts % self.world_size and self.world_size % self.num_experts:
            fits = [n for n in range(1, self.num_experts + 1) if self.num_experts % n == 0]
            raise ValueError(
                f"{self.num_experts} experts cannot be spread evenly over {self.world_size} processes; "
                f"accepted are {', '.join(map(str, fits))} processes or a multiple of {self.num_experts}"
            )

    @classmethod
    def over_processes(cls, num_experts: int) -> "Placement":
        """Over the processes of the run that this one is part of; all of them here if it is alone."""
        if dist.is_available() and dist.is_initialized():
            return cls(num_experts, dist.get_world_size(), dist.get_rank())
        return cls(num_experts)

    @property
    def is_sharded(self) -> bool:
        return self.world_size > 1

    @property
    def group_size(self) -> int:
        """Processes that hold all experts together, and exchange tokens."""
        return min(self.num_experts, self.world_size)

    @property
    def num_replicas(self) -> int:
        """Processes that hold the same expert."""
        return self.world_size // self.group_size

    def process_group(self) -> dist.ProcessGroup:
        """The processes that this one exchanges tokens with, itself among them.

        At the first call every process of the run has to call it.
        """
        if self.num_replicas == 1:
            return dist.group.WORLD
        groups = _groups(dist.group.WORLD, self.world_size, self.group_size)
        return groups[self.rank // self.group_size]

    @property
    def num_local(self) -> int:
        return self.num_experts // self.group_size

    @property
    def local(self) -> range:
        """The experts of this process."""
        first = self.rank % self.group_size * self.num_local
        return range(first, first + self.num_local)


@functools.cache
def _groups(world: dist.ProcessGroup, world_size: int, size: int) -> list[dist.ProcessGroup]:
    """One group for every ``size`` consecutive processes of ``world``."""
    return [dist.new_group(range(first, first + size)) for first in range(0, world_size, size)]


class Mixed(NamedTuple):
    """What the experts of one stratum return."""

    y_TD: Tensor  # sum_k weight[t, k] FFN_expert[t, k](x[t]); 0 for a token without any expert
    number: int | None  # tokens at the next stratum; None: not known on the host
    beside: Any  # what was computed beside the experts


class LocalDispatcher:
    """All experts are on this rank."""

    def mix(
        self,
        x_TD: Tensor,
        copies: Copies,
        run,
        next_T: Tensor | None,
        beside: Callable[[], Any],
    ) -> Mixed:
        """The weighted sum of each token's experts (paper, eq. 6).

        Args:
            run: computes the experts: a `PerExpert` or a `Grouped`.
            next_T: marks the tokens at the next stratum; None: there is none.
            beside: called once, computes what does not depend on the experts' outputs.
        """
        ends, number = run.count(copies.kept_E, next_T)
        plan = DispatchPlan.of(copies, run.num_rows(ends, copies.expert_TK.numel()))
        y_TD = run.mix(x_TD, copies.weight_TK, plan, ends)
        return Mixed(y_TD, number, beside())


class ShardedDispatcher:
    """The experts are spread over ranks: copies travel to theirs by all-to-all, outputs back.

    Every pass makes the same three collective calls on every rank that holds the same set of experts,
    with tokens or without: one exchange of counts and two of rows; nothing is padded. How many rows go
    where has to be known on the host, so each stratum waits for the device once.
    """

    def __init__(self, placement: Placement):
        self.placement = placement

    def mix(
        self,
        x_TD: Tensor,
        copies: Copies,
        run,
        next_T: Tensor | None,
        beside: Callable[[], Any],
    ) -> Mixed:
        """As `LocalDispatcher.mix`; ``beside`` runs while the outputs travel back."""
        place, group = self.placement, self.placement.process_group()
        to_send_PE = copies.kept_E.view(place.group_size, place.num_local)
        received_PE = torch.empty_like(to_send_PE)
        dist.all_to_all_single(received_PE, to_send_PE, group=group)
        of_expert_E = received_PE.sum(0)
        counts = [to_send_PE.sum(1), received_PE.sum(1), of_expert_E]
        if next_T is not None:
            counts.append(next_T.sum().unsqueeze(0))
        sent, received, sizes, *next_number = read_on_host(*counts)

        plan = DispatchPlan.of(copies, sum(sent) + 1)
        arrived_ND, _ = exchange(plan.take(x_TD), sent, received, group)
        # The rows lie by sender, and are computed in the order of experts.
        by_expert_N = by_expert(received_PE, sum(received))
        y_ND = run.compute(arrived_ND.index_select(0, by_expert_N), run.ends(of_expert_E, sizes))
        y_ND = torch.empty_like(y_ND).index_copy(0, by_expert_N, y_ND)
        y_ND, own = exchange(y_ND, received, sent, group, beside)
        number = next_number[0][0] if next_number else None
        return Mixed(plan.weighted_sum(y_ND, copies.weight_TK), number, own)


def by_expert(received_PE: Tensor, number: int) -> Tensor:
    """Where rows that lie by sender, and by expert within a sender, are in the order of experts ``(N,)``.

    Behind these ``number`` rows is the padding row.
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


def exchange(
    x_ND: Tensor,
    sent: list[int],
    received: list[int],
    group: dist.ProcessGroup,
    meanwhile: Callable[[], Any] = lambda: None,
) -> tuple[Tensor, Any]:
    """``sent`` and ``received`` rows to and from each rank; their gradients travel the other way.

    torch's own differentiable exchange is deprecated, and its successor is not public.

    Args:
        meanwhile: what it computes overlaps with the exchange, forward and backward.

    Returns:
        The rows, behind them the padding row, 0 on arrival; and what ``meanwhile`` returned.
    """
    transit = Transit(group)
    y_ND = Depart.apply(x_ND, sent, received, transit)
    result = meanwhile()
    return Arrive.apply(y_ND, sent, received, transit), result


class Transit:
    """Rows on their way between the processes of ``group``, forward or backward."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

    def start(self, x_ND: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Starts the exchange; returns the tensor that will hold the rows that arrive."""
        x_ND = x_ND.contiguous()
        y_ND = x_ND.new_empty(sum(received) + 1, *x_ND.shape[1:])
        y_ND[-1] = 0
        self.rows = x_ND, y_ND  # not to be freed before
        self.work = dist.all_to_all_single(
            y_ND[:-1], x_ND[:-1], received, sent, group=self.group, async_op=True
        )
        return y_ND

    def wait(self) -> Tensor:
        """Waits for the exchange; returns the rows."""
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

    A backward pass runs in reverse order, so what was computed between departure and arrival is between the
    two there as well.
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
