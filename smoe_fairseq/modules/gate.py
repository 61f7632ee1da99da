"""The gate of one stratum: scores, top-k selection, capacity, balance loss.

Shapes: T tokens, D embedding, E experts that this gate sees, K choices per token.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SECOND_EXPERT_POLICIES = ("sampling", "all", "random")
GATE_NORMALIZATIONS = ("after-drop", "before-drop", "none")
DROP_ORDERS = ("sentence", "score", "random")


class Routing(NamedTuple):
    """What a gate decided for T tokens.

    ``expert_TK`` numbers the experts that the gate sees, best first; ``E`` stands for "no expert": the
    copy was dropped, not sampled, or its token is not active. ``weight_TK`` is 0 there.
    """

    expert_TK: Tensor
    weight_TK: Tensor
    first_choice_T: Tensor  # before dropping: it decides where the token stands next
    balance_loss: Tensor  # scalar: E * sum_e f_e p_e
    first_choices_E: Tensor  # active tokens per first choice
    chosen_K: Tensor  # copies chosen
    dropped_TK: Tensor  # of those, copies beyond their expert's capacity
    z_loss: Tensor  # scalar: mean squared log of the softmax's denominator


class Gate(nn.Module):
    """Top-k gate over ``num_experts`` experts, without bias (paper, equations 1 and 2).

    Args:
        embed_dim: D.
        num_experts: E, the experts that this gate sees.
        top_k: 1 or 2 experts per token.
        capacity_factor: in training an expert takes ``ceil(capacity_factor * T / E)`` copies; 0: no limit.
        eval_capacity_factor: the same in evaluation.
        normalization: "after-drop" divides the weights by their sum over the kept experts,
            "before-drop" by the sum over the selected ones, "none" leaves the softmax scores. Top-1
            always keeps the score, without which the gate would get no gradient.
        second_expert_policy: in training, "sampling" draws the second expert by Gumbel noise, "all"
            takes the second best, "random" takes it with probability ``min(1, 2 * weight)``. In
            evaluation always the second best.
        drop_order: whose copies are kept where an expert has too many; first choices always come before
            second ones. "sentence" keeps the first rows, which a layer lays sentence after sentence;
            "score" those of the tokens with the highest first probability (batch-prioritised routing,
            Riquelme et al. 2021); "random" draws an order each time.
        init_scale: of the initial weights, over those of ``nn.Linear``.
    """

    def __init__(
        self,
        embed_dim: int,
        num_experts: int,
        top_k: int = 2,
        capacity_factor: float = 2.0,
        eval_capacity_factor: float = 0.0,
        normalization: str = "after-drop",
        second_expert_policy: str = "sampling",
        drop_order: str = "sentence",
        init_scale: float = 1.0,
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, embed_dim))
        self.num_experts = num_experts
        self.top_k = top_k
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.normalization = normalization if top_k > 1 else "none"
        self.second_expert_policy = second_expert_policy
        self.drop_order = drop_order
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
        expert_TK, chosen_TK = self.select(probs_TE)
        chosen_TK = chosen_TK & active_T.unsqueeze(1)
        weight_TK = probs_TE.gather(1, expert_TK) * chosen_TK
        first_T = expert_TK[:, 0]

        if self.normalization == "before-drop":
            weight_TK = normalize(weight_TK)
        if self.training and self.second_expert_policy == "random" and self.top_k > 1:
            sampled_T = torch.rand_like(weight_TK[:, 1]) < 2 * weight_TK[:, 1]
            chosen_TK = chosen_TK & torch.stack([torch.ones_like(sampled_T), sampled_T], dim=1)
        within_TK = self.within_capacity(
            expert_TK.masked_fill(~chosen_TK, self.num_experts), probs_TE, active_T.sum()
        )
        kept_TK = chosen_TK & within_TK
        weight_TK = weight_TK * kept_TK
        if self.normalization == "after-drop":
            weight_TK = normalize(weight_TK)

        first_choices_E = count(first_T.masked_fill(~active_T, self.num_experts), self.num_experts)
        return Routing(
            expert_TK=expert_TK.masked_fill(~kept_TK, self.num_experts),
            weight_TK=weight_TK,
            first_choice_T=first_T,
            balance_loss=balance_loss(probs_TE, active_T, first_choices_E),
            first_choices_E=first_choices_E,
            chosen_K=chosen_TK.sum(0),
            dropped_TK=chosen_TK & ~kept_TK,
            z_loss=z_loss(logits_TE, active_T),
        )

    def logits(self, x_TD: Tensor) -> Tensor:
        """``W x`` in at least float32: half precision flips close choices."""
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        with torch.autocast(x_TD.device.type, enabled=False):
            return F.linear(x_TD.to(dtype), self.weight.to(dtype))

    def select(self, probs_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Chosen experts ``(T, K)``, best first, and which of them count."""
        probs_TE = probs_TE.detach()
        first_T1 = probs_TE.argmax(dim=1, keepdim=True)
        if self.top_k == 1:
            return first_T1, torch.ones_like(first_T1, dtype=torch.bool)
        second_scores_TE = probs_TE
        if self.training and self.second_expert_policy == "sampling":
            # Gumbel-max: argmax(log p + Gumbel) = argmax(p / Exponential) draws from p.
            second_scores_TE = probs_TE / torch.empty_like(probs_TE).exponential_()
        second_scores_TE = second_scores_TE.scatter(1, first_T1, -1.0)
        second_T1 = second_scores_TE.argmax(dim=1, keepdim=True)
        expert_TK = torch.cat([first_T1, second_T1], dim=1)
        return expert_TK, torch.ones_like(expert_TK, dtype=torch.bool)

    def within_capacity(self, expert_TK: Tensor, probs_TE: Tensor, num_tokens: Tensor) -> Tensor:
        """Which copies fit into their experts: first choices before second ones (design: GShard)."""
        factor = self.factor_in_force
        if factor == 0:
            return torch.ones_like(expert_TK, dtype=torch.bool)
        rank_TK = rank_within_expert(expert_TK, self.row_order(probs_TE.detach()))
        # The number of tokens stays on the device, so that routing waits for nothing.
        return rank_TK < torch.ceil(factor * num_tokens.double() / self.num_experts)

    @property
    def factor_in_force(self) -> float:
        """The capacity factor of this mode; 0: no limit."""
        return self.capacity_factor if self.training else self.eval_capacity_factor

    def row_order(self, probs_TE: Tensor) -> Tensor | None:
        """Rows ``(T,)`` in the order in which capacity is given to them; None: as they come."""
        if self.drop_order == "score":
            return probs_TE.amax(1).argsort(descending=True, stable=True)
        if self.drop_order == "random":
            return torch.rand_like(probs_TE[:, 0]).argsort()
        return None


