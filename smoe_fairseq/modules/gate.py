"""The gate of one stratum: scores, selection, capacity, losses.

A block asks of a gate that it is called with tokens and a mask and answers with a `Routing`; another kind
of gate stands beside this one.

Shapes: T tokens, D embedding, E experts that this gate sees, K choices per token.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smoe_fairseq.modules.capacity import Capacity
from smoe_fairseq.modules.routing import Routing
from smoe_fairseq.modules.torch_features import without_autocast

SECOND_EXPERT_POLICIES = ("sampling", "all", "random")
GATE_NORMALIZATIONS = ("after-drop", "before-drop", "none")


class TopKGate(nn.Module):
    """Top-k gate over ``num_experts`` experts, without bias (paper, equations 1 and 2).

    Args:
        embed_dim: D.
        num_experts: E, the experts that this gate sees.
        capacity: of these experts.
        top_k: 1 or 2 experts per token.
        normalization: "after-drop" divides the weights by their sum over the kept experts,
            "before-drop" by the sum over the selected ones, "none" leaves the softmax scores. Top-1
            always keeps the score, without which the gate would get no gradient.
        second_expert_policy: in training, "sampling" draws the second expert by Gumbel noise, "all"
            takes the second best, "random" takes it with probability ``min(1, 2 * weight)``. In
            evaluation always the second best.
        init_scale: of the initial weights, over those of ``nn.Linear``.
    """

    def __init__(
        self,
        embed_dim: int,
        num_experts: int,
        capacity: Capacity,
        top_k: int = 2,
        normalization: str = "after-drop",
        second_expert_policy: str = "sampling",
        init_scale: float = 1.0,
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, embed_dim))
        self.num_experts = num_experts
        self.capacity = capacity
        self.top_k = top_k
        self.normalization = normalization if top_k > 1 else "none"
        self.second_expert_policy = second_expert_policy
        self.init_scale = init_scale
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # as nn.Linear
        with torch.no_grad():
            self.weight.mul_(self.init_scale)

    def forward(self, x_TD: Tensor, active_T: Tensor | None = None) -> Routing:
        """Route the tokens ``x_TD`` that ``active_T`` marks (all when None)."""
        if active_T is None:
            active_T = x_TD.new_ones(x_TD.shape[0], dtype=torch.bool)
        logits_TE = self.logits(x_TD)
        probs_TE = logits_TE.softmax(dim=-1)
        expert_TK = self.select(probs_TE.detach())
        weight_TK = probs_TE.gather(1, expert_TK) * active_T.unsqueeze(1)
        if self.normalization == "before-drop":
            weight_TK = normalize(weight_TK)
        chosen_TK = self.sample(weight_TK) & active_T.unsqueeze(1)

        asked_TK = expert_TK.masked_fill(~chosen_TK, self.num_experts)
        places = self.capacity(asked_TK, probs_TE, active_T.sum())
        kept_TK = chosen_TK & places.kept_TK
        weight_TK = weight_TK * kept_TK
        if self.normalization == "after-drop":
            weight_TK = normalize(weight_TK)

        return Routing(
            expert_TK=expert_TK.masked_fill(~kept_TK, self.num_experts),
            weight_TK=weight_TK,
            rank_TK=places.rank_TK,
            kept_E=places.kept_E,
            first_choice_T=expert_TK[:, 0],
            active_T=active_T,
            logits_TE=logits_TE,
            probs_TE=probs_TE,
            chosen_TK=chosen_TK,
            kept_TK=kept_TK,
        )

    def logits(self, x_TD: Tensor) -> Tensor:
        """``W x`` in at least float32: half precision flips close choices."""
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        with without_autocast(x_TD.device):
            return F.linear(x_TD.to(dtype), self.weight.to(dtype))

    def select(self, probs_TE: Tensor) -> Tensor:
        """Experts ``(T, K)``, best first."""
        first_T1 = probs_TE.argmax(dim=1, keepdim=True)
        if self.top_k == 1:
            return first_T1
        second_scores_TE = probs_TE
        if self.training and self.second_expert_policy == "sampling":
            # Gumbel-max: argmax(log p + Gumbel) = argmax(p / Exponential) draws from p.
            second_scores_TE = probs_TE / torch.empty_like(probs_TE).exponential_()
        second_scores_TE = second_scores_TE.scatter(1, first_T1, -1.0)
        return torch.cat([first_T1, second_scores_TE.argmax(dim=1, keepdim=True)], dim=1)

    def sample(self, weight_TK: Tensor) -> Tensor:
        """Which of the selected experts are asked ``(T, K)``."""
        asked_TK = torch.ones_like(weight_TK, dtype=torch.bool)
        if self.training and self.second_expert_policy == "random" and self.top_k > 1:
            asked_TK[:, 1] = torch.rand_like(weight_TK[:, 1]) < 2 * weight_TK[:, 1]
        return asked_TK


def normalize(weight_TK: Tensor) -> Tensor:
    return weight_TK / weight_TK.sum(1, keepdim=True).clamp(min=torch.finfo(weight_TK.dtype).eps)
