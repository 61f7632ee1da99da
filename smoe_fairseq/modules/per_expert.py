"""The experts of a stratum by a product per expert: the least work, and the fastest on a CPU.

Shapes: T tokens, K choices per token, N rows of copies, n of one expert, D embedding, F feed-forward,
E experts.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from smoe_fairseq.modules.rows import Copies, DispatchPlan

Weights = tuple[Tensor, Tensor, Tensor, Tensor]  # w1 (E, F, D), b1 (E, F), w2 (E, D, F), b2 (E, D)


class PerExpert:
    """A product for each expert that has copies; the host reads the number of copies."""

    on_host = True

    def __init__(self, experts):
        self.experts = experts

    def __call__(self, x_TD: Tensor, copies: Copies, weights: Weights) -> tuple[Tensor, Weights]:
        """The weighted sum of each token's experts (paper, eq. 3 and 6).

        Args:
            x_TD: the tokens.
            weights: of all experts, see `Experts.weights`; for later strata the weights that the stratum
                before returned, so that all strata fill the same gradient buffers.

        Returns:
            ``(T, D)`` in the weights' type, 0 for tokens without an expert; and the weights.
        """
        hidden, trains = self.experts.hidden, any(w.requires_grad for w in weights)
        layout = *self.sort_by_expert(copies), copies.own
        x_TD = x_TD.to(weights[0].dtype)
        y_TD, *linked = ExpertSum.apply(
            x_TD, copies.weight_TK, *weights, layout, hidden, *hidden.parameters
        )
        return y_TD, tuple(linked) if trains else weights

    @staticmethod
    def sort_by_expert(copies: Copies) -> tuple[Tensor, list[int]]:
        """The copy in each row ``(N,)``, sorted by expert, and the number of rows per expert."""
        sizes = copies.kept_E.tolist() if copies.sizes is None else copies.sizes
        plan = copies.plan or DispatchPlan.of(copies, sum(sizes) + 1)
        return plan.copy_N[:-1], sizes

    def by_expert(
        self, x_ND: Tensor, sizes: list[int], weights: Weights
    ) -> Iterator[tuple[int, Tensor]]:
        """Each expert that has rows, with its outputs for them; for inference."""
        rows, activation_fn = x_ND.split(sizes), self.experts.activation_fn
        w1, b1, w2, b2 = map(Tensor.unbind, weights)
        for e, size in enumerate(sizes):
            if size:
                h_NF = activation_fn(F.linear(rows[e], w1[e], b1[e]))
                yield e, F.linear(h_NF, w2[e], b2[e])

    def infer(
        self, x_TD: Tensor, token_N: Tensor, weight_N1: Tensor, sizes: list[int], weights: Weights
    ) -> Tensor:
        """The weighted sum without gradients; rows are sorted by expert, ``sizes`` per expert."""
        tokens, scales = token_N.split(sizes), weight_N1.split(sizes)
        y_TD = torch.zeros_like(x_TD)
        for e, y_ND in self.by_expert(x_TD.index_select(0, token_N), sizes, weights):
            y_TD.index_add_(0, tokens[e], y_ND.mul_(scales[e]))
        return y_TD


class ExpertSum(torch.autograd.Function):
    """The weighted sum and the weights for the next stratum.

    Each expert adds its outputs to the sum while they are in the cache. The backward pass keeps only the
    hidden activations, and gathers the tokens again.
    """

    @staticmethod
    def forward(ctx, x_TD, weight_TK, w1, b1, w2, b2, layout, hidden, *parameters):
        copy_N, sizes, own = layout
        ctx.set_materialize_grads(False)
        token_N = copy_N // weight_TK.shape[1]
        weight_N1 = weight_TK.reshape(-1).index_select(0, copy_N).unsqueeze(1)
        y_TD, kept = torch.zeros_like(x_TD), []
        for e, token_n, weight_n1 in _busy(own.start, sizes, token_N, weight_N1):
            h_nF = F.linear(x_TD.index_select(0, token_n), w1[e], b1[e])
            h_nF, saved = hidden.forward(h_nF)
            y_nD = F.linear(h_nF, w2[e], b2[e])
            y_TD.index_add_(0, token_n, y_nD.mul_(weight_n1))
            kept += saved
        ctx.save_for_backward(x_TD, w1, b1, w2, b2, copy_N, token_N, weight_N1, *kept)
        ctx.sizes, ctx.own, ctx.hidden = sizes, own, hidden
        ctx.shape_TK = weight_TK.shape
        return y_TD, *(w.view_as(w) for w in (w1, b1, w2, b2))

    @staticmethod
    def backward(ctx, grad_TD, *sums):
        refuse_second_derivative()
        x_TD, w1, b1, w2, b2, copy_N, token_N, weight_N1, *kept = ctx.saved_tensors
        if grad_TD is None:
            grad_TD = torch.zeros_like(x_TD)
        trains = any(ctx.needs_input_grad[2:6])
        buffer = Gradients(ctx.sizes, ctx.own, (w1, b1, w2, b2), sums) if trains else None
        x_grad_TD = torch.zeros_like(x_TD)
        weight_grads, parameter_grads = [], [None] * len(ctx.hidden.parameters)
        per_expert = len(kept) // max(sum(size > 0 for size in ctx.sizes), 1)
        saved = zip(*[iter(kept)] * per_expert) if kept else iter(())
        for e, token_n, weight_n1 in _busy(ctx.own.start, ctx.sizes, token_N, weight_N1):
            y_grad_nD, x_nD = grad_TD.index_select(0, token_n), x_TD.index_select(0, token_n)
            h_nF, backward = ctx.hidden.recompute(*next(saved))
            h_grad_nF = y_grad_nD @ w2[e]
            # <g, W h + b> = <W' g, h> + <g, b>, which does not need the unscaled output.
            weight_grads.append(torch.linalg.vecdot(h_grad_nF, h_nF).addmv_(y_grad_nD, b2[e]))
            # Scale the smaller factors (n, D) in place of the gradient of h (n, F).
            y_grad_nD.mul_(weight_n1)
            x_nD.mul_(weight_n1)
            if trains:
                buffer.add(e, 2, y_grad_nD, h_nF, None)
            h_grad_nF, *of_parameters = backward(h_grad_nF, weight_n1)
            if trains:
                buffer.add(e, 0, h_grad_nF, x_nD, weight_n1)
            x_grad_TD.index_add_(0, token_n, (h_grad_nF @ w1[e]).mul_(weight_n1))
            both = zip(parameter_grads, of_parameters, strict=True)
            parameter_grads = [b if a is None else a + b for a, b in both]
        weight_grad_TK = weight_N1.new_zeros(ctx.shape_TK)
        if weight_grads:
            weight_grad_TK.view(-1)[copy_N] = torch.cat(weight_grads).to(weight_N1.dtype)
        sums = buffer.sums if trains else [None] * 4
        return x_grad_TD, weight_grad_TK, *sums, None, None, *parameter_grads


class Gradients:
    """Gradient buffers of the weights, filled by every stratum that uses the weights.

    A backward pass goes from the last stratum to the first; each stratum passes the buffers on as the
    gradient of the weights that it got.

    Args:
        sizes: rows per expert, beginning with the first expert of ``own``.
        own: experts whose buffers no later stratum has written.
        sums: the buffers of the later strata; None for each weight in the last stratum.
    """

    def __init__(self, sizes: list[int], own: range, weights: Weights, sums: tuple):
        is_last = sums[0] is None
        self.sums = [torch.empty_like(w) for w in weights] if is_last else sums
        self.unwritten = range(own.start, len(weights[0])) if is_last else own
        busy = {own.start + e for e, size in enumerate(sizes) if size}
        for e in set(self.unwritten) - busy:
            for buffer in self.sums:
                buffer[e].zero_()

    def add(
        self, expert: int, which: int, y_grad_nO: Tensor, x_nI: Tensor, scale_n1: Tensor | None
    ) -> None:
        """Add the gradients of the ``which``-th weights and of the biases after them, for ``y = W x + b``.

        Args:
            scale_n1: row weights that ``x`` already contains and the gradient does not; None: 1.
        """
        weight_OI, bias_O1 = self.sums[which][expert], self.sums[which + 1][expert].unsqueeze(1)
        if scale_n1 is None:
            scale_n1 = x_nI.new_ones(len(x_nI), 1)
        scale_n1 = scale_n1.to(x_nI.dtype)
        if expert in self.unwritten:
            torch.mm(y_grad_nO.t(), x_nI, out=weight_OI)
            torch.mm(y_grad_nO.t(), scale_n1, out=bias_O1)
        else:
            weight_OI.addmm_(y_grad_nO.t(), x_nI)
            bias_O1.addmm_(y_grad_nO.t(), scale_n1)


def _busy(first: int, sizes: list[int], token_N: Tensor, weight_N1: Tensor) -> Iterator[tuple]:
    """Each expert that has rows, with their tokens and weights; ``first`` is the number of the first."""
    for e, parts in enumerate(zip(token_N.split(sizes), weight_N1.split(sizes), strict=True)):
        if sizes[e]:
            yield first + e, *parts


def refuse_second_derivative() -> None:
    """Raise RuntimeError in a backward pass with ``create_graph=True``."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the experts' weights have no second derivative: expected create_graph=False"
        )
