"""Experts over ranks: which rank holds which, and the exchange of token copies and outputs.

Shapes: T tokens, K choices per token, N rows of copies and the padding row, D embedding, P ranks of a group,
E experts.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from smoe_fairseq.modules.per_expert import Weights
from smoe_fairseq.modules.rows import Copies, DispatchPlan


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

    def of_local(self, experts: range) -> range:
        """Those of some experts that are on this process, by their numbers here.

        The start is the last expert's at most, so that some expert is left from it on.
        """
        start, stop = (end - self.local.start for end in (experts.start, experts.stop))
        start = min(max(start, 0), self.num_local - 1)
        return range(start, max(start, min(stop, self.num_local)))


@functools.cache
def _groups(world: dist.ProcessGroup, world_size: int, size: int) -> list[dist.ProcessGroup]:
    """One group for every ``size`` consecutive processes of ``world``."""
    return [dist.new_group(range(first, first + size)) for first in range(0, world_size, size)]


def compute_over_ranks(
    place: Placement,
    run: Callable,
    x_TD: Tensor,
    copies: Copies,
    weights: Weights,
    branches: Callable[[], Any],
) -> tuple[tuple[Tensor, Weights], Any]:
    """``run(x, copies, weights)`` and ``branches()``, with the experts spread over ranks.

    Copies travel to their experts by all-to-all, and outputs back, meanwhile ``branches`` are computed.
    Every pass makes the same three collective calls on every rank that holds the same set of experts,
    with tokens or without: one exchange of counts and two of rows; nothing is padded. How many rows go
    where has to be known on the host, so each stratum waits for the device once.
    """
    group, ranks = place.process_group(), place.group_size
    end = copies.own.start + len(copies.kept_E)
    kept_E = F.pad(copies.kept_E, (copies.own.start, place.num_experts - end))
    to_send_PE = kept_E.view(ranks, place.num_local)
    received_PE = torch.empty_like(to_send_PE)
    dist.all_to_all_single(received_PE, to_send_PE, group=group)
    own = place.of_local(copies.own)
    received_PE = received_PE[:, own.start :]  # of others there are none
    counts = torch.cat([to_send_PE.sum(1), received_PE.sum(1), received_PE.sum(0)]).tolist()
    sent, received, sizes = counts[:ranks], counts[ranks : 2 * ranks], counts[2 * ranks :]

    plan = DispatchPlan.of(copies, sum(sent) + 1)
    # In the type that is computed in, which may be half as wide.
    rows_ND = plan.take(x_TD.to(weights[0].dtype))
    arrived_ND, _ = exchange(rows_ND, sent, received, group)
    arrived = received_copies(received_PE, sizes, own)
    y_ND, weights = run(arrived_ND, arrived, weights)
    y_ND, computed = exchange(y_ND, received, sent, group, branches)
    return (plan.weighted_sum(y_ND, copies.weight_TK), weights), computed


def received_copies(received_PE: Tensor, sizes: list[int], own: range) -> Copies:
    """The copies that arrived, of one row each, and the padding row, which is of no expert.

    They lie by sender, and by expert within a sender.

    Args:
        received_PE: how many.
        sizes: ``received_PE.sum(0)`` on the host.
    """
    senders, experts = received_PE.shape
    number_B, rows = received_PE.flatten(), sum(sizes)  # B: of each sender and expert
    # Of those of an expert, how many are from earlier senders; of all, how many came before.
    rank_B = (received_PE.cumsum(0) - received_PE).flatten() - (number_B.cumsum(0) - number_B)
    expert_B = torch.arange(experts, device=number_B.device).repeat(senders)
    of_B = torch.stack([expert_B, rank_B], 1)
    of_N = of_B.repeat_interleave(number_B, 0, output_size=rows)
    of_N = torch.cat([of_N, of_N.new_tensor([[experts, -rows]])])
    expert_N1, rank_N1 = of_N.split(1, 1)
    rank_N1 = rank_N1 + torch.arange(rows + 1, device=rank_N1.device).unsqueeze(1)
    return Copies(expert_N1, None, rank_N1, received_PE.sum(0), own, sizes)


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
    transfer = AsyncAllToAll(group, sent, received)
    y_ND = Send.apply(x_ND, transfer)
    result = meanwhile()
    return Receive.apply(y_ND, transfer), result


class AsyncAllToAll:
    """Rows on their way between the ranks of ``group``, or backward, their gradients."""

    def __init__(self, group: dist.ProcessGroup, sent: list[int], received: list[int]):
        self.group, self.sent, self.received = group, sent, received

    def start(self, x_ND: Tensor, back: bool = False) -> Tensor:
        """Starts the exchange; returns the tensor that will hold the rows that arrive."""
        sent, received = (self.received, self.sent) if back else (self.sent, self.received)
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


class Send(torch.autograd.Function):
    """Forward, rows are sent. Backward, their gradients are received."""

    @staticmethod
    def forward(ctx, x_ND: Tensor, transfer: AsyncAllToAll) -> Tensor:
        ctx.transfer = transfer
        return transfer.start(x_ND)

    @staticmethod
    def backward(ctx, _):
        return ctx.transfer.wait(), None


class Receive(torch.autograd.Function):
    """Forward, rows are received. Backward, their gradients are sent.

    A backward pass runs in reverse order, so what was computed between the two is between them there too.
    """

    @staticmethod
    def forward(ctx, y_ND: Tensor, transfer: AsyncAllToAll) -> Tensor:
        ctx.transfer = transfer
        transfer.wait()
        return y_ND

    @staticmethod
    def backward(ctx, grad_ND: Tensor):
        ctx.transfer.start(grad_ND, back=True)
        return grad_ND, None  # in place of what arrives, whose shape is another
