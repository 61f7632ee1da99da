"""The experts of a block: their weights, and the two ways to compute them.

Shapes: T tokens, K choices per token, N rows of copies, which lie by expert, and one padding row at the end,
D embedding, F feed-forward, E experts of this rank.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterator
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smoe_fairseq.modules.grouped import (
    StackedLinear,
    can_group,
    expert_linear,
    grouped_linear,
    one_kernel,
)
from smoe_fairseq.modules.parallel import Placement
from smoe_fairseq.modules.rows import (
    AddRowsInPlace,
    DispatchPlan,
    Ends,
    IndexedTokens,
    MaskedTokens,
    read_on_host,
)
from smoe_fairseq.modules.strata import OptionError
from smoe_fairseq.modules.torch_features import autocast_dtype

Activation = str | Callable[[Tensor], Tensor]


class Experts(nn.Module):
    """``FFN_e(x) = w2_e activation(w1_e x + b1_e) + b2_e`` for E experts (paper, eq. 1).

    Initialised as ``nn.Linear``.

    Holds the parameters; `PerExpert` and `Grouped` compute with them. With experts spread over ranks, E
    counts those of this rank.
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
        """What is between the two linear maps of an expert."""
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


EXECUTIONS = ("auto", "per-expert", "grouped")
# Rows per expert from which saving memory is worth a few more calls for each expert.
MANY_ROWS = 256
logger = logging.getLogger(__name__)


def start_pass(
    execution: "str | Callable[..., PerExpert]", experts: Experts, x: Tensor
) -> "PerExpert | Grouped":
    """The execution of one pass over tokens ``x``.

    Args:
        execution: one of `EXECUTIONS`. "auto" takes "grouped" where the device computes it in one kernel,
            and while `torch.compile` traces; "per-expert" anywhere else. Or a callable that makes an
            execution of the experts and their weights.
    """
    weights = experts.weights()
    if callable(execution):
        return execution(experts, *weights)
    if execution == "auto":
        execution = best_execution(x.device, weights[0])
    return (Grouped if execution == "grouped" else PerExpert)(experts, *weights)


