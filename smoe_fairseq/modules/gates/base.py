"""The gate of BASE layers: in training every expert gets as many tokens as the others.

Shapes: T tokens, D embedding, E experts; K is 1.
"""

import torch
from torch import Tensor, nn

from smoe_fairseq.modules.gates.linear import LinearGate, route_to_one
from smoe_fairseq.modules.routing import Routing


class BaseGate(LinearGate):
    """One expert per token, by a balanced assignment (Lewis et al. 2021), weighted by ``sigmoid(w_e x)``.

    In training the assignment is that of `balanced_assignment` over the tokens of this process, and through
    it there is no gradient; in evaluation each token has the expert of its highest affinity ``w_e x``.
    There is no loss and no other limit on the experts.
    """

    of_one_stratum = True
    top_k = 1

    def reset_parameters(self):
        """As the authors'."""
        nn.init.orthogonal_(self.weight, gain=0.1 * self.init_scale)

    def decide(self, x_TD: Tensor, active_T: Tensor) -> Routing:
        logits_TE = self.logits(x_TD)
        expert_T = logits_TE.argmax(dim=1)
        if self.training:
            balanced = balanced_assignment(logits_TE[active_T]).to(expert_T.device)
            expert_T = expert_T.index_put((active_T,), balanced)
        weight_T1 = logits_TE.gather(1, expert_T.unsqueeze(1)).sigmoid()
        return route_to_one(expert_T, weight_T1, active_T, logits_TE.softmax(dim=-1), logits_TE)


# A balanced assignment: experts have equally many tokens, and the sum of affinities is greatest.
#
# Prices of the experts, found approximately, send nearly as many tokens to each. What is left is mended
# exactly: as long as an expert has too many tokens, the cheapest chain of moves brings one to an expert that
# has too few (successive shortest paths; a chain is cheapest in the affinities that its tokens lose). So the
# result is as good as any, whatever the prices were.

# Of the affinities' spread: how soft the assignment is that the prices balance, from rough to fine.
SOFTNESS = (0.3, 0.1, 0.03, 0.01)
ROUNDS = 8  # for each


@torch.no_grad()
def balanced_assignment(affinity_TE: Tensor) -> Tensor:
    """The expert of each token ``(T,)``; T / E tokens for each expert, or one more for T modulo E of them.

    Of all such assignments it has the greatest sum of affinities. They are read on the host. Where one is not
    a finite number, it counts as the smallest that is.
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
    """``(E,)``, at which about as many tokens prefer each expert (Sinkhorn's iterations)."""
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
    """One that no exchange between experts improves, from the start and after every move.

    Each expert has ``ceil(T / E)`` places. Where there are more places than tokens, the experts with the
    lowest prices leave one empty, and an empty place can move to an expert that has none.

    Args:
        affinity_TE: in double precision, on the host.
        price_E: any.
    """

    def __init__(self, affinity_TE: Tensor, price_E: Tensor):
        tokens, experts = affinity_TE.shape
        self.affinity_TE = affinity_TE
        self.expert_T = (affinity_TE - price_E).argmax(1)
        self.places = -(-tokens // experts)
        self.empty_E = torch.zeros(experts, dtype=torch.bool)
        self.empty_E[price_E.argsort()[: self.places * experts - tokens]] = True
        # What it costs to move the token for which it costs least, and which one that is.
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
        """``(E, E)`` from one expert to another: what a move costs, and its token; -1: an empty place."""
        empty_EE = self.empty_E.unsqueeze(1) & ~self.empty_E & (self.cost_EE > 0)
        cost_EE = self.cost_EE.masked_fill(empty_EE, 0)
        return cost_EE.fill_diagonal_(torch.inf), self.mover_EE.masked_fill(empty_EE, -1)

    def _cheapest_path(self, start_E: Tensor, end_E: Tensor, edge_EE: Tensor) -> list[int]:
        """From any expert of ``start`` to any of ``end``, by the algorithm of Bellman and Ford."""
        distance_E = torch.zeros(len(start_E), dtype=torch.double).masked_fill(~start_E, torch.inf)
        before_E = torch.full_like(start_E, -1, dtype=torch.long)
        for _ in range(len(start_E) - 1):
            through_E, from_E = (distance_E.unsqueeze(1) + edge_EE).min(0)
            shorter_E = through_E < distance_E - 1e-12  # rounding makes no circles
            if not shorter_E.any():
                break
            distance_E = through_E.where(shorter_E, distance_E)
            before_E = from_E.where(shorter_E, before_E)
        path = [int(distance_E.where(end_E, torch.inf).argmin())]
        while before_E[path[0]] >= 0:
            path.insert(0, int(before_E[path[0]]))
        return path
