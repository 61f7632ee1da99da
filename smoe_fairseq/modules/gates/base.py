"""The gate of BASE layers: in training all experts get equally many tokens.

Shapes: T tokens, D embedding, E experts; K is 1.
"""

import torch
from torch import Tensor, nn

from smoe_fairseq.modules.gates.linear import LinearGate, route_to_one
from smoe_fairseq.modules.routing import Routing


class BaseGate(LinearGate):
    """One expert per token, by a balanced assignment (Lewis et al. 2021), weighted by ``sigmoid(w_e x)``.

    In training, tokens are assigned by `balanced_assignment` over the batch of a rank, without gradient; in
    evaluation, each token goes to the expert of its highest affinity ``w_e x``. There is no balance loss and
    no capacity.
    """

    summary = "one, so that a batch is balanced"
    single_stratum = True
    top_k = 1

    def reset_parameters(self):
        """As in the authors' code."""
        nn.init.orthogonal_(self.weight, gain=0.1 * self.init_scale)

    def decide(self, x_TD: Tensor, active_T: Tensor) -> Routing:
        logits_TE = self.checked_logits(x_TD)
        expert_T = logits_TE.argmax(dim=1)
        if self.training:
            balanced = balanced_assignment(logits_TE[active_T]).to(expert_T.device)
            expert_T = expert_T.index_put((active_T,), balanced)
        weight_T1 = logits_TE.gather(1, expert_T.unsqueeze(1)).sigmoid()
        return route_to_one(expert_T, weight_T1, active_T, logits_TE.softmax(dim=-1), logits_TE)


# A balanced assignment: experts have equally many tokens, and the sum of affinities is maximal.
#
# First, approximate prices of the experts balance their loads roughly. Then, while an expert has too many
# tokens, the cheapest chain of moves brings one to an expert that has too few (successive shortest paths; the
# cost is the affinity that the moved tokens lose). The result is optimal whatever the prices were.

# Temperatures of the assignment that the prices balance, relative to the spread of the affinities.
SOFTNESS = (0.3, 0.1, 0.03, 0.01)
ROUNDS = 8  # per temperature


@torch.no_grad()
def balanced_assignment(affinity_TE: Tensor) -> Tensor:
    """The expert of each token ``(T,)``; T / E tokens for each expert, or one more for T modulo E of them.

    It has the largest sum of affinities among these assignments. It is computed on the host; an affinity that
    is not finite counts as the smallest finite one.
    """
    tokens, experts = affinity_TE.shape
    if not tokens or experts == 1:
        return affinity_TE.new_zeros(tokens, dtype=torch.long)
    affinity_TE = affinity_TE.cpu().double()
    finite_TE = affinity_TE.isfinite()
    if not finite_TE.all():
        least = affinity_TE[finite_TE].min() if finite_TE.any() else affinity_TE.new_zeros(())
        affinity_TE = affinity_TE.where(finite_TE, least)
    return Assignment(affinity_TE, prices(affinity_TE)).balance()


def prices(affinity_TE: Tensor) -> Tensor:
    """Prices ``(E,)`` at which about equally many tokens prefer each expert (Sinkhorn's iterations)."""
    tokens, experts = affinity_TE.shape
    price_E = affinity_TE.mean(0)
    spread = float((affinity_TE - price_E).std(correction=0)) or 1.0
    for softness in SOFTNESS:
        for _ in range(ROUNDS):
            share_TE = ((affinity_TE - price_E) / (softness * spread)).log_softmax(1)
            load_E = share_TE.logsumexp(0) - torch.tensor(tokens / experts).log()
            price_E = price_E + softness * spread * load_E
    return price_E


class Assignment:
    """An assignment that no exchange between experts improves, initially and after every move.

    Each expert has ``ceil(T / E)`` places. If there are more places than tokens, the experts with the lowest
    prices have an empty place, which can move to an expert that has none.

    Args:
        affinity_TE: in double precision, on the host.
        price_E: arbitrary.
    """

    def __init__(self, affinity_TE: Tensor, price_E: Tensor):
        tokens, experts = affinity_TE.shape
        self.affinity_TE = affinity_TE
        self.expert_T = (affinity_TE - price_E).argmax(1)
        self.places = -(-tokens // experts)
        self.empty_E = torch.zeros(experts, dtype=torch.bool)
        self.empty_E[price_E.argsort()[: self.places * experts - tokens]] = True
        # The cost of the cheapest move from one expert to another, and the token that moves.
        self.cost_EE = torch.empty(experts, experts, dtype=torch.double)
        self.mover_EE = torch.empty(experts, experts, dtype=torch.long)
        for expert in range(experts):
            self._find_movers(expert)

    def balance(self) -> Tensor:
        load_E = self.expert_T.bincount(minlength=len(self.empty_E)) + self.empty_E
        while (load_E > self.places).any():
            cost_EE, mover_EE = self._moves()
            path = self._cheapest_path(load_E > self.places, load_E < self.places, cost_EE)
            for one, other in zip(path, path[1:]):
                if (token := int(mover_EE[one, other])) < 0:
                    self.empty_E[one], self.empty_E[other] = False, True
                else:
                    self.expert_T[token] = other
            for expert in set(path):
                self._find_movers(expert)
            load_E[path[0]] -= 1
            load_E[path[-1]] += 1
        return self.expert_T

    def _find_movers(self, expert: int) -> None:
        token_N = (self.expert_T == expert).nonzero().squeeze(1)
        if not len(token_N):
            self.cost_EE[expert] = torch.inf
            return
        affinity_NE = self.affinity_TE[token_N]
        cost_E, row_E = (affinity_NE[:, expert : expert + 1] - affinity_NE).min(0)
        self.cost_EE[expert], self.mover_EE[expert] = cost_E, token_N[row_E]

    def _moves(self) -> tuple[Tensor, Tensor]:
        """``(E, E)``: the cheapest move between two experts: its cost and its token; -1: an empty place."""
        empty_EE = self.empty_E.unsqueeze(1) & ~self.empty_E & (self.cost_EE > 0)
        cost_EE = self.cost_EE.masked_fill(empty_EE, 0)
        return cost_EE.fill_diagonal_(torch.inf), self.mover_EE.masked_fill(empty_EE, -1)

    def _cheapest_path(self, start_E: Tensor, end_E: Tensor, edge_EE: Tensor) -> list[int]:
        """From an expert of ``start`` to an expert of ``end``, by the algorithm of Bellman and Ford."""
        distance_E = torch.zeros(len(start_E), dtype=torch.double).masked_fill(~start_E, torch.inf)
        before_E = torch.full_like(start_E, -1, dtype=torch.long)
        for _ in range(len(start_E) - 1):
            through_E, from_E = (distance_E.unsqueeze(1) + edge_EE).min(0)
            shorter_E = through_E < distance_E - 1e-12  # so that rounding makes no cycles
            if not shorter_E.any():
                break
            distance_E = through_E.where(shorter_E, distance_E)
            before_E = from_E.where(shorter_E, before_E)
        path = [int(distance_E.where(end_E, torch.inf).argmin())]
        while before_E[path[0]] >= 0:
            path.insert(0, int(before_E[path[0]]))
        return path
