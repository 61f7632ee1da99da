"""Adding rows to others without keeping them for the backward pass, as ``Tensor.index_add`` does."""

import torch
from torch import Tensor


class AddRows(torch.autograd.Function):
    """``x.index_add(0, index, y)``: row n of ``y (N, D)`` added to row ``index[n]`` of ``x (T, D)``."""

    @staticmethod
    def forward(ctx, x_TD: Tensor, index_N: Tensor, y_ND: Tensor) -> Tensor:
        ctx.save_for_backward(index_N)
        return x_TD.index_add(0, index_N, y_ND)

    @staticmethod
    def backward(ctx, grad_TD: Tensor):
        (index_N,) = ctx.saved_tensors
        return grad_TD, None, grad_TD.index_select(0, index_N)