def best_execution(device: torch.device, weight: Tensor) -> str:
    """Of experts with such weights ``(E, O, I)``; logged once for each device beside the CPU."""
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

    The number of rows of each expert has to be known on the host.
    """

    def __init__(self, experts: Experts, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor):
        self.experts, self.dtype = experts, w1.dtype
        self.first, self.second = StackedLinear.of(w1, b1), StackedLinear.of(w2, b2)

    @staticmethod
    def tokens(here_T: Tensor, number: int | None = None) -> IndexedTokens:
        """The tokens at a stratum, of which ``number`` are marked; None: counted here."""
        return IndexedTokens(here_T, int(here_T.sum()) if number is None else number)

    def count(self, kept_E: Tensor, next_T: Tensor | None) -> tuple[Ends, int | None]:
        """Where each expert's rows end, and how many tokens are at the next stratum.

        Both are read in one transfer, the only one of a stratum that waits for the device.

        Args:
            next_T: marks the tokens at the next stratum; None: there is none.
        """
        if next_T is None:
            return self.ends(kept_E, *read_on_host(kept_E)), None
        sizes, (number,) = read_on_host(kept_E, next_T.sum().unsqueeze(0))
        return self.ends(kept_E, sizes), number

    @staticmethod
    def ends(kept_E: Tensor, sizes: list[int]) -> Ends:
        """Where each expert's rows end; ``sizes`` is ``kept_E`` on the host."""
        return list(accumulate(sizes))

    @staticmethod
    def num_rows(ends: Ends, copies: int) -> int:
        """N for that many copies: those that have an expert, and the padding row."""
        return ends[-1] + 1

    def mix(self, x_TD: Tensor, weight_TK: Tensor, plan: DispatchPlan, ends: Ends) -> Tensor:
        """``(T, D)``: the weighted sum of each token's experts.

        With many rows, each expert weighs its own and adds them to the sum, and what they were taken from
        is kept in their place: beside what is between its two products nothing is kept of them.
        """
        x_TD = x_TD.to(self.dtype)
        sizes = self._sizes(ends, len(plan.copy_N))
        if not torch.is_grad_enabled() or ends[-1] < MANY_ROWS * len(self._busy(sizes)):
            return plan.weighted_sum(self.compute(plan.take(x_TD), ends), weight_TK)
        rows = plan.take(x_TD).split(sizes)
        weights = plan.take_copies(weight_TK).to(self.dtype).split(sizes)
        tokens = plan.token_N.split(sizes)
        y_TD = rows[0].new_zeros(x_TD.shape)
        for e in self._busy(sizes):
            y_ND = self.compute_expert(e, rows[e], weights[e], (x_TD, tokens[e]))
            y_TD = AddRowsInPlace.apply(y_TD, tokens[e], y_ND)
        return y_TD

    def compute(self, x_ND: Tensor, ends: Ends) -> Tensor:
        """``(N, D)``: each expert's network on its rows; those of no expert are 0."""
        sizes = self._sizes(ends, len(x_ND))
        *rows, rest = x_ND.to(self.dtype).split(sizes)
        outputs = [self.compute_expert(e, rows[e]) for e in self._busy(sizes)]
        return torch.cat([*outputs, torch.zeros_like(rest)])

    def compute_expert(
        self,
        expert: int,
        x_ND: Tensor,
        weight_N: Tensor | None = None,
        origin: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        h_NF = self.experts.hidden(expert_linear(x_ND, self.first, expert, origin=origin))
        return expert_linear(h_NF, self.second, expert, weight_N)

    def by_expert(self, x_ND: Tensor, sizes: list[int]) -> Iterator[tuple[int, Tensor]]:
        """Experts that have rows, with the outputs for them; for inference.

        Args:
            sizes: rows of each expert.
        """
        rows, activation_fn = x_ND.split(sizes), self.experts.activation_fn
        (w1, b1), (w2, b2) = (map(Tensor.unbind, each[:2]) for each in (self.first, self.second))
        for e, size in enumerate(sizes):
            if size:
                h_NF = activation_fn(F.linear(rows[e], w1[e], b1[e]))
                yield e, F.linear(h_NF, w2[e], b2[e])

    @staticmethod
    def _sizes(ends: Ends, rows: int) -> list[int]:
        """Rows of each expert, and the padding row."""
        return [end - start for start, end in zip([0, *ends], [*ends, rows])]

    @staticmethod
    def _busy(sizes: list[int]) -> list[int]:
        """Experts with rows; one at least, or a rank without rows would skip the exchange going back."""
        return [e for e, size in enumerate(sizes[:-1]) if size > 0] or [0]


class Grouped:
    """One product for all experts, in shapes that do not depend on the routing: nothing waits for a GPU.

    Its methods take and return what those of `PerExpert` do; ends are on the device, and no number of
    tokens is needed.
    """

    def __init__(self, experts: Experts, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor):
        self.experts, self.dtype = experts, w1.dtype
        shared = can_group(w1) and not torch.compiler.is_compiling()
        self.first, self.second = (
            StackedLinear.of(*pair) if shared else StackedLinear(*pair)
            for pair in ((w1, b1), (w2, b2))
        )

    @staticmethod
    def tokens(here_T: Tensor, number: int | None = None) -> MaskedTokens:
        """The tokens at a stratum."""
        return MaskedTokens(here_T)

    def count(self, kept_E: Tensor, next_T: Tensor | None) -> tuple[Ends, None]:
        """Where each expert's rows end."""
        return self.ends(kept_E, []), None

    @staticmethod
    def ends(kept_E: Tensor, sizes: list[int]) -> Ends:
        """Where each expert's rows end, ``(E,)``."""
        return kept_E.cumsum(0).int()

    @staticmethod
    def num_rows(ends: Ends, copies: int) -> int:
        """A row for every copy: those without an expert leave padding rows at the end."""
        return copies + 1

    def mix(self, x_TD: Tensor, weight_TK: Tensor, plan: DispatchPlan, ends_E: Ends) -> Tensor:
        """``(T, D)``: the weighted sum of each token's experts."""
        return plan.weighted_sum(self.compute(plan.take(x_TD), ends_E), weight_TK)

    def compute(self, x_ND: Tensor, ends_E: Ends) -> Tensor:
        """``(N, D)``: each expert's network on its rows; those of no expert are 0."""
        row_N1 = torch.arange(x_ND.shape[0], device=x_ND.device).unsqueeze(1)
        # Of the experts' rows, 1 in the column of each one's expert; padding rows are 0.
        expert_NE = (row_N1 < ends_E) & (row_N1 >= torch.cat([ends_E.new_zeros(1), ends_E[:-1]]))
        routed_N1 = row_N1 < ends_E[-1]
        # The padding rows come back uninitialised, in the gradient too, and NaN times 0 is NaN: `where` keeps
        # them out in both directions.
        x_ND = torch.where(routed_N1, x_ND.to(self.dtype), 0)
        h_NF = grouped_linear(x_ND, self.first, ends_E, expert_NE)
        h_NF = self.experts.hidden(torch.where(routed_N1, h_NF, 0))
        y_ND = grouped_linear(h_NF, self.second, ends_E, expert_NE)
        return torch.where(routed_N1, y_ND, 0)
