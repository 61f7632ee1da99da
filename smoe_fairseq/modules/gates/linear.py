"""What gates share: the linear map that scores the experts, and biases of the scores.

Shapes: T tokens, D embedding, E experts that the gate sees, M free experts behind them.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smoe_fairseq.modules.routing import Capacity, Places, Routing, rank_within_expert
from smoe_fairseq.modules.torch_features import without_autocast


class Gate(nn.Module):
    """Routes the tokens of one stratum; what the rest of the package asks a gate for.

    A gate also has ``top_k`` (most experts of a token), and `decide` routes.

    Args:
        config: the block's `MoEConfig`.
        embed_dim: D.
        num_experts: E, the experts that the gate sees.
        own_experts: how many of the first of them are of its own stratum.
    """

    extra_input: str | None = None  # a label per token that `forward` takes: its "id" or "sentence"
    takes_top_k: bool = False  # whether the option ``top_k`` is its number of experts
    needs_capacity: bool = False  # whether ``capacity_factor`` says how many tokens an expert takes
    of_one_stratum: bool = False  # whether it goes with a single stratum alone
    learns_number: bool = False  # whether the mean number of experts per token is learnt
    has_balance_loss: bool = False
    default_capacity: float = 2.0  # ``capacity_factor`` where none is given
    learner: str = ""  # the part that learns from counts, by its `update`, and not by gradient
    learns_by_counts: bool = False  # whether a gate of this kind always has one
    observes_together: bool = False  # whether all gates of a model take the sum of the counts

    def __init__(self, config, embed_dim: int, num_experts: int, own_experts: int):
        super().__init__()
        self.num_experts = num_experts

    def forward(self, x_TD: Tensor, active_T: Tensor | None = None, *extra: Tensor) -> Routing:
        """Route the tokens that ``active`` marks (all when None); ``extra`` as of `decide`."""
        if active_T is None:
            active_T = x_TD.new_ones(len(x_TD), dtype=torch.bool)
        return self.decide(x_TD, active_T, *extra)

    def decide(self, x_TD: Tensor, active_T: Tensor, *extra: Tensor) -> Routing:
        """`forward` with a mask; ``extra`` is the `extra_input`, of a gate that has one."""
        raise NotImplementedError

    @property
    def observes(self) -> int:
        """How many numbers of a `Routing` `update` takes; 0: it does nothing."""
        learner = getattr(self, self.learner, None)
        return 0 if learner is None else learner.observes

    def update(self, observed_N: Tensor) -> None:
        """Once per optimizer step, with the sum of its routings' ``observed_N``."""
        if self.observes:
            getattr(self, self.learner).update(observed_N)


class LinearGate(Gate):
    """Scores experts by ``W x`` (the logits of the paper's eq. 2); the base of most gates."""

    def __init__(self, config, embed_dim: int, num_experts: int, own_experts: int):
        super().__init__(config, embed_dim, num_experts, own_experts)
        self.weight = nn.Parameter(torch.empty(num_experts, embed_dim))
        self.init_scale = config.gate_init_scale
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
        self.own_experts, self.num_experts, self.bias = own_experts, num_experts, bias

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
        self.step, self.observes = step, num_experts
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
    ranked = rank_within_expert(choice_T1.masked_fill(~active_T1, num_experts), num_experts)
    places = Places(ranked[0], None, ranked[1])
    return Routing.of(choice_T1, weight_T1, active_T1, places, active_T, probs_TE, logits_TE)


class AnyNumberGate(LinearGate):
    """Gives each token any number of experts; K is E.

    Where experts have a capacity, all first choices come before all second ones, and so on.
    """

    learns_number = True
    default_capacity = 0.0

    def __init__(self, config, embed_dim: int, num_experts: int, own_experts: int):
        super().__init__(config, embed_dim, num_experts, own_experts)
        self.capacity = Capacity.of_config(config)
        self.exit_bias = ExitBias(own_experts, num_experts, config.exit_bias)
        self.top_k = num_experts  # at most

    def route(
        self,
        choice_TE: Tensor,
        weight_TE: Tensor,
        chosen_TE: Tensor,
        active_T: Tensor,
        logits_TE: Tensor,
        first_choice_T: Tensor | None = None,
    ) -> Routing:
        """The routing; the others as of `Routing.of`.

        Args:
            chosen_TE: the choices that the token goes to.
            logits_TE: their softmax are the probabilities.
        """
        probs_TE = logits_TE.softmax(dim=-1)
        asked_TE = choice_TE.masked_fill(~chosen_TE, self.num_experts)
        places = self.capacity(asked_TE, probs_TE, active_T)
        of_experts = active_T, probs_TE, logits_TE, first_choice_T
        return Routing.of(choice_TE, weight_TE, chosen_TE, places, *of_experts)
