"""The expert-choice gate: experts choose tokens.

Shapes: T tokens, D embedding, E experts; K is E here, and choice e is expert e.
"""

import torch
from torch import Tensor

from smoe_fairseq.modules.gates.linear import LinearGate
from smoe_fairseq.modules.gates.top_k import RANKED
from smoe_fairseq.modules.routing import Places, Routing, most_copies


class ExpertChoiceGate(LinearGate):
    """Each expert takes the ``ceil(factor T / E)`` tokens that score it highest (Zhou et al. 2022).

    Scores are a softmax over the experts; they are the weights, too. A token may have several experts or
    none. The choice depends on all tokens, even later ones, so decoders cannot use this gate. In evaluation,
    experts choose within each sentence, so that results do not depend on the batch, and the factor is
    ``eval_capacity_factor`` unless that is 0. There is no loss.
    """

    summary = "each expert chooses its best tokens (encoder only)"
    options = frozenset({"capacity_factor", "eval_capacity_factor"})
    extra_input = "sentence"
    single_stratum = True
    needs_capacity = True
    in_decoder = "topk"
    decoder_options = RANKED
    any_number = True
    ordered = False
    weights_depend_on_all = True

    def __init__(self, config, *sizes: int):
        super().__init__(config, *sizes)
        self.factor = config.capacity_factor
        self.eval_factor = config.eval_capacity_factor or self.factor
        self.top_k = self.num_experts  # at most

    @classmethod
    def experts_per_token(cls, config, num_experts: int) -> float:
        return float(min(config.capacity_factor, num_experts))

    def decide(self, x_TD: Tensor, active_T: Tensor, sentence_T: Tensor) -> Routing:
        """``sentence`` is the index of each token's sentence."""
        logits_TE = self.checked_logits(x_TD)
        probs_TE = logits_TE.softmax(dim=-1)
        group_T = torch.zeros_like(sentence_T) if self.training else sentence_T
        factor = self.factor if self.training else self.eval_factor
        taken_TE = self.take(probs_TE.detach(), group_T, active_T, factor)

        # For the statistics: the expert with the largest weight, if any has taken the token.
        first_choice_T = (probs_TE + taken_TE).argmax(1)
        routing = self.route(taken_TE, probs_TE, active_T, probs_TE, logits_TE, first_choice_T)
        if self.training:
            routing = routing._replace(
                most=int(most_copies(factor, *probs_TE.shape)) * len(routing.kept_E)
            )
        return routing

    def route(
        self, taken_TE: Tensor, weight_TE: Tensor, active_T: Tensor, *scores: Tensor, **optional
    ) -> Routing:
        """The routing of the tokens that each expert has taken; other arguments as in `Routing.of`."""
        choice_TE = torch.arange(self.num_experts, device=taken_TE.device).expand_as(taken_TE)
        places = Places(taken_TE.cumsum(0) - 1, None, taken_TE.sum(0))
        return Routing.of(choice_TE, weight_TE, taken_TE, places, active_T, *scores, **optional)

    def take(self, score_TE: Tensor, group_T: Tensor, active_T: Tensor, factor: float) -> Tensor:
        """``(T, E)``: whether the token is among the expert's best ``ceil(factor T_g / E)`` of its group."""
        # The host does not know the number of groups, so there are T + 1; the last has inactive tokens.
        group_T = group_T.masked_fill(~active_T, group_T.shape[0])
        size_G = group_T.new_zeros(group_T.shape[0] + 1)
        size_G.scatter_add_(0, group_T, torch.ones_like(group_T))
        best_TE = score_TE.argsort(dim=0, descending=True, stable=True)
        order_TE = best_TE.gather(0, group_T[best_TE].argsort(dim=0, stable=True))
        place_T1 = torch.arange(group_T.shape[0], device=group_T.device).unsqueeze(1)
        start_G = size_G.cumsum(0) - size_G
        rank_TE = torch.empty_like(order_TE)
        rank_TE.scatter_(0, order_TE, place_T1 - start_G[group_T[order_TE]])
        most_G = most_copies(factor, size_G, self.num_experts)
        return (rank_TE < most_G[group_T].unsqueeze(1)) & active_T.unsqueeze(1)
