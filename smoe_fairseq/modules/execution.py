"""How one pass through a block computes its experts, and in which shapes: chosen here, once per pass.

Shapes: T tokens, N copies sorted by expert, D embedding, F feed-forward, E experts of this process.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from smoe_fairseq.modules.experts import Experts
from smoe_fairseq.modules.grouped import can_group, grouped_mm
from smoe_fairseq.modules.products import SharedGradient, ShareGradient, expert_linear
from smoe_fairseq.modules.tokens import IndexedTokens, MaskedTokens

EXECUTIONS = ("auto", "per-expert", "grouped")


def start_pass(execution: str, experts: Experts, x: Tensor) -> "PerExpert | Grouped":
    """The execution of one pass over tokens ``x``.

    Args:
        execution: one of `EXECUTIONS`. "auto" takes "grouped" on any device but a CPU, and while
            `torch.compile` traces, where torch has a grouped product for these experts.
    """
    weights = experts.weights()
    if execution == "auto":
        on_device = x.device.type != "cpu" or torch.compiler.is_compiling()
        execution = "grouped" if on_device and can_group(weights[0]) else "per-expert"
    return (Grouped if execution == "grouped" else PerExpert)(experts, *weights)


class PerExpert:
    """A product for each expert that has rows, on just these: least work, and fastest on a CPU.

    How many rows each expert has is read on the host; a GPU would be waited for in every stratum.
    """

    tokens = IndexedTokens

    def __init__(self, experts: Experts, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor):
        self.experts = experts
        self.gradient1, self.gradient2 = SharedGradient(), SharedGradient()
        if (
            torch.is_grad_enabled()
        ):  # the strata of a pass share the weights, and sum their gradients
            w1, b1 = ShareGradient.apply(w1, b1, self.gradient1)
            w2, b2 = ShareGradient.apply(w2, b2, self.gradient2)
        self.w1, self.b1, self.w2, self.b2 = w1, b1, w2, b2

    def dispatched(self, copy_N: Tensor, ends_E: Tensor) -> Tensor:
        """Of all copies, sorted by expert, those that are computed: the ones that have an expert."""
        return copy_N[: int(ends_E[-1])]

    def compute(self, x_ND: Tensor, ends_E: Tensor) -> Tensor:
        """``(N, D)``: each expert's network on its rows, which end at ``ends_E``; rows past them are 0."""
        x_ND = x_ND.to(self.w1.dtype)
        sizes = torch.diff(ends_E, prepend=ends_E.new_zeros(1)).tolist()
        *rows, rest = x_ND.split([*sizes, len(x_ND) - sum(sizes)])
        # One expert is always passed, or a process without rows would leave out the backward exchange.
        busy = [(e, x) for e, x in enumerate(rows) if len(x) > 0] or [(0, rows[0])]
        outputs = [self.compute_expert(e, x) for e, x in busy]
        return torch.cat([*outputs, torch.zeros_like(rest)])

    def compute_expert(self, expert: int, x_ND: Tensor) -> Tensor:
        h_NF = expert_linear(x_ND, self.w1, self.b1, expert, self.gradient1)
        return expert_linear(self.experts.hidden(h_NF), self.w2, self.b2, expert, self.gradient2)


class Grouped:
    """One product for all experts, in shapes that do not depend on the routing: nothing waits for a GPU."""

    tokens = MaskedTokens

    def __init__(self, experts: Experts, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor):
        self.experts = experts
        self.w1, self.b1, self.w2, self.b2 = w1, b1, w2, b2

    def dispatched(self, copy_N: Tensor, ends_E: Tensor) -> Tensor:
        """As of `PerExpert`, but all: rows past the last end belong to no expert."""
        return copy_N

    def compute(self, x_ND: Tensor, ends_E: Tensor) -> Tensor:
        """As of `PerExpert`."""
        x_ND = x_ND.to(self.w1.dtype)
        if len(x_ND) == 0:  # which a grouped product does not take
            h_NF = self.experts.hidden(F.linear(x_ND, self.w1[0], self.b1[0]))
            return F.linear(h_NF, self.w2[0], self.b2[0])
        row_N1 = torch.arange(x_ND.shape[0], device=x_ND.device).unsqueeze(1)
        routed_N1 = row_N1 < ends_E[-1]
        expert_N = torch.searchsorted(ends_E, row_N1.squeeze(1), right=True)
        expert_N = expert_N.clamp(max=ends_E.shape[0] - 1)
        ends_E = ends_E.int()
        # Rows that are no expert's come back uninitialised, in the gradient too, and NaN times 0
        # is NaN: `where` keeps them out in both directions.
        x_ND = torch.where(routed_N1, x_ND, 0)
        h_NF = grouped_mm(x_ND, self.w1.transpose(1, 2), ends_E)
        h_NF = self.experts.hidden(torch.where(routed_N1, h_NF + self.b1[expert_N], 0))
        y_ND = grouped_mm(h_NF, self.w2.transpose(1, 2), ends_E)
        return torch.where(routed_N1, y_ND + self.b2[expert_N], 0)
