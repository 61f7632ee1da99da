"""How the experts of a gate are kept equally busy: a loss, or a bias that selection alone sees.

Shapes: T tokens, E experts that the gate sees, L gates.
"""

import torch
from torch import Tensor, nn

BALANCES = ("loss", "bias")
BALANCED_OVER = ("batch", "update")


def balance_loss(asked_LE: Tensor, mean_probs_LE: Tensor, visible_L: Tensor) -> Tensor:
    """``mean_L E sum_e f_e p_e``, a scalar (paper, equation 3); f may be of more batches than p.

    f of all batches of an update lets experts be busy with different ones (Qiu et al. 2025).

    Args:
        asked_LE: tokens that asked for each expert; f is their fraction. 0 for experts that a gate does
            not see.
        mean_probs_LE: p, the mean probability.
        visible_L: how many experts each gate sees.
    """
    asked_LE = asked_LE.to(mean_probs_LE.dtype)
    fraction_LE = asked_LE / asked_LE.sum(1, keepdim=True).clamp(min=1)
    return (visible_L * (fraction_LE * mean_probs_LE).sum(1)).mean()


def average_null(asked_E: Tensor, null_experts: int) -> Tensor:
    """The last ``null_experts`` of each row share what they were asked for: which of them is all the same."""
    if not null_experts:
        return asked_E
    true_E, null_M = asked_E.double().split([asked_E.shape[-1] - null_experts, null_experts], -1)
    return torch.cat([true_E, null_M.mean(-1, keepdim=True).expand_as(null_M)], dim=-1)


class ExpertBias(nn.Module):
    """Added to the scores of a gate's experts when it selects, not when it weighs (Wang et al. 2024).

    After each update the experts with less than the mean number of copies go up by ``step``, those with more
    go down. What is kept is how many steps each has made, in whole numbers: they stay exact in a model of
    half precision, and the same in all processes.
    """

    def __init__(self, num_experts: int, step: float = 1e-3):
        super().__init__()
        self.step = step
        self.register_buffer("steps", torch.zeros(num_experts, dtype=torch.long))

    def value(self) -> Tensor:
        """``(E,)``, float32, with mean 0."""
        steps_E = self.steps.float()
        return self.step * (steps_E - steps_E.mean())

    def forward(self, probs_TE: Tensor) -> Tensor:
        return probs_TE + self.value()

    def update(self, asked_E: Tensor) -> None:
        """Once per update, with the copies ``(E,)`` that asked for each expert in all of its batches."""
        asked_E = asked_E.to(self.steps)
        self.steps += (asked_E.sum() - asked_E * len(asked_E)).sign()
