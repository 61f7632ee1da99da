"""How many strata tokens stop at on average, as a number that gates can learn by.

Shapes: E experts that a gate sees, L strata.
"""

import torch
from torch import Tensor

from smoe_fairseq.modules.routing import Routing
from smoe_fairseq.modules.strata import Strata


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
