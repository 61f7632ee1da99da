"""The routing of gates that give each token one expert and limit none.

Shapes: T tokens, E experts; K is 1.
"""

from torch import Tensor

from smoe_fairseq.modules.capacity import rank_within_expert
from smoe_fairseq.modules.routing import Routing


def route_to_one(
    expert_T: Tensor,
    weight_T1: Tensor,
    active_T: Tensor,
    probs_TE: Tensor,
    logits_TE: Tensor | None = None,
) -> Routing:
    """Each token that is active goes to its expert, with its weight."""
    num_experts = probs_TE.shape[1]
    active_T1 = active_T.unsqueeze(1)
    asked_T1 = expert_T.masked_fill(~active_T, num_experts).unsqueeze(1)
    rank_T1, kept_E = rank_within_expert(asked_T1, num_experts)
    return Routing(
        expert_TK=asked_T1,
        weight_TK=weight_T1 * active_T1,
        rank_TK=rank_T1,
        kept_E=kept_E,
        first_choice_T=expert_T,
        active_T=active_T,
        logits_TE=logits_TE,
        probs_TE=probs_TE,
        asked_TK=asked_T1,
        chosen_TK=active_T1,
        kept_TK=active_T1,
    )
