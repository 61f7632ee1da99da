"""The experts: which rank holds which, their weights, and the two ways to compute them.

Shapes: T tokens, K choices per token, N rows of copies, D embedding, F feed-forward, E experts.
"""

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from smoe_fairseq.modules.grouped import (
    SharedGradient,
    ShareGradient,
    can_group,
    expert_linear,
    grouped_linear,
    one_kernel,
)
from smoe_fairseq.modules.option_error import OptionError
from smoe_fairseq.modules.rows import AddRowsInPlace, DispatchPlan, IndexedTokens, MaskedTokens
from smoe_fairseq.modules.torch_features import autocast_dtype


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


# The experts of one block: feed-forward networks with stacked weights.
#


Activation = str | Callable[[Tensor], Tensor]


class Experts(nn.Module):
    """``FFN_e(x) = w2_e activation(w1_e x + b1_e) + b2_e`` for E experts, initialised as ``nn.Linear``.

    The parameters and what they mean; how they are computed is the execution's (execution.py). Where
    experts are spread over processes, E here are those of this one.
    """

    def __init__(
        self,
        placement: Placement,
        embed_dim: int,
        ffn_embed_dim: int,
        activation_fn: Activation = "relu",
        activation_dropout: float = 0.0,
        output_init_scale: float = 1.0,
    ):
        super().__init__()
        self.placement = placement
        num_experts = placement.num_local
        self.w1 = nn.Parameter(torch.empty(num_experts, ffn_embed_dim, embed_dim))
        self.b1 = nn.Parameter(torch.empty(num_experts, ffn_embed_dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, embed_dim, ffn_embed_dim))
        self.b2 = nn.Parameter(torch.empty(num_experts, embed_dim))
        self.activation_fn = activation(activation_fn)
        self.activation_dropout = activation_dropout
        self.output_init_scale = output_init_scale
        self.reset_parameters()
        if placement.is_sharded:
            for parameter in self.parameters():
                mark_as_expert(parameter, placement.world_size)

    def reset_parameters(self):
        """Draws the values of all experts, so that each has the same whatever the number of processes."""
        if self.w1.is_meta:
            return  # no values; going over hundreds of experts would take seconds
        local = self.placement.local
        scale2 = self.output_init_scale
        for weight, bias, scale in ((self.w1, self.b1, 1.0), (self.w2, self.b2, scale2)):
            bound = scale / math.sqrt(weight.shape[2])
            for stacked in (weight, bias):
                values = torch.empty_like(stacked[0])
                for e in range(self.placement.num_experts):
                    nn.init.uniform_(values, -bound, bound)
                    if e in local:
                        with torch.no_grad():
                            stacked[e - local.start] = values

    def weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``w1``, ``b1``, ``w2``, ``b2`` in the type that is computed in, autocast's where it is on."""
        dtype = autocast_dtype(self.w1.device) or self.w1.dtype
        return tuple(p.to(dtype) for p in (self.w1, self.b1, self.w2, self.b2))

    def hidden(self, h_NF: Tensor) -> Tensor:
        """What stands between the two linear maps of an expert."""
        return F.dropout(self.activation_fn(h_NF), self.activation_dropout, self.training)


def activation(given: Activation) -> Callable[[Tensor], Tensor]:
    """A function, or one of `torch.nn.functional` by its name.

    Raises:
        OptionError: there is none of this name.
    """
    function = getattr(F, given, None) if isinstance(given, str) else given
    if not callable(function):
        raise OptionError(
            "{activation_fn} {given}: expected a function, or the name of one in torch.nn.functional "
            "such as relu, gelu or silu",
            given=repr(given),
        )
    return function


def mark_as_expert(parameter: nn.Parameter, world_size: int) -> None:
    """Marks what other processes do not have: whoever averages gradients over processes leaves it alone.

    fairseq's ``legacy_ddp`` looks for the mark. The gradient sums over the tokens of all processes
    already, and that of any other parameter becomes a mean over them: so the division is made up for
    here.
    """
    parameter.expert = True
    parameter.register_hook(lambda gradient: gradient / world_size)


# How one pass through a block computes its experts, and in which shapes: chosen here, once per pass.
#
# Shapes: T tokens, N rows of copies, which lie by expert, and one padding row at the end, D embedding, F
# feed-forward, E experts of this process.


EXECUTIONS = ("auto", "per-expert", "grouped")
# Per expert: from here on, what is kept of rows counts more than a few calls for each expert.
MANY_ROWS = 256
Ends = list[int] | Tensor  # where each expert's rows end: on the host, or (E,) on the device
logger = logging.getLogger(__name__)