def normalize(weight_TK: Tensor) -> Tensor:
    return weight_TK / weight_TK.sum(1, keepdim=True).clamp(min=torch.finfo(weight_TK.dtype).eps)


def count(index_N: Tensor, size: int) -> Tensor:
    """How often each of ``0..size-1`` occurs, without waiting for the device as ``bincount`` does."""
    counts = index_N.new_zeros(size + 1)
    return counts.scatter_add_(0, index_N, torch.ones_like(index_N))[:size]


def rank_within_expert(expert_TK: Tensor, order_T: Tensor | None = None) -> Tensor:
    """For each copy, how many copies before it have the same expert.

    All first choices come before all second ones, and of each the rows in ``order_T``.
    """
    if order_T is None:
        return rank(expert_TK.t().flatten()).view_as(expert_TK.t()).t()
    ranks_TK = rank_within_expert(expert_TK.index_select(0, order_T))
    return torch.empty_like(ranks_TK).index_copy_(0, order_T, ranks_TK)


def rank(expert_N: Tensor) -> Tensor:
    """For each copy, how many earlier copies have the same expert."""
    sorted_N, order_N = expert_N.sort(stable=True)
    rank_N = torch.arange(len(sorted_N), device=sorted_N.device)
    rank_N = rank_N - torch.searchsorted(sorted_N, sorted_N)
    return torch.empty_like(rank_N).scatter_(0, order_N, rank_N)


def balance_loss(probs_TE: Tensor, active_T: Tensor, first_choices_E: Tensor) -> Tensor:
    """``E * sum_e f_e p_e``: 1 when balanced, up to E when not, 0 without tokens (paper, equation 3)."""
    num_tokens = active_T.sum().clamp(min=1)
    fraction_E = first_choices_E.to(probs_TE.dtype) / num_tokens
    mean_probs_E = (probs_TE * active_T.unsqueeze(1)).sum(0) / num_tokens
    return probs_TE.shape[1] * (fraction_E * mean_probs_E).sum()


def z_loss(logits_TE: Tensor, active_T: Tensor) -> Tensor:
    """Mean of ``logsumexp(logits)^2`` over the tokens, small when logits are (Zoph et al. 2022, eq. 5)."""
    squared_T = logits_TE.logsumexp(dim=-1).square()
    return (squared_T * active_T).sum() / active_T.sum().clamp(min=1)
