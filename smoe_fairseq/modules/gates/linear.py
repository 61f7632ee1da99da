"""What gates share: the linear map that scores the experts, and biases of the scores.

Shapes: T tokens, D embedding, E experts that the gate sees, M free experts behind them.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smoe_fairseq.modules.routing import Capacity, Places, Routing
from smoe_fairseq.modules.torch_features import without_autocast


class Gate(nn.Module):
    """What the rest of the package asks a gate for.

    A gate also has ``top_k`` (most experts of a token) and ``forward(x_TD, active_T=None)``, which routes the
    tokens that ``active_T`` marks (None: all) and returns a `Routing`.
    """

    extra_input: str | None = None  # a label per token that `forward` takes: its "id" or "sentence"
    takes_top_k: bool = False  # whether the option ``top_k`` is its number of experts
    needs_capacity: bool = False  # whether ``capacity_factor`` says how many tokens an expert takes
    of_one_stratum: bool = False  # whether it goes with a single stratum alone
    learns_number: bool = False  # whether the mean number of experts per token is learnt
    has_balance_loss: bool = False
    default_capacity: float = 2.0  # ``capacity_factor`` where none is given
    learns_by_counts: bool = False  # whether a gate of this kind always has an `update`
    observes: int = 0  # how many numbers of a `Routing` `update` takes; 0: it does nothing
    observes_together: bool = False  # whether all gates of a model take the sum of these numbers

    def update(self, observed_N: Tensor) -> None:
        """Once per optimizer step, with the sum of its routings' ``observed_N``, where it `observes`."""

    @classmethod
    def of_config(cls, config, embed_dim: int, num_experts: int, own_experts: int) -> "Gate":
        """The gate of one stratum.

        Args:
            config: a `MoEConfig`.
            num_experts: E, the experts that the gate sees.
            own_experts: how many of the first of them are of its own stratum.
        """
        raise NotImplementedError


class LinearGate(Gate):
    """Scores ``num_experts`` experts by ``W x`` (the logits of the paper's eq. 2); the base of most gates.

    Args:
        embed_dim: D.
        num_experts: E, the experts that this gate sees.
        init_scale: of the initial weights, over those of ``nn.Linear``.
    """

    def __init__(self, embed_dim: int, num_experts: int, init_scale: float = 1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, embed_dim))
        self.num_experts = num_experts
        self.init_scale = init_scale
        self.reset_parameters()

    @classmethod
    def of_config(cls, config, embed_dim: int, num_experts: int, own_experts: int) -> "LinearGate":
        """As of `Gate`."""
        return cls(embed_dim, num_experts, config.gate_init_scale)

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


# The routing of gates that give each token one expert, and of those that give any number.
#
# Shapes: T tokens, E experts; K is 1, or E.


def route_to_one(
    expert_T: Tensor,
    weight_T1: Tensor,
    active_T: Tensor,
    probs_TE: Tensor,
    logits_TE: Tensor | None = None,
) -> Routing:
    """The routing of a gate that gives each token one expert and limits none; K is 1."""
    choice_T1, active_T1 = expert_T.unsqueeze(1), active_T.unsqueeze(1)
    num_experts = probs_TE.shape[1]
    places = Places.without_limit(choice_T1.masked_fill(~active_T1, num_experts), num_experts)
    return Routing.of(choice_T1, weight_T1, active_T1, places, active_T, probs_TE, logits_TE)


class AnyNumberGate(LinearGate):
    """Gives each token any number of experts; K is E.

    Args:
        capacity: of the experts; all first choices come before all second ones, and so on.
        exit_bias: of the logits, see `ExitBias`.
    """

    learns_number = True
    default_capacity = 0.0

    @classmethod
    def of_config(cls, config, embed_dim: int, num_experts: int, own_experts: int):
        return cls(
            embed_dim,
            num_experts,
            Capacity.of_config(config),
            config.gate_init_scale,
            ExitBias(own_experts, num_experts, config.exit_bias),
            **cls.own_options(config),
        )

    @classmethod
    def own_options(cls, config) -> dict:
        """The arguments of this kind of gate alone, from a `MoEConfig`."""
        raise NotImplementedError

    def __init__(
        self,
        embed_dim: int,
        num_experts: int,
        capacity: Capacity,
        init_scale: float = 1.0,
        exit_bias: ExitBias | None = None,
    ):
        super().__init__(embed_dim, num_experts, init_scale)
        self.capacity = capacity
        self.exit_bias = exit_bias or ExitBias(num_experts, num_experts)
        self.top_k = num_experts  # at most

    def route(
        self,
        choice_TE: Tensor,
        weight_TE: Tensor,
        chosen_TE: Tensor,
        active_T: Tensor,
        logits_TE: Tensor,
    ) -> Routing:
        """The routing.

        Args:
            choice_TE: the experts of each token, the best first, with their ``weight_TE``.
            chosen_TE: of these, those that the token goes to.
            logits_TE: their softmax are the probabilities, and the highest one is the first choice.
        """
        probs_TE = logits_TE.softmax(dim=-1)
        asked_TE = choice_TE.masked_fill(~chosen_TE, self.num_experts)
        places = self.capacity(asked_TE, probs_TE, active_T)
        of_experts = active_T, probs_TE, logits_TE, logits_TE.argmax(1)
        return Routing.of(choice_TE, weight_TE, chosen_TE, places, *of_experts)
