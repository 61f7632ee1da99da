"""Sums of rows that keep no more for the backward pass than they need, and take no more in it.

Each row of a result is made by itself, so that no two additions meet (no atomics on a GPU).

Shapes: N rows for K copies each of T tokens, D embedding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


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


class AddRowsInPlace(AddRows):
    """The same, in ``x`` itself."""

    @staticmethod
    def forward(ctx, x_TD: Tensor, index_N: Tensor, y_ND: Tensor) -> Tensor:
        ctx.save_for_backward(index_N)
        ctx.mark_dirty(x_TD)
        return x_TD.index_add_(0, index_N, y_ND)


class TakeRows(torch.autograd.Function):
    """Row n of the result ``(N, D)`` is row ``token[n]`` of ``x (T, D)``.

    ``row (T, K)`` says the inverse: where each token's copies lie.
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
    """Row t of the result ``(T, D)`` sums ``y[row[t, k]]`` over k: what `TakeRows` does going back.

    ``token (N,)`` says the inverse.
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
    """Number n of the result ``(N,)`` is that of copy ``copy[n]`` in ``x (T, K)``; ``row`` as above."""

    @staticmethod
    def forward(ctx, x_TK: Tensor, copy_N: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(row_TK)
        return select(x_TK.flatten(), copy_N)

    @staticmethod
    def backward(ctx, grad_N: Tensor):
        (row_TK,) = ctx.saved_tensors
        return grad_N[row_TK], None, None


def select(x_T: Tensor, index_N: Tensor) -> Tensor:
    """``x[index]``; 0 where there is nothing to take, as for nobody's row of a batch without tokens."""
    return x_T.index_select(0, index_N) if len(x_T) else x_T.new_zeros(len(index_N), *x_T.shape[1:])
