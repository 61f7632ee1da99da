"""Balance between the experts of a gate: the loss, the selection bias, and the budget of stops.

Shapes: T tokens, E experts that the gate sees, L gates.
"""

import torch
from torch import Tensor, nn

from smoe_fairseq.modules.routing import Routing
from smoe_fairseq.modules.strata import Strata


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


def average_null(asked_E: Tensor, null_experts: int, copy_experts: int = 0) -> Tensor:
    """The last ``null_experts`` of each row share what they were asked for: which of them is all the same.

    So do the ``copy_experts`` before them.
    """
    if copy_experts:
        head_E, null_M = asked_E.tensor_split([asked_E.shape[-1] - null_experts], -1)
        asked_E = torch.cat([average_null(head_E, copy_experts), null_M], -1)
    if not null_experts:
        return asked_E
    exact = torch.float32 if asked_E.device.type == "mps" else torch.float64  # MPS has no float64
    true_E, null_M = asked_E.to(exact).split([asked_E.shape[-1] - null_experts, null_experts], -1)
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


# How many strata tokens stop at on average, as a number that gates can learn by.
#
# Shapes: E experts that a gate sees, L strata.


def expected_stops(strata: Strata, routings: list[Routing]) -> Tensor:
    """Mean requested capacity of a pass, a scalar, with the gradient of the expected one.

    The recursion of the paper's section 3.3, ``N_L = 1``, ``N_i = 1 + sum_{j=i..L-1} s_ij N_{j+1}``, where
    ``s_ij`` is the share of the tokens at stratum i that go on behind stratum j. With the counted first
    choices it is the mean requested capacity exactly. They have no gradient; ``s_ij`` gets that of the mean
    probability which gate i gives to the experts of stratum j (straight through, as in the balance loss f is
    counted and p learns). So a probability is moved by ``N_{j+1}``, the stops that tokens behind j really
    make on average, and by the tokens that are there to move. The estimate is biased in two ways: a first
    choice is the most likely expert and not a drawn one, and a token that would go elsewhere is taken to go
    on like those that are there already.

    A stratum where no token stops counts as under uniform routing, and has no gradient.

    Args:
        routings: of each stratum's gate; gates see later strata.
    """
    last = routings[-1].probs_TE.new_ones(())
    stops = [last]  # N of the strata behind the one at hand
    for i in reversed(range(len(strata) - 1)):
        rest = Strata(strata.sizes[i:])
        share_L = _shares(routings[i], rest.sizes)
        here = 1 + (share_L[:-1] * torch.stack(stops)).sum()  # behind the last one there are none
        some = routings[i].active_T.any()
        stops.insert(0, torch.where(some, here, rest.expected_requested_capacity()))
    return stops[0]


def _shares(routing: Routing, sizes: tuple[int, ...]) -> Tensor:
    """By the strata that a gate sees, of these sizes: the tokens that choose it first, out of all."""
    probs_E = routing.mean_true_probs_E
    counted_E = routing.first_choices_E.to(probs_E.dtype) / routing.num_tokens
    counted_L, probs_L = (
        torch.stack([part.sum() for part in number_E.split(sizes)])
        for number_E in (counted_E, probs_E)
    )
    return counted_L + probs_L - probs_L.detach()
