"""Copies of tokens: where each lies, gathered by expert, summed by token; and the tokens of one stratum.

Shapes: T tokens, K choices per token, N rows of copies and one padding row, D embedding, E experts.
"""

from itertools import islice
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Copies(NamedTuple):
    """The copies of T tokens for the E experts that a gate sees, which it numbers from 0."""

    expert_TK: Tensor  # of each copy; E for a copy without an expert
    weight_TK: Tensor | None  # at least float32, 0 for a copy without an expert; None: all are 1
    rank_TK: Tensor  # how many copies of the same expert come before
    kept_E: Tensor  # copies of each expert
    own: range  # the stratum's own experts, which no later gate sees, by the block's numbers
    sizes: list[int] | None = None  # `kept_E` on the host, if it is known there


class DispatchPlan(NamedTuple):
    """Which copy is in which row.

    Copies lie by expert, and behind them is the padding row: a copy without an expert reads 0 there.
    """

    row_TK: Tensor  # of each copy
    copy_N: Tensor  # row n holds copy t * K + k
    token_N: Tensor  # the token of each row; of padding rows, any

    @classmethod
    def of(cls, copies: Copies, rows: int) -> "DispatchPlan":
        """Each copy behind those before it for the same expert, and these behind all earlier experts'."""
        kept_E = copies.kept_E
        start_E1 = F.pad(kept_E.cumsum(0) - kept_E, (0, 1), value=2 * rows)
        start_TK = start_E1.index_select(0, copies.expert_TK.flatten()).view_as(copies.expert_TK)
        row_TK = start_TK.add_(copies.rank_TK).clamp_(max=rows - 1)
        copy_N = torch.arange(row_TK.numel(), device=row_TK.device)
        copy_N = row_TK.new_zeros(rows).scatter_(0, row_TK.flatten(), copy_N)
        return cls(row_TK, copy_N, copy_N // row_TK.shape[1])

    def take(self, x_TD: Tensor) -> Tensor:
        """``(N, D)``: what each row's token has."""
        return TakeRows.apply(x_TD, self.token_N, self.row_TK)

    def weighted_sum(self, y_ND: Tensor, weight_TK: Tensor | None) -> Tensor:
        """``sum_k weight[t, k] y[row[t, k]]`` of each token, ``(T, D)`` (paper, eq. 3)."""
        if weight_TK is not None:
            weight_N1 = TakeCopies.apply(weight_TK, self.copy_N, self.row_TK).unsqueeze(1)
            y_ND = (y_ND * weight_N1).to(y_ND.dtype)
        return SumRows.apply(y_ND, self.row_TK, self.token_N)


class TakeRows(torch.autograd.Function):
    """Row n of the result ``(N, D)`` is row ``token[n]`` of ``x (T, D)``.

    ``row (T, K)`` is the inverse: where each token's copies lie.
    """

    @staticmethod
    def forward(ctx, x_TD: Tensor, token_N: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(row_TK)
        return select(x_TD, token_N)

    @staticmethod
    def backward(ctx, grad_ND: Tensor):
        (row_TK,) = ctx.saved_tensors
        return F.embedding_bag(row_TK, grad_ND, mode="sum"), None, None


class SumRows(torch.autograd.Function):
    """Row t of the result ``(T, D)`` sums ``y[row[t, k]]`` over k: the backward pass of `TakeRows`.

    ``token (N,)`` is the inverse.
    """

    @staticmethod
    def forward(ctx, y_ND: Tensor, row_TK: Tensor, token_N: Tensor) -> Tensor:
        ctx.save_for_backward(token_N)
        return F.embedding_bag(row_TK, y_ND, mode="sum")

    @staticmethod
    def backward(ctx, grad_TD: Tensor):
        (token_N,) = ctx.saved_tensors
        return select(grad_TD, token_N), None, None


class TakeCopies(torch.autograd.Function):
    """Element n of the result ``(N,)`` is copy ``copy[n]`` of ``x (T, K)``; ``row`` as above."""

    @staticmethod
    def forward(ctx, x_TK: Tensor, copy_N: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(row_TK)
        return select(x_TK.flatten(), copy_N)

    @staticmethod
    def backward(ctx, grad_N: Tensor):
        (row_TK,) = ctx.saved_tensors
        return grad_N[row_TK], None, None


def select(x_T: Tensor, index_N: Tensor) -> Tensor:
    """``x[index]``; 0 if ``x`` is empty, as for the padding row of a batch without tokens."""
    return x_T.index_select(0, index_N) if len(x_T) else x_T.new_zeros(len(index_N), *x_T.shape[1:])


class AddRows(torch.autograd.Function):
    """``x.index_add(0, index, y)``: row n of ``y (N, D)`` added to row ``index[n]`` of ``x (T, D)``.

    torch's own keeps ``y``.
    """

    @staticmethod
    def forward(ctx, x_TD: Tensor, index_N: Tensor, y_ND: Tensor) -> Tensor:
        ctx.save_for_backward(index_N)
        return x_TD.index_add(0, index_N, y_ND)

    @staticmethod
    def backward(ctx, grad_TD: Tensor):
        (index_N,) = ctx.saved_tensors
        return grad_TD, None, grad_TD.index_select(0, index_N)


class IndexedTokens:
    """The tokens at some of ``number`` places, gathered: least work, but how many is known on the host."""

    active_T = None  # every token that `take` returns counts

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
    """All T rows with a mask of those that count: no shape depends on the routing."""

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


def read_on_host(*values: Tensor) -> list[list[int]]:
    """Vectors of integers in one transfer."""
    flat = iter(torch.cat(values).tolist())
    return [list(islice(flat, len(value))) for value in values]
