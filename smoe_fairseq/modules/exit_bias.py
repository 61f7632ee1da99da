"""A knob for evaluation: fewer stops, or more, of a model as it is.

Shapes: T tokens, E experts that the gate sees, M null experts behind them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_MOST = 1e4  # exp(-1e4) is 0; logits moved by it keep their order among themselves


class ExitBias(nn.Module):
    """In evaluation adds ``bias`` to the logits of the experts of later strata than the gate's own.

    A token whose first choice is in a later stratum passes by those between, so that above 0 tokens stop
    less often, and below 0 more often. Infinity leaves the gate's own stratum out where there is a later one,
    minus infinity all later ones: of these no expert has any weight then.

    Args:
        own_experts: how many of the first of the gate's experts are of its own stratum.
        num_experts: E.
        bias: 0: logits are left as they are; an attribute that may be changed.
    """

    def __init__(self, own_experts: int, num_experts: int, bias: float = 0.0):
        super().__init__()
        self.own_experts = own_experts
        self.num_experts = num_experts
        self.bias = bias

    @property
    def acts(self) -> bool:
        """In this mode, at this gate."""
        return not self.training and self.bias != 0 and self.own_experts < self.num_experts

    def forward(self, logits_TE: Tensor) -> Tensor:
        """``(T, E + M)`` as is the input; null experts are of no stratum."""
        if not self.acts:
            return logits_TE
        bias = min(max(self.bias, -_MOST), _MOST)
        later = [self.own_experts, self.num_experts]
        own_T, later_T, null_T = logits_TE.tensor_split(later, dim=1)
        # All logits may be moved alike: the largest bias is 0, or the highest logits would lose digits.
        least, most = min(bias, 0), max(bias, 0)
        return torch.cat([own_T - most, later_T + least, null_T - most], dim=1)


def exit_biases_of(model: nn.Module) -> list[ExitBias]:
    return [module for module in model.modules() if isinstance(module, ExitBias)]


@contextmanager
def exit_bias(model: nn.Module, bias: float) -> Iterator[None]:
    """Within it all gates of a model have this one."""
    before = [(each, each.bias) for each in exit_biases_of(model)]
    for each, _ in before:
        each.bias = bias
    try:
        yield
    finally:
        for each, value in before:
            each.bias = value
