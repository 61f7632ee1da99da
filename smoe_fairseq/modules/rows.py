"""Rows: the copies of tokens, sorted by expert and summed by token, and the tokens of one stratum.

Shapes: T tokens, K choices per token, N rows of copies and one padding row, D embedding, E experts.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Behind the last row. A multiple of their number would have torch.compile make a graph for each.
_BEYOND = 1 << 40


class Copies(NamedTuple):
    """The copies of T tokens for the E experts that a gate sees, numbered from 0."""

    expert_TK: Tensor | None  # E for a copy without an expert
    weight_TK: Tensor  # at least float32, 0 for a copy without an expert
    rank_TK: Tensor | None  # number of earlier copies for the same expert
    kept_E: Tensor  # copies per expert
    own: range  # experts that no later gate sees, as the block numbers them
    sizes: list[int] | None = None  # `kept_E` on the host, if known
    most: int | None = None  # number of copies at most; None: T K, 0: far fewer, to be read
    plan: "DispatchPlan | None" = None  # if known; else made of experts and ranks


class DispatchPlan(NamedTuple):
    """The rows of copies: sorted by expert, then a padding row of 0, which copies without an expert read."""

    row_TK: Tensor  # of each copy
    copy_N: Tensor  # row n holds copy t * K + k
    token_N: Tensor  # of each row; arbitrary for padding rows

    @classmethod
    def of(cls, copies: Copies, rows: int) -> "DispatchPlan":
        """Sort copies by expert, then by rank."""
        kept_E = copies.kept_E
        start_E1 = F.pad(kept_E.cumsum(0) - kept_E, (0, 1), value=_BEYOND)
        start_TK = start_E1.index_select(0, copies.expert_TK.flatten()).view_as(copies.expert_TK)
        row_TK = start_TK.add_(copies.rank_TK).clamp_(max=rows - 1)
        copy_N = torch.arange(row_TK.numel(), device=row_TK.device)
        copy_N = row_TK.new_zeros(rows).scatter_(0, row_TK.flatten(), copy_N)
        return cls(row_TK, copy_N, copy_N // row_TK.shape[1])

    def take(self, x_TD: Tensor) -> Tensor:
        """``(N, D)``: the values of each row's token."""
        return MoveRows.apply(x_TD, self.token_N, self.row_TK, False)

    def weighted_sum(self, y_ND: Tensor, weight_TK: Tensor) -> Tensor:
        """``sum_k weight[t, k] y[row[t, k]]`` of each token, ``(T, D)`` (paper, eq. 3)."""
        column, row = weight_TK.reshape(-1, 1), self.row_TK.reshape(-1, 1)
        y_ND = (y_ND * MoveRows.apply(column, self.copy_N, row, False)).to(y_ND.dtype)
        return MoveRows.apply(y_ND, self.token_N, self.row_TK, True)


class MoveRows(torch.autograd.Function):
    """From tokens ``(T, D)`` to the rows of their copies ``(N, D)``, or ``back``, as sums over copies.

    Each direction is the backward pass of the other. ``token (N,)`` is the token of each row, ``row (T, K)``
    its inverse.
    """

    @staticmethod
    def forward(ctx, x: Tensor, token_N: Tensor, row_TK: Tensor, back: bool) -> Tensor:
        ctx.save_for_backward(token_N, row_TK)
        ctx.back = back
        return sum_rows(x, row_TK) if back else select(x, token_N)

    @staticmethod
    def backward(ctx, grad: Tensor):
        token_N, row_TK = ctx.saved_tensors
        return select(grad, token_N) if ctx.back else sum_rows(grad, row_TK), None, None, None


def sum_rows(y_ND: Tensor, row_TK: Tensor) -> Tensor:
    """``sum_k y[row[t, k]]`` for each token, ``(T, D)``."""
    return F.embedding_bag(row_TK, y_ND, mode="sum")


def like(y_TD: Tensor, x: Tensor) -> Tensor:
    """``y`` in the shape of ``x``, for autograd no view: in-place operations keep the hooks of a result."""
    return torch.ops.aten._unsafe_view(y_TD, x.shape)


def select(x_T: Tensor, index_N: Tensor) -> Tensor:
    """``x[index]``; zeros if ``x`` is empty, for the padding row of a batch without tokens."""
    number = index_N.shape[0]
    return x_T.index_select(0, index_N) if x_T.shape[0] else x_T.new_zeros(number, *x_T.shape[1:])


class AddRows(torch.autograd.Function):
    """``x.index_add(0, index, y)``, but without keeping ``y`` for the backward pass."""

    @staticmethod
    def forward(ctx, x_TD: Tensor, index_N: Tensor, y_ND: Tensor) -> Tensor:
        ctx.save_for_backward(index_N)
        return x_TD.index_add(0, index_N, y_ND)

    @staticmethod
    def backward(ctx, grad_TD: Tensor):
        (index_N,) = ctx.saved_tensors
        return grad_TD, None, grad_TD.index_select(0, index_N)


class IndexedTokens:
    """A stratum's tokens, gathered by index: the least work, but the host must know their number."""

    active_T = None  # all tokens that `take` returns are active

    def __init__(self, index: Tensor, number: int):
        self.index, self.all = index, len(index) == number

    def take(self, x_T: Tensor) -> Tensor:
        return x_T if self.all else x_T.index_select(0, self.index)

    def add(self, x_T: Tensor, y: Tensor) -> Tensor:
        y = y.to(x_T.dtype)
        if self.all:
            return x_T + y
        if torch.is_grad_enabled():
            return AddRows.apply(x_T, self.index, y)
        return x_T.index_add(0, self.index, y)

    def replace(self, x_T: Tensor, y: Tensor) -> Tensor:
        y = y.to(x_T.dtype)
        return y if self.all else x_T.index_copy(0, self.index, y)


class MaskedTokens:
    """A stratum's tokens as a mask of all T rows: no shape depends on the routing."""

    def __init__(self, here_T: Tensor):
        self.active_T = here_T

    def take(self, x_T: Tensor) -> Tensor:
        return x_T

    def add(self, x_T: Tensor, y: Tensor) -> Tensor:
        return x_T + torch.where(self._rows(x_T), y.to(x_T.dtype), 0)

    def replace(self, x_T: Tensor, y: Tensor) -> Tensor:
        return torch.where(self._rows(x_T), y.to(x_T.dtype), x_T)

    def _rows(self, x_T: Tensor) -> Tensor:
        return self.active_T.view(-1, *[1] * (x_T.dim() - 1))
