"""Experts sharded over ranks: their placement, and the exchange of copies and outputs.

Shapes: T tokens, K choices per token, N rows of copies and the padding row, D embedding, P ranks of a group,
E experts.
"""

import functools
import itertools
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


class Trip:
    """The rows of a stratum on their way to the ranks of their experts, and back; without sharding they stay.

    One exchange of counts, for which the host waits, tells how many rows travel; it is collective. Rows that
    arrive are sorted by sender and expert, and so are their ``ends``; ``first`` is the first expert of this
    rank that may get some, and ``own`` the number of those that no later gate sees.

    Args:
        kept_C: copies for each expert of the block, of which rows are sorted by expert.
        own: experts that no later gate sees, as the block numbers them.
        ends_E: without sharding, the end of each expert's rows.
    """

    def __init__(
        self, placement: Placement, kept_C: Tensor, own: range, ends_E: Tensor | None = None
    ):
        self.group, ranks = None, placement.group_size
        if not placement.is_sharded:
            self.ends, self.first, self.own = ends_E, own.start, own.stop - own.start
            return
        self.group = placement.process_group()
        received_C = torch.empty_like(kept_C)
        dist.all_to_all_single(received_C, kept_C, group=self.group)
        numbers = torch.stack([kept_C, received_C]).view(2, ranks, placement.num_local).tolist()
        self.sent, self.received = ([sum(row) for row in rows] for rows in numbers)
        own = placement.local_indices(own)
        self.first, self.own = own.start, own.stop - own.start
        # No copies go to earlier experts.
        self.numbers = [row[own.start :] for row in numbers[1]]
        self.numbers_PE = received_C.view(ranks, placement.num_local)[:, own.start :]

    @functools.cached_property
    def ends(self) -> Tensor:
        """The end of the rows of each sender and expert."""
        return self.numbers_PE.flatten().cumsum(0, dtype=torch.int32)

    def arrived(self) -> Copies:
        """The rows that arrive as copies of one choice each; the last one is padding."""
        sizes = [sum(column) for column in zip(*self.numbers, strict=True)]
        row_N = torch.arange(sum(sizes) + 1, device=self.numbers_PE.device)
        *pairs, padding = row_N.split([*itertools.chain(*self.numbers), 1])
        by_expert = [row for e in range(len(sizes)) for row in pairs[e :: len(sizes)]]
        copy_N = torch.cat([*by_expert, padding])
        row_N1 = torch.empty_like(copy_N).scatter_(0, copy_N, row_N).unsqueeze(1)
        plan, one_N1 = DispatchPlan(row_N1, copy_N, copy_N), torch.ones_like(row_N1).float()
        own = range(self.first, self.first + self.own)
        return Copies(None, one_N1, None, self.numbers_PE.sum(0), own, sizes, plan=plan)

    def make(self, x_ND: Tensor, back: bool = False) -> Tensor:
        """The rows at their experts, or ``back``; each is the gradient of the other."""
        if self.group is None:
            return x_ND
        self.start(x_ND, back)
        return self.wait()

    def start(self, x_ND: Tensor, back: bool, padding: int = 0) -> Tensor:
        """Starts the exchange of rows; returns the tensor that will hold the others' and rows of 0."""
        sent, received = (self.received, self.sent) if back else (self.sent, self.received)
        x_ND, rows = x_ND.contiguous(), sum(received)
        y_ND = x_ND.new_empty(rows + padding, *x_ND.shape[1:])
        if padding:
            y_ND[rows:] = 0
        self.rows = x_ND, y_ND  # keeps them alive during the exchange
        self.work = dist.all_to_all_single(
            y_ND[:rows], x_ND[: sum(sent)], received, sent, group=self.group, async_op=True
        )
        return y_ND

    def wait(self) -> Tensor:
        """Waits for the exchange; returns the rows."""
        self.work.wait()
        _, y_ND = self.rows
        del self.work, self.rows
        return y_ND


def compute_experts(
    placement: Placement,
    run: Callable,
    x_TD: Tensor,
    copies: Copies,
    weights: Weights,
    branches: Callable[[], Any],
) -> tuple[tuple[Tensor, Weights], Any]:
    """``run(x, copies, weights)`` and ``branches()``.

    Copies for sharded experts travel by all-to-all. ``branches`` are computed while the outputs travel back.
    Every rank of the group makes the same three collective calls, even without tokens: one exchange of
    counts and two of rows, without padding.
    """
    if not placement.is_sharded:
        return run(x_TD, copies, weights), branches()
    end = copies.own.start + len(copies.kept_E)
    kept_C = F.pad(copies.kept_E, (copies.own.start, placement.num_experts - end))
    trip = Trip(placement, kept_C, copies.own)
    plan = DispatchPlan.of(copies, sum(trip.sent) + 1)
    # Sent in the type of the computation, which may be half precision.
    rows_ND = plan.take(x_TD.to(weights[0].dtype))
    arrived_ND, _ = exchange(rows_ND, trip)
    y_ND, weights = run(arrived_ND, trip.arrived(), weights)
    y_ND, outputs = exchange(y_ND, trip, branches, back=True)
    return (plan.weighted_sum(y_ND, copies.weight_TK), weights), outputs


def exchange(
    x_ND: Tensor, trip: Trip, meanwhile: Callable[[], Any] = lambda: None, back: bool = False
) -> tuple[Tensor, Any]:
    """Rows travel there or ``back``, and their gradients in the other direction.

    torch's own differentiable exchange is deprecated, and its successor is not public.

    Args:
        meanwhile: its computation overlaps with the exchange, forward and backward.

    Returns:
        The received rows, followed by a padding row of 0, and the result of ``meanwhile``.
    """
    y_ND = Send.apply(x_ND, trip, back)
    result = meanwhile()
    return Receive.apply(y_ND, trip, back), result


class Send(torch.autograd.Function):
    """Forward, rows are sent. Backward, their gradients are received."""

    @staticmethod
    def forward(ctx, x_ND: Tensor, trip: Trip, back: bool) -> Tensor:
        ctx.trip = trip
        return trip.start(x_ND, back, padding=1)

    @staticmethod
    def backward(ctx, _):
        return ctx.trip.wait(), None, None


class Receive(torch.autograd.Function):
    """Forward, rows are received. Backward, their gradients are sent.

    The backward pass runs in reverse order, so the computation between the two overlaps there, too.
    """

    @staticmethod
    def forward(ctx, y_ND: Tensor, trip: Trip, back: bool) -> Tensor:
        ctx.trip, ctx.back = trip, back
        trip.wait()
        return y_ND

    @staticmethod
    def backward(ctx, grad_ND: Tensor):
        ctx.trip.start(grad_ND, not ctx.back, padding=1)
        return grad_ND, None, None  # a placeholder; `Send.backward` returns the received gradients
