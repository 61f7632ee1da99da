"""The experts of a stratum by one grouped product, in shapes that do not depend on the routing.

If one kernel computes the product on the device (products.py), the host does not wait.

Rows are sorted by expert, followed by padding rows, which products leave uninitialised.

Shapes: T tokens, K choices per token, N rows, D embedding, F feed-forward, I inputs, O outputs, E experts.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from smoe_fairseq.modules.activation import Hidden
from smoe_fairseq.modules.per_expert import Weights, refuse_second_derivative
from smoe_fairseq.modules.products import products_of
from smoe_fairseq.modules.rows import Copies, DispatchPlan, select, sum_rows


class Grouped:
    """One product for all experts; the host reads nothing from the device, or just the number of rows."""

    on_host = False

    def __init__(self, experts):
        self.experts = experts

    def __call__(self, x_TD: Tensor, copies: Copies, weights: Weights) -> tuple[Tensor, Weights]:
        """As `PerExpert.__call__`; the returned weights leave out the stratum's own experts."""
        x_TD, hidden = x_TD.to(weights[0].dtype), self.experts.hidden
        layout = Layout.of(copies, weights)
        if torch.compiler.is_compiling():
            y_TD = _differentiable_sum(x_TD, copies, weights, layout, hidden)
            return y_TD, tuple(w[_passed_by(copies, w) :] for w in weights)
        y_TD, *remaining = GroupedSum.apply(
            x_TD, copies.weight_TK, *weights, copies, layout, hidden, *hidden.parameters
        )
        if not any(w.requires_grad for w in weights):
            remaining = [w.detach() for w in remaining]
        return y_TD, tuple(remaining)


class Layout(NamedTuple):
    """The rows of a stratum's copies; E counts the experts that its gate sees."""

    plan: DispatchPlan
    ends_E: Tensor  # the end of each expert's rows
    expert_NE: Tensor  # one-hot expert of each row; 0 for padding rows
    padding_N1: Tensor  # True for padding rows

    @classmethod
    def of(cls, copies: Copies, weights: Weights) -> "Layout":
        """One row per copy and a padding row; copies without an expert leave more padding rows.

        If a token may have all experts, the host reads the number of rows, unless the gate knows a bound.
        """
        plan, ends_E = copies.plan, copies.kept_E.cumsum(0).int()
        if plan is None:
            rows, most = copies.expert_TK.numel(), copies.most
            if most is not None and not torch.compiler.is_compiling():
                rows = min(rows, most or int(ends_E[-1]))
            plan = DispatchPlan.of(copies, rows + 1)
        rows = plan.copy_N.shape[0]
        row_N1 = torch.arange(rows, device=ends_E.device, dtype=torch.int).unsqueeze(1)
        expert_N1 = torch.searchsorted(ends_E, row_N1, right=True)
        expert_NE = expert_N1 == torch.arange(len(ends_E), device=ends_E.device)
        padding_N1 = expert_N1 == len(ends_E)
        return cls(plan, ends_E, expert_NE.to(weights[0].dtype), padding_N1)


