"""The top-k gate: scores, selection, capacity.

Shapes: T tokens, D embedding, E experts that this gate sees, S constant and copy experts behind them, M null
experts behind these, K choices per token.
"""

import torch
from torch import Tensor, nn

from smoe_fairseq.modules.gates.linear import (
    ExitBias,
    ExpertBias,
    LinearGate,
    all_active,
    draw_as_linear,
    wide_linear,
)
from smoe_fairseq.modules.routing import Capacity, Routing

SECOND_EXPERT_POLICIES = ("sampling", "all", "random")
GATE_NORMALIZATIONS = ("after-drop", "before-drop", "none")
SCORES = ("softmax", "sigmoid")


class TopKGate(LinearGate):
    """Top-k gate over ``num_experts`` experts, without bias (paper, eq. 2 and 5).

    Args:
        embed_dim: D.
        num_experts: E, the experts that this gate sees.
        capacity: of these experts.
        top_k: experts per token, null ones included.
        normalization: "after-drop" divides the weights by their sum over the kept experts,
            "before-drop" by the sum over the selected ones, "none" leaves the softmax scores. Top-1
            always keeps the score, without which the gate would get no gradient.
        second_expert_policy: of the second expert and all further ones in training: "sampling" draws them
            by Gumbel noise, without replacement, "all" takes the best, "random" takes each of these with
            probability ``min(1, 2 * weight)``. In evaluation always the best.
        init_scale: of the initial weights, over those of ``nn.Linear``.
        null_experts: M that answer 0 and take no capacity, chosen like the others (AdaMoE, Zeng et al.
            2024). They have no weight in a normalised sum and no stratum: the first choice is of the others.
        simple_experts: S, the same but that their weights count: see `SimpleExperts` in branches.py.
        scores: "softmax" over all experts, or "sigmoid" of each (DeepSeek-V3, 2024). The probabilities of
            the routing, and so of the balance loss, sum to 1 either way.
        bias: added to the scores for the selection alone, see `ExpertBias`.
        exit_bias: of the logits, see `ExitBias`.
    """

    takes_top_k = True
    has_balance_loss = True

    @classmethod
    def of_config(cls, config, embed_dim: int, num_experts: int, own_experts: int):
        return cls(
            embed_dim,
            num_experts,
            Capacity.of_config(config),
            top_k=config.top_k,
            normalization=config.gate_normalization,
            second_expert_policy=config.second_expert_policy,
            init_scale=config.gate_init_scale,
            null_experts=config.null_experts,
            simple_experts=config.constant_experts + config.copy_experts,
            scores=config.scores,
            bias=ExpertBias(num_experts, config.bias_step) if config.balance == "bias" else None,
            exit_bias=ExitBias(own_experts, num_experts, config.exit_bias),
        )

    def __init__(
        self,
        embed_dim: int,
        num_experts: int,
        capacity: Capacity,
        top_k: int = 2,
        normalization: str = "after-drop",
        second_expert_policy: str = "sampling",
        init_scale: float = 1.0,
        null_experts: int = 0,
        simple_experts: int = 0,
        scores: str = "softmax",
        bias: ExpertBias | None = None,
        exit_bias: ExitBias | None = None,
    ):
        super().__init__(embed_dim, num_experts, init_scale)
        self.capacity = capacity
        self.top_k = top_k
        self.normalization = normalization if top_k > 1 else "none"
        self.second_expert_policy = second_expert_policy
        self.null_experts, self.simple_experts = null_experts, simple_experts
        self.free_experts = simple_experts + null_experts  # which take no capacity
        if simple_experts:
            self.simple_weight = nn.Parameter(torch.empty(simple_experts, embed_dim))
            draw_as_linear(self.simple_weight, init_scale)
        self.scores = scores
        if null_experts:
            self.null_weight = nn.Parameter(torch.empty(null_experts, embed_dim))
            draw_as_linear(self.null_weight, init_scale)
        self.residual_weight = None
        self.bias = bias
        self.exit_bias = exit_bias or ExitBias(num_experts, num_experts)

    def add_residual(self) -> None:
        """From now on a linear map of an earlier gate's logits is added (MoE++, Jin et al. 2025).

        It begins at 0, so that the gate decides as before.
        """
        columns = self.num_experts + self.free_experts
        self.residual_weight = nn.Parameter(self.weight.new_zeros(columns, columns))

    @property
    def observes(self) -> int:
        """Choices of each expert, for the bias."""
        return self.num_experts if self.bias is not None else 0

    def update(self, observed_N: Tensor) -> None:
        self.bias.update(observed_N)

    @property
    def learns_number(self) -> bool:
        return self.free_experts > 0

    def forward(
        self,
        x_TD: Tensor,
        active_T: Tensor | None = None,
        earlier_TE: Tensor | None = None,
        first_T1: Tensor | None = None,
    ) -> Routing:
        """Route the tokens ``x_TD`` that ``active_T`` marks (all when None).

        Args:
            earlier_TE: ``(T, V)``, logits of an earlier gate, of which the last are those of the experts
                that this one sees; 0 where there was none. Only a gate with a residual needs them.
            first_T1: first choices that are given; None: those of highest score.
        """
        if active_T is None:
            active_T = all_active(x_TD)
        own_TE, logits_TE, score_TE, probs_TE = self.score(x_TD, earlier_TE)
        choice_TK = self.select(score_TE.detach(), first_T1)
        weight_TK = self.weigh(score_TE, choice_TK)
        taken_TK = self.sample(weight_TK, choice_TK) & active_T.unsqueeze(1)
        true_TE = probs_TE[:, : self.num_experts]
        first_choice_T = true_TE.argmax(1) if self.free_experts else choice_TK[:, 0]

        asked_TK = choice_TK.clamp(max=self.num_experts) if self.free_experts else choice_TK
        asked_TK = asked_TK.masked_fill(~taken_TK, self.num_experts)
        places = self.capacity(asked_TK, true_TE, active_T)
        if self.normalization == "after-drop":
            weighs_TK = places.kept(taken_TK)
            if self.free_experts:
                weighs_TK = weighs_TK | (taken_TK & (choice_TK >= self.num_experts))
            weight_TK = normalize(weight_TK * weighs_TK)

        routing = Routing.of(
            *(choice_TK, weight_TK, taken_TK, places, active_T, probs_TE, logits_TE),
            first_choice_T,
            own_logits_TE=own_TE,
        )
        if self.bias is not None:
            routing = routing._replace(observed_N=routing.asked_E)
        if self.simple_experts:
            every_TE = torch.zeros_like(probs_TE)
            every_TE = every_TE.scatter_add(1, choice_TK, weight_TK * taken_TK)
            last = self.num_experts + self.simple_experts
            routing = routing._replace(simple_TS=every_TE[:, self.num_experts : last])
        return routing

    def score(
        self, x_TD: Tensor, earlier_TE: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logits, those with the exit bias, scores and probabilities (paper, eq. 2 and 5)."""
        own_TE = self.logits(x_TD)
        if self.residual_weight is not None:
            earlier_TE = earlier_TE[:, -own_TE.shape[1] :]
            own_TE = own_TE + wide_linear(earlier_TE, self.residual_weight)
        logits_TE = self.exit_bias(own_TE)
        if self.scores == "softmax":
            score_TE = logits_TE.softmax(dim=-1)
            return own_TE, logits_TE, score_TE, score_TE
        score_TE = logits_TE.sigmoid()
        least = torch.finfo(score_TE.dtype).tiny
        probs_TE = score_TE / score_TE.sum(1, keepdim=True).clamp(min=least)
        return own_TE, logits_TE, score_TE, probs_TE

    def logits(self, x_TD: Tensor) -> Tensor:
        """``(T, E + S + M)``, null experts last."""
        logits_TE = super().logits(x_TD)
        if not self.free_experts:
            return logits_TE
        weights = [getattr(self, f"{kind}_weight", None) for kind in ("simple", "null")]
        free = [wide_linear(x_TD, weight_ED) for weight_ED in weights if weight_ED is not None]
        return torch.cat([logits_TE, *free], dim=1)

    def select(self, score_TE: Tensor, first_T1: Tensor | None = None) -> Tensor:
        """Experts ``(T, K)``, those of ``first_T1`` or else the best first."""
        scores_TE = score_TE if self.bias is None else self.bias(score_TE)
        if first_T1 is None:
            first_T1 = scores_TE.argmax(dim=1, keepdim=True)
        if self.top_k == 1:
            return first_T1
        if self.training and self.second_expert_policy == "sampling":
            # Gumbel-max: argmax(log p + Gumbel) = argmax(p / Exponential) draws in proportion to p.
            scores_TE = score_TE / torch.empty_like(score_TE).exponential_()
        scores_TE = scores_TE.scatter(1, first_T1, float("-inf"))
        if self.top_k == 2:
            further_TK = scores_TE.argmax(dim=1, keepdim=True)
        else:
            further_TK = scores_TE.topk(self.top_k - 1, dim=1).indices
        return torch.cat([first_T1, further_TK], dim=1)

    def weigh(self, score_TE: Tensor, choice_TK: Tensor) -> Tensor:
        """The weights ``(T, K)`` of the choices, before any is dropped; null experts have none."""
        weight_TK = score_TE.gather(1, choice_TK)
        if self.null_experts:
            weight_TK = weight_TK * (choice_TK < self.num_experts + self.simple_experts)
        return normalize(weight_TK) if self.normalization == "before-drop" else weight_TK

    def sample(self, weight_TK: Tensor, choice_TK: Tensor) -> Tensor:
        """Which of the selected experts are asked ``(T, K)``; free ones always, since that costs nothing."""
        asked_TK = torch.ones_like(weight_TK, dtype=torch.bool)
        if self.training and self.second_expert_policy == "random" and self.top_k > 1:
            asked_TK[:, 1:] = torch.rand_like(weight_TK[:, 1:]) < 2 * weight_TK[:, 1:]
            asked_TK |= choice_TK >= self.num_experts
        return asked_TK


def normalize(weight_TK: Tensor) -> Tensor:
    return weight_TK / weight_TK.sum(1, keepdim=True).clamp(min=torch.finfo(weight_TK.dtype).eps)
