"""Base classes of gates, and biases of the scores.

Shapes: T tokens, D embedding, E experts that the gate sees, M free experts behind them.
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smoe_fairseq.modules.registry import GATES, parse_numbers
from smoe_fairseq.modules.routing import Capacity, Places, Routing, rank_within_expert
from smoe_fairseq.modules.torch_features import without_autocast


class Gate(nn.Module):
    """Routes the tokens of one stratum. Subclasses implement `decide`, and set ``top_k``, K.

    The class says what the gate is: options, checks, costs, statistics, conversion of checkpoints and tables
    read its attributes, and nothing else knows gates by name.

    Args:
        config: the block's `MoEConfig`.
        embed_dim: D.
        num_experts: E, the experts that the gate sees.
        own_experts: how many of them, from the first on, are in its own stratum.
    """

    summary: str = ""  # how experts are chosen, for the help of the option ``gate``
    # Options and inputs.
    options: frozenset[str] = frozenset()  # those that it reads and not every gate reads
    # Its own, with their defaults, which ``gate_options`` changes.
    numbers: Mapping[str, float] = {}
    default_capacity: float = 2.0  # default of ``capacity_factor``
    needs_capacity: bool = False  # whether experts choose ``capacity_factor * T / E`` tokens
    skips_tokens: bool = False  # whether experts must not take all tokens
    extra_input: str | None = None  # input per token besides the embedding: "id" or "sentence"
    single_stratum: bool = False  # whether it supports only one stratum
    in_decoder: str | None = None  # the gate that a decoder has in its place; None: the same
    decoder_options: frozenset[str] = frozenset()  # those that this other gate reads
    # Experts per token, see also `experts_per_token`.
    any_number: bool = False  # whether a token may have all experts, or none; K is E
    ordered: bool = True  # whether the choices of a token are ordered, best first
    learns_num_experts: bool = False  # whether the mean number of experts per token is learnt
    target: int = 1  # experts per token, where their number is learnt
    # Training.
    has_balance_loss: bool = False
    has_logits: bool = True  # whether its routings have them, for the z-loss
    has_entropy_loss: bool = False
    own_loss: str = ""  # the name in the log of the loss in its routings; empty: they have none
    learner: str = ""  # the submodule that learns from counts by its `update`, not by gradient
    learns_by_counts: bool = False  # whether every gate of this class has a learner
    shares_counts: bool = False  # whether all gates of a model learn from the sum of their counts
    # Checkpoints.
    can_upcycle: bool = False  # whether copies of an FFN as experts compute what the FFN does
    unprunable: str = ""  # why no expert can be removed; empty: experts can
    weights_depend_on_all: bool = False  # whether weights depend on experts that are not chosen

    def __init__(self, config, embed_dim: int, num_experts: int, own_experts: int):
        super().__init__()
        self.num_experts = num_experts
        self.numbers = {**self.numbers, **parse_numbers(config.gate_options, self.numbers)}

    @classmethod
    def experts_per_token(cls, config, num_experts: int) -> float:
        """Experts that compute a token, if all E are equally likely, or the target if the number is learnt.

        Args:
            config: the block's options.
        """
        return float(min(config.top_k, num_experts)) if "top_k" in cls.options else 1.0

    @property
    def min_experts(self) -> int:
        """The fewest experts that it has to see."""
        return self.target

    def supports(self, execution: str) -> bool:
        """Whether the execution "fused" or "inference" computes this gate, with options that it supports.

        The general one computes all.
        """
        return False

    def forward(self, x_TD: Tensor, active_T: Tensor | None = None, *extra: Tensor) -> Routing:
        """Route the active tokens (None: all); ``extra`` as in `decide`."""
        if active_T is None:
            active_T = x_TD.new_ones(x_TD.shape[0], dtype=torch.bool)
        return self.decide(x_TD, active_T, *extra)

    def decide(self, x_TD: Tensor, active_T: Tensor, *extra: Tensor) -> Routing:
        """Route the active tokens; ``extra`` is the `extra_input`, if the gate has one."""
        raise NotImplementedError

    @property
    def num_observed(self) -> int:
        """Length of ``observed_N`` of its routings; 0: the gate has no learner."""
        learner = getattr(self, self.learner, None)
        return 0 if learner is None else learner.num_observed

    def update(self, observed_N: Tensor) -> None:
        """Call it once per optimizer step, with the sum of its routings' ``observed_N``."""
        if self.num_observed:
            getattr(self, self.learner).update(observed_N)


GATES.base = Gate


class LinearGate(Gate):
    """Scores experts by ``W x`` (the logits of the paper's eq. 2)."""

    def __init__(self, config, embed_dim: int, num_experts: int, own_experts: int):
        super().__init__(config, embed_dim, num_experts, own_experts)
        self.weight = nn.Parameter(torch.empty(num_experts, embed_dim))
        self.init_scale = config.gate_init_scale
        self.reset_parameters()

    def reset_parameters(self):
        draw_as_linear(self.weight, self.init_scale)

    def logits(self, x_TD: Tensor) -> Tensor:
        """``W x`` in at least float32, since half precision flips close choices."""
        return wide_linear(x_TD, self.weight)

    def checked_logits(self, x_TD: Tensor) -> Tensor:
        """`logits`, which plugins replace; raises ValueError unless there is one per token and expert."""
        experts = self.num_experts + getattr(self, "free_experts", 0)
        logits_TE, expected = self.logits(x_TD), (x_TD.shape[0], experts)
        if logits_TE.shape != expected:
            shapes = f"{tuple(logits_TE.shape)}, expected {expected}, of tokens and experts"
            raise ValueError(f"{type(self).__name__}.logits returned the shape {shapes}")
        return logits_TE


