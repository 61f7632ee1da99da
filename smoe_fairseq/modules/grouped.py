"""Products of each expert's rows with its weights, in one kernel where torch has one.

torch 2.13 computes `torch.nn.functional.grouped_mm` in float32 and float16 too, but only knows the shape
of its result, which `torch.compile` needs, in bfloat16.

Shapes: N rows sorted by expert, I inputs, O outputs, E experts.
"""

import torch
from torch import Tensor

from smoe_fairseq.modules import torch_features


def can_group(weight: Tensor) -> bool:
    """Whether torch has a grouped product for such weights: rows of a multiple of 16 bytes."""
    per_16_bytes = 16 // weight.element_size()
    sizes_fit = all(size % per_16_bytes == 0 for size in weight.shape[1:])
    return sizes_fit and torch_features.has_grouped_mm(weight)


def grouped_mm(x_NI: Tensor, w_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """``x W_e`` for the rows of each expert ``(N, O)``; rows past the last end are uninitialised.

    Where torch has no grouped product, one after the other, and the ends are read on the host.
    """
    if not can_group(w_EIO):
        sizes = torch.diff(ends_E, prepend=ends_E.new_zeros(1)).tolist()
        *rows, rest = x_NI.split([*sizes, len(x_NI) - sum(sizes)])
        products = [x @ w_IO for x, w_IO in zip(rows, w_EIO, strict=True)]
        return torch.cat([*products, rest.new_zeros(len(rest), w_EIO.shape[2])])
    if torch.compiler.is_compiling() and x_NI.dtype != torch.bfloat16:
        return _traced(x_NI, w_EIO, ends_E)
    return torch_features.grouped_mm(x_NI, w_EIO, offs=ends_E)


@torch.library.custom_op("smoe_fairseq::grouped_mm", mutates_args=())
def _traced(x: Tensor, w: Tensor, ends_E: Tensor) -> Tensor:
    return torch_features.grouped_mm(x, w, offs=ends_E)


@_traced.register_fake
def _(x, w, ends_E):
    if w.dim() == 3:
        return x.new_empty(x.shape[0], w.shape[2])
    return x.new_empty(ends_E.shape[0], x.shape[0], w.shape[1])  # the gradient of weights


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_NO):
    x_NI, w_EIO, ends_E = ctx.saved_tensors
    x_grad_NI = _traced(grad_NO, w_EIO.transpose(1, 2), ends_E)
    return x_grad_NI, _traced(x_NI.t(), grad_NO, ends_E), None


_traced.register_autograd(_backward, setup_context=_save)
