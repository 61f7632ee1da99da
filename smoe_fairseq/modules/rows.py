"""Sums of rows that keep no more for the backward pass than they need, and take no more in it.

Shapes: N rows for T tokens, D embedding.
"""

import torch
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


class WeightedSum(torch.autograd.Function):
    """Row t of the result ``(T, D)`` sums ``weight[n] * y[n]`` over the rows with ``token[n] == t``."""

    @staticmethod
    def forward(ctx, y_ND: Tensor, weight_N: Tensor, token_N: Tensor, num_tokens: int) -> Tensor:
        ctx.save_for_backward(y_ND, weight_N, token_N)
        # At most two terms fall on a row, so the order of atomic additions cannot change the sum.
        return y_ND.new_zeros(num_tokens, y_ND.shape[1]).index_add_(
            0, token_N, y_ND * weight_N.unsqueeze(1)
        )

    @staticmethod
    def backward(ctx, grad_TD: Tensor):
        y_ND, weight_N, token_N = ctx.saved_tensors
        grad_ND = grad_TD.index_select(0, token_N)
        weight_grad_N = torch.linalg.vecdot(grad_ND, y_ND)
        return grad_ND.mul_(weight_N.unsqueeze(1)), weight_grad_N, None, None
