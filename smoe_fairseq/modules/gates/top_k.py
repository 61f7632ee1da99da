"""The top-k gate: scores, selection, capacity.

Shapes: T tokens, D embedding, E experts that this gate sees, then S constant and copy experts, then M null
experts; K choices per token.
"""

import torch
from torch import Tensor, nn

from smoe_fairseq.modules.gates.linear import (
    ExitBias,
    ExpertBias,
    LinearGate,
    draw_as_linear,
    wide_linear,
)
from smoe_fairseq.modules.routing import Capacity, Routing

# The options of gates that rank experts.
RANKED = {"top_k", "capacity_factor", "eval_capacity_factor", "second_expert_policy"}
RANKED = frozenset(RANKED | {"gate_normalization", "drop_order"})


class TopKGate(LinearGate):
    """Top-k gate over ``num_experts`` experts, without bias (paper, eq. 2 and 5).

    Two kinds of free experts are chosen like the E experts, but have no capacity and are never the first
    choice, so they are in no stratum. The M null experts return 0 (AdaMoE, Zeng et al. 2024) and have no
    weight in a normalised sum. The weights of the S simple experts count, see `SimpleExperts` in branches.py.
    """

    summary = "the k experts with the highest scores"
    options = RANKED | {"scores", "gate_residual", "null_experts", "copy_experts"}
    options |= {"constant_experts", "balance"}
    has_balance_loss = True
    learner = "bias"
    can_upcycle = True

    def __init__(self, config, embed_dim: int, num_experts: int, own_experts: int):
        super().__init__(config, embed_dim, num_experts, own_experts)
        self.capacity = Capacity(config)
        self.top_k = config.top_k  # free ones included
        # A single weight of 1 would have no gradient.
        self.normalization = config.gate_normalization if self.top_k > 1 else "none"
        self.second_expert_policy = config.second_expert_policy
        self.scores = config.scores
        self.null_experts = config.null_experts
        self.simple_experts = config.constant_experts + config.copy_experts
        self.free_experts = config.free_experts
        self.learns_num_experts = self.free_experts > 0
        for kind in ("simple", "null"):
            if number := getattr(self, f"{kind}_experts"):
                weight_ED = nn.Parameter(torch.empty(number, embed_dim))
                draw_as_linear(weight_ED, self.init_scale)
                self.register_parameter(f"{kind}_weight", weight_ED)
        self.residual_weight = None
        biased = config.balance == "bias"
        self.bias = ExpertBias(num_experts, config.bias_step) if biased else None
        self.exit_bias = ExitBias(own_experts, num_experts, config.exit_bias)

    @classmethod
    def experts_per_token(cls, config, num_experts: int) -> float:
        share = num_experts / (num_experts + config.free_experts)
        return super().experts_per_token(config, num_experts) * share

    @property
    def min_experts(self) -> int:
        return max(1, self.top_k - self.free_experts)

    @property
    def unprunable(self) -> str:
        if self.residual_weight is None:
            return ""
        return "--moe-gate-residual, which adds the logits of all experts"

    @property
    def weights_depend_on_all(self) -> bool:
        chosen_sum_to_1 = self.normalization != "none" and self.bias is None
        return self.scores == "softmax" and not chosen_sum_to_1

    def supports(self, execution: str) -> bool:
        hooks = self._forward_hooks or self._forward_pre_hooks
        if type(self) is not TopKGate or hooks:  # a subclass may compute something else
            return False
        if execution == "inference":
            limited = self.capacity.eval_factor or self.exit_bias.bias
            return self.top_k <= 2 and self.weight.dtype == torch.float32 and not limited
        limited = self.capacity.order != "sentence" and self.capacity.current_factor
        return not (self.exit_bias.is_active or limited)

    def add_residual(self) -> None:
        """Add a linear map of an earlier gate's logits, initially 0 (MoE++, Jin et al. 2025)."""
        columns = self.num_experts + self.free_experts
        self.residual_weight = nn.Parameter(self.weight.new_zeros(columns, columns))

    def decide(
        self,
        x_TD: Tensor,
        active_T: Tensor,
        earlier_TE: Tensor | None = None,
        first_T1: Tensor | None = None,
    ) -> Routing:
        """The routing.

        Args:
            earlier_TE: for gates with a residual: logits of an earlier gate ``(T, V)``, 0 if there was none.
                The last columns are those of the experts that this gate sees.
            first_T1: the first choices; None: the experts with the highest score.
        """
        own_TE, logits_TE, score_TE, probs_TE = self.score(x_TD, earlier_TE)
        choice_TK = self.select(score_TE.detach(), active_T, first_T1)
        weight_TK = self.weigh(score_TE, choice_TK)
        valid_TK = self.sample(weight_TK, choice_TK) & active_T.unsqueeze(1)
        true_TE = probs_TE[:, : self.num_experts]
        first_choice_T = true_TE.argmax(1) if self.free_experts else choice_TK[:, 0]

        expert_TK = choice_TK.clamp(max=self.num_experts) if self.free_experts else choice_TK
        expert_TK = expert_TK.masked_fill(~valid_TK, self.num_experts)
        places = self.capacity(expert_TK, true_TE, active_T)
        if self.normalization == "after-drop":
            weighted_TK = places.kept(valid_TK)
            if self.free_experts:
                weighted_TK = weighted_TK | (valid_TK & (choice_TK >= self.num_experts))
            weight_TK = normalize(weight_TK * weighted_TK)

        routing = Routing.of(
            *(choice_TK, weight_TK, valid_TK, places, active_T, probs_TE, logits_TE),
            first_choice_T,
            own_logits_TE=own_TE,
        )
        if self.bias is not None:
            routing = routing._replace(observed_N=routing.all_choices_E)
        if self.simple_experts:
            every_TE = torch.zeros_like(probs_TE)
            every_TE = every_TE.scatter_add(1, choice_TK, weight_TK * valid_TK)
            last = self.num_experts + self.simple_experts
            routing = routing._replace(simple_TS=every_TE[:, self.num_experts : last])
        return routing

    def score(
        self, x_TD: Tensor, earlier_TE: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logits, those with the exit bias, scores and probabilities (paper, eq. 2 and 5)."""
        own_TE = self.checked_logits(x_TD)
        if self.residual_weight is not None:
            earlier_TE = earlier_TE[:, -own_TE.shape[1] :]
            own_TE = own_TE + wide_linear(earlier_TE, self.residual_weight)
        logits_TE = self.exit_bias(own_TE)
        if self.scores == "softmax":
            score_TE = logits_TE.softmax(dim=-1)
            return own_TE, logits_TE, score_TE, score_TE
        score_TE = logits_TE.sigmoid()
        return own_TE, logits_TE, score_TE, normalize(score_TE)

    def logits(self, x_TD: Tensor) -> Tensor:
        """``(T, E + S + M)``, null experts last."""
        logits_TE = super().logits(x_TD)
        if not self.free_experts:
            return logits_TE
        weights = [getattr(self, f"{kind}_weight", None) for kind in ("simple", "null")]
        free = [wide_linear(x_TD, weight_ED) for weight_ED in weights if weight_ED is not None]
        return torch.cat([logits_TE, *free], dim=1)

    def select(self, score_TE: Tensor, active_T: Tensor, first_T1: Tensor | None = None) -> Tensor:
        """Experts ``(T, K)``; the first column is ``first_T1``, or by default the best expert."""
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
        """The weights ``(T, K)`` of the choices before dropping; 0 for null experts."""
        weight_TK = score_TE.gather(1, choice_TK)
        if self.null_experts:
            weight_TK = weight_TK * (choice_TK < self.num_experts + self.simple_experts)
        return normalize(weight_TK) if self.normalization == "before-drop" else weight_TK

    def sample(self, weight_TK: Tensor, choice_TK: Tensor) -> Tensor:
        """Which of the selected experts are used ``(T, K)``; free experts always are."""
        sampled_TK = torch.ones_like(weight_TK, dtype=torch.bool)
        if self.training and self.second_expert_policy == "random" and self.top_k > 1:
            sampled_TK[:, 1:] = torch.rand_like(weight_TK[:, 1:]) < 2 * weight_TK[:, 1:]
            sampled_TK |= choice_TK >= self.num_experts
        return sampled_TK


def normalize(weight_TK: Tensor) -> Tensor:
    """Divided by their sum over a token's choices, or experts."""
    return weight_TK / weight_TK.sum(1, keepdim=True).clamp(min=torch.finfo(weight_TK.dtype).tiny)