class GroupedSum(torch.autograd.Function):
    """The weighted sum and the weights for the next stratum, as `ExpertSum`.

    Padding rows are uninitialised. Products skip them, and sums read only the last one, which is set to 0.
    Factors of ``expert_NE`` are cleared there, since NaN times 0 is NaN.
    """

    @staticmethod
    def forward(ctx, x_TD, weight_TK, w1, b1, w2, b2, copies, layout, hidden, *parameters):
        (row_TK, copy_N, token_N), ends_E, expert_NE, padding_N1 = layout
        ctx.set_materialize_grads(False)
        experts = len(copies.kept_E)
        seen = w1_E, b1_E, w2_E, b2_E = [w[:experts] for w in (w1, b1, w2, b2)]
        ctx.products = products = products_of(w2)
        h_NF = products.multiply(select(x_TD, token_N), w1_E, ends_E)
        h_NF = h_NF.addmm_(expert_NE, b1_E).masked_fill_(padding_N1, 0)
        h_NF, kept = hidden.forward(h_NF)
        y_ND = products.multiply(h_NF, w2_E, ends_E).addmm_(expert_NE, b2_E)
        weight_N1 = select(weight_TK.flatten(), copy_N).unsqueeze(1)
        y_ND.mul_(weight_N1)[-1] = 0
        where = row_TK, token_N, ends_E, expert_NE, padding_N1
        ctx.save_for_backward(x_TD, weight_N1, *seen, *where, *kept)
        ctx.passed_by, ctx.hidden = _passed_by(copies, w1), hidden
        ctx.unseen = len(w1) - experts
        y_TD = sum_rows(y_ND, row_TK)
        return y_TD, *(w[ctx.passed_by :] for w in (w1, b1, w2, b2))

    @staticmethod
    def backward(ctx, grad_TD, *sums):
        refuse_second_derivative()
        x_TD, weight_N1, w1, _, w2, b2, *others = ctx.saved_tensors
        row_TK, token_N, ends_E, expert_NE, padding_N1, *kept = others
        if grad_TD is None:
            grad_TD = torch.zeros_like(x_TD)
        y_grad_ND, x_ND = select(grad_TD, token_N), select(x_TD, token_N)
        h_NF, backward = ctx.hidden.recompute(*kept)
        h_grad_NF = ctx.products.multiply(y_grad_ND, w2, ends_E, back=True)
        # As in `ExpertSum`.
        weight_grad_N = torch.linalg.vecdot(h_grad_NF, h_NF)
        weight_grad_N += ((y_grad_ND @ b2.t()) * expert_NE).sum(1)
        weight_grad_N[-1] = 0
        weight_grad_TK = weight_grad_N.to(weight_N1.dtype)[row_TK]
        y_grad_ND.mul_(weight_N1)
        x_ND.mul_(weight_N1)
        scaled_NE = (expert_NE * weight_N1).to(expert_NE.dtype)
        outer = ctx.products.outer
        gradients = [outer(y_grad_ND, h_NF, ends_E), expert_NE.t() @ y_grad_ND]
        h_grad_NF, *parameter_grads = backward(h_grad_NF.masked_fill_(padding_N1, 0), weight_N1)
        gradients[:0] = outer(h_grad_NF, x_ND, ends_E), scaled_NE.t() @ h_grad_NF
        x_grad_ND = ctx.products.multiply(h_grad_NF, w1, ends_E, back=True)
        x_grad_ND.mul_(weight_N1)[-1] = 0
        x_grad_TD = sum_rows(x_grad_ND, row_TK)
        sums = [
            _add(*each, ctx.passed_by, ctx.unseen) for each in zip(sums, gradients, strict=True)
        ]
        return x_grad_TD, weight_grad_TK, *sums, None, None, None, *parameter_grads


def _passed_by(copies: Copies, weight: Tensor) -> int:
    """How many of the first experts no later stratum uses; at least one expert is left."""
    own = copies.own.stop - copies.own.start  # torch.compile(dynamic=True) has no length of a range
    return own if own < len(weight) else len(weight) - 1


def _add(sum_E: Tensor | None, grad_E: Tensor, passed_by: int, unseen: int) -> Tensor:
    """Adds the gradients of later strata, which leave out the first ``passed_by`` experts.

    Args:
        sum_E: these gradients.
        grad_E: the gradient of the stratum's experts.
        unseen: number of experts at the end that the stratum does not see.
    """
    if unseen:
        grad_E = torch.cat([grad_E, grad_E.new_zeros(unseen, *grad_E.shape[1:])])
    if sum_E is not None:
        grad_E[passed_by:] += sum_E
    return grad_E


def _differentiable_sum(
    x_TD: Tensor, copies: Copies, weights: Weights, layout: Layout, hidden: Hidden
) -> Tensor:
    """The weighted sum by operations that torch can differentiate and trace."""
    w1, b1, w2, b2 = (w[: len(copies.kept_E)] for w in weights)

    def linear(x_NI: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y_NO = products_of(weight).multiply(x_NI, weight, layout.ends_E)
        # Clears uninitialised rows in both directions, since NaN times 0 is NaN.
        return torch.addmm(y_NO, layout.expert_NE, bias).masked_fill(layout.padding_N1, 0)

    x_ND = layout.plan.take(x_TD).masked_fill(layout.padding_N1, 0)
    h_NF = F.dropout(hidden.function(linear(x_ND, w1, b1)), hidden.dropout)
    return layout.plan.weighted_sum(linear(h_NF, w2, b2), copies.weight_TK)
