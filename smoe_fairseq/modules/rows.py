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


class WeightedSum(torch.autograd.Function):
    """Row t of the result ``(T, D)`` sums ``weight[t, k] * y[row[t, k]]`` over k.

    ``copy (N,)`` says the inverse: row n is of copy ``t * K + k``.
    """

    @staticmethod
    def forward(ctx, y_ND: Tensor, weight_TK: Tensor, row_TK: Tensor, copy_N: Tensor) -> Tensor:
        ctx.save_for_backward(y_ND, weight_TK, row_TK, copy_N)
        return F.embedding_bag(row_TK, y_ND, per_sample_weights=weight_TK, mode="sum")

    @staticmethod
    def backward(ctx, grad_TD: Tensor):
        y_ND, weight_TK, row_TK, copy_N = ctx.saved_tensors
        grad_ND = select(grad_TD, copy_N // row_TK.shape[1])
        weight_grad_N = torch.linalg.vecdot(grad_ND, y_ND)
        weight_N = select(weight_TK.flatten(), copy_N)
        return grad_ND.mul_(weight_N.unsqueeze(1)), weight_grad_N[row_TK], None, None


def select(x_T: Tensor, index_N: Tensor) -> Tensor:
    """``x[index]``; 0 where there is nothing to take, as for nobody's row of a batch without tokens."""
    return x_T.index_select(0, index_N) if len(x_T) else x_T.new_zeros(len(index_N), *x_T.shape[1:])