def draw_as_linear(weight: nn.Parameter, scale: float) -> None:
    """Initial weights, ``scale`` times those of ``nn.Linear``."""
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
    with torch.no_grad():
        weight.mul_(scale)


def wide_linear(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    dtype = torch.promote_types(x_TD.dtype, torch.float32)
    with without_autocast(x_TD.device):
        return F.linear(x_TD.to(dtype), weight_ED.to(dtype))


_MAX_BIAS = 1e4  # exp(-1e4) is 0, and logits still keep their order when it is added


class ExitBias(nn.Module):
    """In evaluation, adds ``bias`` to the logits of experts in later strata.

    A token whose first choice is in a later stratum skips the strata between, so a positive bias lowers the
    requested capacity, and a negative one raises it. With infinity, no token chooses an expert of the
    gate's own stratum unless it is the last; with minus infinity, none of a later stratum.

    Args:
        own_experts: how many of the gate's experts, from the first on, are in its own stratum.
        num_experts: E.
        bias: an attribute that may be changed; 0: none.
    """

    def __init__(self, own_experts: int, num_experts: int, bias: float = 0.0):
        super().__init__()
        self.own_experts, self.num_experts, self.bias = own_experts, num_experts, bias

    @property
    def is_active(self) -> bool:
        """Whether the bias has an effect in this mode at this gate."""
        return not self.training and self.bias != 0 and self.own_experts < self.num_experts

    def forward(self, logits_TE: Tensor) -> Tensor:
        """``(T, E + M)``, as the input; null experts are in no stratum."""
        if not self.is_active:
            return logits_TE
        bias = min(max(self.bias, -_MAX_BIAS), _MAX_BIAS)
        later = [self.own_experts, self.num_experts]
        own_T, later_T, null_T = logits_TE.tensor_split(later, dim=1)
        # Shifted so that the largest bias is 0, lest the highest logits lose digits.
        least, most = min(bias, 0), max(bias, 0)
        return torch.cat([own_T - most, later_T + least, null_T - most], dim=1)


class ExpertBias(nn.Module):
    """A bias of the scores that changes the choice of experts but not their weights (Wang et al. 2024).

    After each update it rises by ``step`` for experts with less than the mean number of copies, and falls
    for those with more. It is stored as a whole number of steps, which stays exact in half precision and
    equal on all ranks.
    """

    def __init__(self, num_experts: int, step: float = 1e-3):
        super().__init__()
        self.step, self.num_observed = step, num_experts
        self.register_buffer("steps", torch.zeros(num_experts, dtype=torch.long))

    def value(self) -> Tensor:
        """``(E,)``, float32, with mean 0."""
        steps_E = self.steps.float()
        return self.step * (steps_E - steps_E.mean())

    def forward(self, probs_TE: Tensor) -> Tensor:
        return probs_TE + self.value()

    def update(self, copies_E: Tensor) -> None:
        """Call it once per update, with the number of choices ``(E,)`` in all of its batches."""
        copies_E = copies_E.to(self.steps)
        self.steps += (copies_E.sum() - copies_E * len(copies_E)).sign()


def route_to_one(
    expert_T: Tensor,
    weight_T1: Tensor,
    active_T: Tensor,
    probs_TE: Tensor,
    logits_TE: Tensor | None = None,
) -> Routing:
    """The routing of a gate with one expert per token and no capacity; K is 1."""
    choice_T1, active_T1 = expert_T.unsqueeze(1), active_T.unsqueeze(1)
    num_experts = probs_TE.shape[1]
    ranked = rank_within_expert(choice_T1.masked_fill(~active_T1, num_experts), num_experts)
    places = Places(ranked[0], None, ranked[1])
    return Routing.of(choice_T1, weight_T1, active_T1, places, active_T, probs_TE, logits_TE)


class AnyNumberGate(LinearGate):
    """Base of gates that choose any number of experts per token; K is E."""

    any_number = True
    learns_num_experts = True
    default_capacity = 0.0
    options = frozenset({"capacity_factor", "eval_capacity_factor", "drop_order"})

    def __init__(self, config, embed_dim: int, num_experts: int, own_experts: int):
        super().__init__(config, embed_dim, num_experts, own_experts)
        self.capacity = Capacity(config)
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
        """The routing; arguments as in `Routing.of`.

        Args:
            chosen_TE: the valid choices.
            logits_TE: their softmax gives the probabilities.
        """
        probs_TE = logits_TE.softmax(dim=-1)
        expert_TE = choice_TE.masked_fill(~chosen_TE, self.num_experts)
        places = self.capacity(expert_TE, probs_TE, active_T)
        scores = active_T, probs_TE, logits_TE, first_choice_T
        return Routing.of(choice_TE, weight_TE, chosen_TE, places, *scores)
