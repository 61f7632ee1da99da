"""What a device's own kernels keep where torch's meta device has only their slower equals.

On the meta device attention is two products with a softmax between them, and dropout a product with numbers;
real devices compute the first in one kernel, and GPUs keep one byte per element of the second. Sources:
torch's `scaled_dot_product_attention` and `native_dropout`.

Shapes: B sentences, H heads, S positions of queries, D dimensions of a head.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor


@contextmanager
def fused_kernels(gpu: bool) -> Iterator[None]:
    """Within it, what `torch.nn.functional` computes on the meta device keeps what a GPU or a CPU keeps."""
    attention = F.scaled_dot_product_attention

    def fused_attention(q, k, v, attn_mask=None, dropout_p=0.0, *others, **options):
        if dropout_p > 0 and not gpu:  # a CPU's kernel has no dropout
            return attention(q, k, v, attn_mask, dropout_p, *others, **options)
        return _Attention.apply(q, k, v, attn_mask)

    def fused_dropout(x, p=0.5, training=True, inplace=False):
        return _Dropout.apply(x) if training and p > 0 else x

    with patch.object(F, "scaled_dot_product_attention", fused_attention):
        with patch.object(F, "dropout", fused_dropout if gpu else F.dropout):
            yield


class _Attention(torch.autograd.Function):
    """``(B, H, S, D)``; beside inputs and output, the sum of each softmax is kept."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        batch, heads, length, dim = q.shape
        out = q.new_empty(batch, length, heads, dim).transpose(1, 2)
        sums = q.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, sums, mask)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        return *(torch.empty_like(x) for x in ctx.saved_tensors[:3]), None


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (kept,) = ctx.saved_tensors
        return grad * kept
