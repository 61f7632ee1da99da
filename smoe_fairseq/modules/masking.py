"""Regularisers that leave expert outputs out in training (NLLB team 2022, section 6.2)."""

import torch
from torch import Tensor


def mask_outputs(x: Tensor, p: float, training: bool) -> Tensor:
    """Each element of ``x`` becomes 0 with probability ``p`` in training; evaluation scales by ``1 - p``.

    On the weights of copies ``(T, K)`` it is expert output masking (EOM), on a column ``(T, 1)`` of
    ones that multiplies the mixed outputs final output masking (FOM).
    """
    if p == 0:
        return x
    if training:
        return x * (torch.rand_like(x) >= p)
    return x * (1 - p)


def drop_gating(padding_mask: Tensor, p: float, training: bool) -> Tensor:
    """With probability ``p`` in training, the mask that leaves every token of this batch out.

    Gating dropout, the variant that skips gate and experts (Liu et al. 2022): no token is routed and
    all keep their residual. Every collective call still takes place, so ranks need not agree.
    """
    if not training or p == 0:
        return padding_mask
    return padding_mask | (torch.rand((), device=padding_mask.device) < p)
