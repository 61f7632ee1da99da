"""The tokens that stand in one stratum, out of all T tokens of a block."""

import torch
from torch import Tensor

from smoe_fairseq.modules.rows import AddRows


class IndexedTokens:
    """Just those tokens, gathered: least work, but their number has to be known on the host.

    Args:
        here_T: which they are.
        number: of them.
    """

    active_T = None  # all that `take` returns

    def __init__(self, here_T: Tensor, number: int):
        self.all = number == len(here_T)
        if not self.all:
            self.index = positions(here_T, number)

    def take(self, x_T: Tensor) -> Tensor:
        return x_T if self.all else x_T.index_select(0, self.index)

    def add(self, x_T: Tensor, y: Tensor) -> Tensor:
        y = y.to(x_T.dtype)
        return x_T + y if self.all else AddRows.apply(x_T, self.index, y)

    def replace(self, x_T: Tensor, y: Tensor) -> Tensor:
        y = y.to(x_T.dtype)
        return y if self.all else x_T.index_copy(0, self.index, y)


class MaskedTokens:
    """All T rows with a mask of those that count: no shape depends on the routing."""

    def __init__(self, here_T: Tensor):
        self.active_T = here_T

    def take(self, x_T: Tensor) -> Tensor:
        return x_T

    def add(self, x_T: Tensor, y: Tensor) -> Tensor:
        return x_T + torch.where(self._rows(x_T), y.to(x_T.dtype), 0)

    def replace(self, x_T: Tensor, y: Tensor) -> Tensor:
        return torch.where(self._rows(x_T), y.to(x_T.dtype), x_T)

    def _rows(self, x_T: Tensor) -> Tensor:
        return self.active_T.view(-1, *[1] * (x_T.dim() - 1))


def positions(mask_T: Tensor, number: int) -> Tensor:
    """``mask.nonzero()`` of a mask that holds ``number`` times, which is not asked of the device."""
    place_T = mask_T.cumsum(0).sub_(1).masked_fill_(~mask_T, number)
    index = place_T.new_empty(number + 1)
    return index.scatter_(0, place_T, torch.arange(len(mask_T), device=mask_T.device))[:number]
