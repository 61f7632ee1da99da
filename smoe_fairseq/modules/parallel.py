"""Experts sharded over ranks: their placement, and the exchange of copies and outputs.

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
    """E experts over N ranks: each rank holds E / N consecutive experts.

    With more ranks than experts, every E consecutive ranks form a group with one expert each. The groups
    are replicas: tokens stay in their group, and gradients are summed over the replicas of an expert.

    Raises:
        ValueError: neither E nor N is a multiple of the other.
    """

    num_experts: int
    world_size: int = 1
    rank: int = 0

    def __post_init__(self):
        if self.num_experts % self.world_size and self.world_size % self.num_experts:
            fits = [n for n in range(1, self.num_experts + 1) if self.num_experts % n == 0]
            raise ValueError(
                f"{self.num_experts} experts cannot be spread evenly over {self.world_size} ranks; "
                f"accepted are {', '.join(map(str, fits))} ranks or a multiple of {self.num_experts}"
            )

    @classmethod
    def over_processes(cls, num_experts: int) -> "Placement":
        """Over all ranks of `torch.distributed`; one rank if it is not initialised."""
        if dist.is_available() and dist.is_initialized():
            return cls(num_experts, dist.get_world_size(), dist.get_rank())
        return cls(num_experts)

    @property
    def is_sharded(self) -> bool:
        return self.world_size > 1

    @property
    def group_size(self) -> int:
        """Number of ranks that together hold all experts, and exchange tokens."""
        return min(self.num_experts, self.world_size)

    @property
    def num_replicas(self) -> int:
        """Number of ranks that hold the same expert."""
        return self.world_size // self.group_size

    def process_group(self) -> dist.ProcessGroup:
        """The ranks that this one exchanges tokens with, itself included.

        The first call is collective: all ranks have to make it.
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
        """The experts of this rank."""
        first = self.rank % self.group_size * self.num_local
        return range(first, first + self.num_local)

    def local_indices(self, experts: range) -> range:
        """The local indices of those ``experts`` that are on this rank.

        The start is at most the last local expert, so that at least one expert remains from it on.
        """
        start, stop = (end - self.local.start for end in (experts.start, experts.stop))
        start = min(max(start, 0), self.num_local - 1)
        return range(start, max(start, min(stop, self.num_local)))


@functools.cache
def _groups(world: dist.ProcessGroup, world_size: int, size: int) -> list[dist.ProcessGroup]:
    """One group for every ``size`` consecutive ranks of ``world``."""
    return [dist.new_group(range(first, first + size)) for first in range(0, world_size, size)]


def compute_over_ranks(
    placement: Placement,
    run: Callable,
    x_TD: Tensor,
    copies: Copies,
    weights: Weights,
    branches: Callable[[], Any],
) -> tuple[tuple[Tensor, Weights], Any]:
    """``run(x, copies, weights)`` and ``branches()``, with experts sharded over ranks.

    Copies travel to their experts by all-to-all. ``branches`` are computed while the outputs travel back.
    Every rank of the group makes the same three collective calls, even without tokens: one exchange of
    counts and two of rows, without padding. The host has to know the numbers of rows, so it waits for the
    device once per stratum.
    """
    group, ranks = placement.process_group(), placement.group_size
    end = copies.own.start + len(copies.kept_E)
    kept_E = F.pad(copies.kept_E, (copies.own.start, placement.num_experts - end))
    to_send_PE = kept_E.view(ranks, placement.num_local)
    received_PE = torch.empty_like(to_send_PE)
    dist.all_to_all_single(received_PE, to_send_PE, group=group)
    own = placement.local_indices(copies.own)
    received_PE = received_PE[:, own.start :]  # no copies go to earlier experts
    counts = torch.cat([to_send_PE.sum(1), received_PE.sum(1), received_PE.sum(0)]).tolist()
    sent, received, sizes = counts[:ranks], counts[ranks : 2 * ranks], counts[2 * ranks :]

    plan = DispatchPlan.of(copies, sum(sent) + 1)
    # Sent in the type of the computation, which may be half precision.
    rows_ND = plan.take(x_TD.to(weights[0].dtype))
    arrived_ND, _ = exchange(rows_ND, sent, received, group)
    arrived = received_copies(received_PE, sizes, own)
    y_ND, weights = run(arrived_ND, arrived, weights)
    y_ND, outputs = exchange(y_ND, received, sent, group, branches)
    return (plan.weighted_sum(y_ND, copies.weight_TK), weights), outputs


def received_copies(received_PE: Tensor, sizes: list[int], own: range) -> Copies:
    """The copies that arrived, sorted by sender and then by expert, and the padding row (no expert).

    Args:
        received_PE: number of copies by sender and expert.
        sizes: ``received_PE.sum(0)`` on the host.
    """
    senders, experts = received_PE.shape
    number_B, rows = received_PE.flatten(), sum(sizes)  # B: pairs of sender and expert
    # Copies of the same expert from earlier senders, minus all copies before.
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
    """Exchange ``sent`` and ``received`` rows with each rank; gradients travel in the other direction.

    torch's own differentiable exchange is deprecated, and its successor is not public.

    Args:
        meanwhile: its computation overlaps with the exchange, forward and backward.

    Returns:
        The received rows, followed by a padding row of 0, and the result of ``meanwhile``.
    """
    transfer = AsyncAllToAll(group, sent, received)
    y_ND = Send.apply(x_ND, transfer)
    result = meanwhile()
    return Receive.apply(y_ND, transfer), result


class AsyncAllToAll:
    """An asynchronous exchange of rows or their gradients between the ranks of ``group``."""

    def __init__(self, group: dist.ProcessGroup, sent: list[int], received: list[int]):
        self.group, self.sent, self.received = group, sent, received

    def start(self, x_ND: Tensor, back: bool = False) -> Tensor:
        """Starts the exchange; returns the tensor that will hold the received rows."""
        sent, received = (self.received, self.sent) if back else (self.sent, self.received)
        x_ND = x_ND.contiguous()
        y_ND = x_ND.new_empty(sum(received) + 1, *x_ND.shape[1:])
        y_ND[-1] = 0
        self.rows = x_ND, y_ND  # keeps them alive during the exchange
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

    The backward pass runs in reverse order, so the computation between the two overlaps there, too.
    """

    @staticmethod
    def forward(ctx, y_ND: Tensor, transfer: AsyncAllToAll) -> Tensor:
        ctx.transfer = transfer
        transfer.wait()
        return y_ND

    @staticmethod
    def backward(ctx, grad_ND: Tensor):
        ctx.transfer.start(grad_ND, back=True)
        return grad_ND, None  # a placeholder; `Send.backward` returns the received gradients
