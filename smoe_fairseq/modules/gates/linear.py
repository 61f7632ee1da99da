"""What gates that score their experts share: a linear map without bias, in at least float32.

Shapes: T tokens, D embedding, E experts that the gate sees.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smoe_fairseq.modules.torch_features import without_autocast


class LinearGate(nn.Module):
    """Scores ``num_experts`` experts by ``W x`` (paper, equation 1).

    Args:
        embed_dim: D.
        num_experts: E, the experts that this gate sees.
        init_scale: of the initial weights, over those of ``nn.Linear``.
    """

    asks_for: str | None = (
        None  # beside tokens and mask, of each token: nothing, its "id" or "sentence"
    )
    learns_number: bool = False  # how many experts a token has, on average

    def __init__(self, embed_dim: int, num_experts: int, init_scale: float = 1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, embed_dim))
        self.num_experts = num_experts
        self.init_scale = init_scale
        self.reset_parameters()

    def reset_parameters(self):
        draw_as_linear(self.weight, self.init_scale)

    def logits(self, x_TD: Tensor) -> Tensor:
        """``W x`` in at least float32: half precision flips close choices."""
        return wide_linear(x_TD, self.weight)


def draw_as_linear(weight: nn.Parameter, scale: float) -> None:
    """Initial weights, ``scale`` times those of ``nn.Linear``."""
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
    with torch.no_grad():
        weight.mul_(scale)


def wide_linear(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    dtype = torch.promote_types(x_TD.dtype, torch.float32)
    with without_autocast(x_TD.device):
        return F.linear(x_TD.to(dtype), weight_ED.to(dtype))


def all_active(x_TD: Tensor) -> Tensor:
    """The mask ``(T,)`` where none is given."""
    return x_TD.new_ones(x_TD.shape[0], dtype=torch.bool)