def start_pass(
    execution: "str | Callable[..., PerExpert]", experts: Experts, x: Tensor
) -> "PerExpert | Grouped":
    """The execution of one pass over tokens ``x``.

    Args:
        execution: one of `EXECUTIONS`. "auto" takes "grouped" where the device computes it in one kernel,
            and while `torch.compile` traces; "per-expert" anywhere else. Or what makes an execution of the
            experts and their weights.
    """
    weights = experts.weights()
    if callable(execution):
        return execution(experts, *weights)
    if execution == "auto":
        execution = best_execution(x.device, weights[0])
    return (Grouped if execution == "grouped" else PerExpert)(experts, *weights)


def best_execution(device: torch.device, weight: Tensor) -> str:
    """Of experts with such weights ``(E, O, I)``; for a device beside the CPU the log says it once."""
    if torch.compiler.is_compiling():
        return "grouped" if can_group(weight) else "per-expert"
    if device.type == "cpu":
        return "per-expert"
    grouped = can_group(weight) and one_kernel(device, weight.dtype)
    log_once(str(device), str(weight.dtype).removeprefix("torch."), grouped)
    return "grouped" if grouped else "per-expert"


@functools.cache
def log_once(device: str, dtype: str, grouped: bool) -> None:
    if grouped:
        logger.info("experts on %s in %s: products of all experts in one kernel", device, dtype)
    else:
        logger.info(
            "experts on %s in %s: a product per expert, whose sizes are read once per stratum; torch has "
            "one kernel for all in bfloat16 on GPUs of compute capability 9 and 10",
            device,
            dtype,
        )


