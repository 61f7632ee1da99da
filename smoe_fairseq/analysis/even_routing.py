"""A block's pass as if every gate chose evenly: how many tokens go where is reckoned, and no value is read.

So it can be run on the meta device, where tensors have shapes alone.

Shapes: T tokens, N rows of copies and nobody's, D embedding, E experts.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from smoe_fairseq.modules.dispatch import Exchange, ShardedDispatcher
from smoe_fairseq.modules.execution import Ends, Grouped, PerExpert
from smoe_fairseq.modules.experts import Experts
from smoe_fairseq.modules.gates.base import BaseGate
from smoe_fairseq.modules.placement import Placement
from smoe_fairseq.modules.smoe import StratifiedMoE


def route_evenly(block: StratifiedMoE, grouped: bool = False) -> None:
    """Lets the block compute its experts on even shares of its gates' tokens, each by itself or grouped."""
    block.execution = functools.partial(EvenGrouped if grouped else EvenPerExpert, block)
    for gate in block.gates:
        if isinstance(gate, BaseGate):  # it reads scores, to come to even loads
            gate.balance = lambda expert_T, *_: expert_T


def spread(block: StratifiedMoE, processes: int) -> None:
    """Leaves the block, on the meta device, the experts of the busiest of so many processes.

    That is the last one: its experts are of the last stratum, which every gate sees.

    Raises:
        ValueError: the experts cannot be spread over so many.
    """
    old = block.experts
    place = Placement(block.strata.num_experts, processes, processes - 1)
    if not place.is_sharded:
        return
    _, width, dim = old.w1.shape
    with torch.device("meta"):
        block.experts = Experts(
            place, dim, width, old.activation_fn, old.activation_dropout, old.output_init_scale
        )
    block.dispatcher = EvenShardedDispatcher(place)


class _EvenLoad:
    """Of an execution whose pass asks for the tokens of one stratum after the other."""

    def __init__(self, block: StratifiedMoE, *experts):
        super().__init__(*experts)
        self.block = block
        self.stratum = -1

    def tokens(self, here_T: Tensor):
        self.stratum += 1
        reached = self.block.strata.expected_visits()
        # What is asked for after the last stratum is all tokens.
        share = reached[self.stratum] if self.stratum < len(reached) else 1
        self.tokens_here = self.number = round(share * len(here_T))
        return super().tokens(here_T)

    def announce(self, here_T: Tensor) -> None:
        """Nothing is read."""

    def kept(self) -> list[int]:
        """Copies that each expert of the block keeps in this stratum."""
        gate, strata = self.block.gates[self.stratum], self.block.strata
        first, visible = strata.first_experts[self.stratum], strata.visible[self.stratum]
        each = gate.expected_choices * self.tokens_here / visible
        capacity = getattr(gate, "capacity", None)  # not every gate limits experts
        if factor := capacity and capacity.factor_in_force:
            each = min(each, math.ceil(factor * self.tokens_here / visible))
        ends = [0] * (first + 1) + [round(each * (e + 1)) for e in range(visible)]
        ends += [ends[-1]] * (strata.num_experts - first - visible)
        return [end - start for start, end in zip(ends, ends[1:])]


class EvenPerExpert(_EvenLoad, PerExpert):
    def ends(self, kept_E: Tensor, sizes: list[int] | None = None) -> list[int]:
        return super().ends(kept_E, self.kept() if sizes is None else sizes)


class EvenGrouped(_EvenLoad, Grouped):
    """Its shapes are those of `Grouped`, whatever the load, but where copies travel."""


class EvenShardedDispatcher(ShardedDispatcher):
    """Its exchanges bring what as many processes, all with this one's tokens, would send."""

    def _plan_exchange(self, kept_E: Tensor, run: _EvenLoad) -> tuple[Exchange, Ends]:
        place, kept = self.placement, run.kept()
        sizes = [place.group_size * kept[e] for e in place.local]
        rows = kept_E.new_empty(sum(sizes) + 1)
        exchange = EvenExchange(None, [sum(kept)], [sum(sizes)], rows)
        return exchange, run.ends(kept_E[: place.num_local], sizes)


class EvenExchange(Exchange):
    """Takes the memory of an exchange."""

    def to_experts(self, x_ND: Tensor) -> Tensor:
        x_ND = _Arrival.apply(x_ND, sum(self.received) + 1)
        return x_ND.index_select(0, self.by_expert_N)

    def back(self, y_ND: Tensor) -> Callable[[], Tensor]:
        by_sender_ND = torch.empty_like(y_ND).index_copy(0, self.by_expert_N, y_ND)
        arrived_ND = _Arrival.apply(by_sender_ND, sum(self.sent) + 1)
        return lambda: arrived_ND


class _Arrival(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND: Tensor, rows: int) -> Tensor:
        ctx.rows = len(x_ND)
        return x_ND.new_empty(rows, *x_ND.shape[1:])

    @staticmethod
    def backward(ctx, grad_ND: Tensor):
        return grad_ND.new_empty(ctx.rows, *grad_ND.shape[1:]), None
