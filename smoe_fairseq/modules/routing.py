"""What a gate decides, whatever its kind, and the losses that keep gates in order.

Shapes: T tokens, E experts that the gate sees, K choices per token.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """What a gate decided for T tokens: all that a block needs of it.

    ``expert_TK`` numbers the experts that the gate sees, best first; ``E`` stands for "no expert": the
    copy was dropped, not sampled, or its token is not active. ``weight_TK`` is 0 there.
    """

    expert_TK: Tensor
    weight_TK: Tensor
    rank_TK: Tensor  # how many copies that the same expert keeps come before
    kept_E: Tensor  # copies that each expert keeps
    first_choice_T: Tensor  # before dropping: it decides where the token stands next
    first_choices_E: Tensor  # active tokens per first choice
    chosen_K: Tensor  # copies chosen
    dropped_TK: Tensor  # of those, copies beyond their expert's capacity
    balance_loss: Tensor  # scalar: E * sum_e f_e p_e
    z_loss: Tensor  # scalar: mean squared log of the softmax's denominator


def count(index_N: Tensor, size: int) -> Tensor:
    """How often each of ``0..size-1`` occurs, without waiting for the device as ``bincount`` does."""
    counts = index_N.new_zeros(size + 1)
    return counts.scatter_add_(0, index_N, torch.ones_like(index_N))[:size]


def balance_loss(probs_TE: Tensor, active_T: Tensor, first_choices_E: Tensor) -> Tensor:
    """``E * sum_e f_e p_e``: 1 when balanced, up to E when not, 0 without tokens (paper, equation 3)."""
    num_tokens = active_T.sum().clamp(min=1)
    fraction_E = first_choices_E.to(probs_TE.dtype) / num_tokens
    mean_probs_E = (probs_TE * active_T.unsqueeze(1)).sum(0) / num_tokens
    return probs_TE.shape[1] * (fraction_E * mean_probs_E).sum()


def z_loss(logits_TE: Tensor, active_T: Tensor) -> Tensor:
    """Mean of ``logsumexp(logits)^2`` over the tokens, small when logits are (Zoph et al. 2022, eq. 5)."""
    squared_T = logits_TE.logsumexp(dim=-1).square()
    return (squared_T * active_T).sum() / active_T.sum().clamp(min=1)