class PerExpert:
    """A product for each expert that has rows, on just these: least work, and fastest on a CPU.

    How many rows each expert has is read on the host, once per stratum, together with how many tokens
    the next one has.
    """

    def __init__(self, experts: Experts, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor):
        self.experts = experts
        self.gradient1, self.gradient2 = SharedGradient(), SharedGradient()
        if (
            torch.is_grad_enabled()
        ):  # the strata of a pass share the weights, and sum their gradients
            w1, b1 = ShareGradient.apply(w1, b1, self.gradient1)
            w2, b2 = ShareGradient.apply(w2, b2, self.gradient2)
        self.w1, self.b1, self.w2, self.b2 = w1, b1, w2, b2
        self.upcoming: Tensor | None = None  # number of tokens of the next stratum
        self.number: int | None = None  # the same, once it has been read

    def tokens(self, here_T: Tensor) -> IndexedTokens:
        """Those that stand in a stratum."""
        number = int(here_T.sum()) if self.number is None else self.number
        self.number = None
        return IndexedTokens(here_T, number)

    def announce(self, here_T: Tensor) -> None:
        """Says before the experts' sizes are read who will be in the next stratum."""
        self.upcoming = here_T.sum().unsqueeze(0)

    def read(self, *values: Tensor) -> list[list[int]]:
        """Vectors of integers, on the host; the only one of a stratum to wait for the device."""
        if self.upcoming is None:
            return read(*values)
        *result, (self.number,) = read(*values, self.upcoming)
        self.upcoming = None
        return result

    def ends(self, kept_E: Tensor, sizes: list[int] | None = None) -> list[int]:
        """Where each expert's rows end; ``sizes`` are ``kept_E`` where these are on the host already."""
        return list(accumulate(self.read(kept_E)[0] if sizes is None else sizes))

    def rows(self, ends: list[int], copies: int) -> int:
        """N of so many copies: the ones that have an expert, and the padding row."""
        return ends[-1] + 1

    def mix(self, x_TD: Tensor, weight_TK: Tensor, plan: DispatchPlan, ends: list[int]) -> Tensor:
        """``(T, D)``: the weighted sum of each token's experts.

        With many rows, each expert weighs its own and adds them to the sum, and what they were taken from
        is kept in their place: beside what stands between its two products nothing is kept of them.
        """
        x_TD = x_TD.to(self.w1.dtype)
        sizes = self._sizes(ends, len(plan.copy_N))
        if not torch.is_grad_enabled() or ends[-1] < MANY_ROWS * len(self._busy(sizes)):
            return plan.weighted_sum(self.compute(plan.take(x_TD), ends), weight_TK)
        rows = plan.take(x_TD).split(sizes)
        weights = plan.take_copies(weight_TK).to(self.w1.dtype).split(sizes)
        tokens = plan.token_N.split(sizes)
        y_TD = rows[0].new_zeros(x_TD.shape)
        for e in self._busy(sizes):
            y_ND = self.compute_expert(e, rows[e], weights[e], (x_TD, tokens[e]))
            y_TD = AddRowsInPlace.apply(y_TD, tokens[e], y_ND)
        return y_TD

    def compute(self, x_ND: Tensor, ends: list[int]) -> Tensor:
        """``(N, D)``: each expert's network on its rows; those of no expert are 0."""
        sizes = self._sizes(ends, len(x_ND))
        *rows, rest = x_ND.to(self.w1.dtype).split(sizes)
        outputs = [self.compute_expert(e, rows[e]) for e in self._busy(sizes)]
        return torch.cat([*outputs, torch.zeros_like(rest)])

    def compute_expert(
        self,
        expert: int,
        x_ND: Tensor,
        weight_N: Tensor | None = None,
        origin: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        h_NF = expert_linear(x_ND, self.w1, self.b1, expert, self.gradient1, origin=origin)
        h_NF = self.experts.hidden(h_NF)
        return expert_linear(h_NF, self.w2, self.b2, expert, self.gradient2, weight_N)

    @staticmethod
    def _sizes(ends: list[int], rows: int) -> list[int]:
        """Rows of each expert, and the padding row."""
        return [end - start for start, end in zip([0, *ends], [*ends, rows])]

    @staticmethod
    def _busy(sizes: list[int]) -> list[int]:
        """Experts with rows; one at least, or a process without rows would skip the exchange going back."""
        return [e for e, size in enumerate(sizes[:-1]) if size > 0] or [0]


class Grouped:
    """One product for all experts, in shapes that do not depend on the routing: nothing waits for a GPU."""

    tokens = MaskedTokens

    def __init__(self, experts: Experts, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor):
        self.experts = experts
        self.gradient1 = self.gradient2 = None
        shared = can_group(w1) and not torch.compiler.is_compiling()
        if shared and torch.is_grad_enabled():
            self.gradient1, self.gradient2 = SharedGradient(), SharedGradient()
            w1, b1 = ShareGradient.apply(w1, b1, self.gradient1)
            w2, b2 = ShareGradient.apply(w2, b2, self.gradient2)
        self.w1, self.b1, self.w2, self.b2 = w1, b1, w2, b2

    def announce(self, here_T: Tensor) -> None:
        """As of `PerExpert`, which has to know."""

    def read(self, *values: Tensor) -> list[list[int]]:
        """As of `PerExpert`; asked for where copies travel between processes."""
        return read(*values)

    def ends(self, kept_E: Tensor, sizes: list[int] | None = None) -> Tensor:
        """As of `PerExpert`, on the device."""
        return kept_E.cumsum(0).int()

    def rows(self, ends: Tensor, copies: int) -> int:
        """As of `PerExpert`, for all copies: those without an expert leave padding rows at the end."""
        return copies + 1

    def mix(self, x_TD: Tensor, weight_TK: Tensor, plan: DispatchPlan, ends_E: Tensor) -> Tensor:
        """As of `PerExpert`."""
        return plan.weighted_sum(self.compute(plan.take(x_TD), ends_E), weight_TK)

    def compute(self, x_ND: Tensor, ends_E: Tensor) -> Tensor:
        """As of `PerExpert`."""
        row_N1 = torch.arange(x_ND.shape[0], device=x_ND.device).unsqueeze(1)
        # Of the experts' rows, 1 in the column of each one's expert; padding rows are 0.
        expert_NE = (row_N1 < ends_E) & (row_N1 >= torch.cat([ends_E.new_zeros(1), ends_E[:-1]]))
        routed_N1 = row_N1 < ends_E[-1]
        # The padding rows come back uninitialised, in the gradient too, and NaN times 0 is NaN: `where` keeps
        # them out in both directions.
        x_ND = torch.where(routed_N1, x_ND.to(self.w1.dtype), 0)
        h_NF = grouped_linear(x_ND, self.w1, self.b1, ends_E, expert_NE, self.gradient1)
        h_NF = self.experts.hidden(torch.where(routed_N1, h_NF, 0))
        y_ND = grouped_linear(h_NF, self.w2, self.b2, ends_E, expert_NE, self.gradient2)
        return torch.where(routed_N1, y_ND, 0)


def read(*values: Tensor) -> list[list[int]]:
    """Vectors of integers in one transfer."""
    flat = iter(torch.cat(values).tolist())
    return [list(islice(flat, len(value))) for value in values]
