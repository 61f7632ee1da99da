"""Gates that look an expert up by the token's id: the only one, or the first of several.

Shapes: T tokens, D embedding, E experts, K choices per token.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from smoe_fairseq.modules.gates.linear import Gate, route_to_one
from smoe_fairseq.modules.gates.top_k import TopKGate
from smoe_fairseq.modules.routing import Routing


class HashGate(Gate):
    """``expert = table[id]``, weight 1: nothing is learnt (hash layers, Roller et al. 2021).

    An expert takes all the tokens that it is given, and there is no loss.

    Attributes:
        table: the expert of each id, ``(V,)``; part of the state dict, as of `HashTopKGate`.
    """

    extra_input = "id"
    top_k = 1
    of_one_stratum = True

    def __init__(self, config, *sizes: int):
        super().__init__(config, *sizes)
        self.register_buffer("table", config.hash_table.clone())

    def decide(self, x_TD: Tensor, active_T: Tensor, id_T: Tensor) -> Routing:
        """By ``id`` alone. Probabilities are those of the table, 1 or 0."""
        expert_T = self.table[id_T]
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        probs_TE = F.one_hot(expert_T, self.num_experts).to(dtype)
        return route_to_one(expert_T, probs_TE.new_ones(len(x_TD), 1), active_T, probs_TE)


class HashTopKGate(TopKGate):
    """The first expert is ``table[id]``, the others are those of highest score, as of `TopKGate`.

    All K are weighted by the gate, which learns from the first expert too. The balance loss counts first
    choices, which the table fixes, so it moves the other choices towards experts that have few.
    """

    extra_input = "id"
    of_one_stratum = True

    def __init__(self, config, *sizes: int):
        super().__init__(config, *sizes)
        self.register_buffer("table", config.hash_table.clone())

    def decide(self, x_TD: Tensor, active_T: Tensor, id_T: Tensor) -> Routing:
        """As of `TopKGate`, with the first choice of each id."""
        return super().decide(x_TD, active_T, first_T1=self.table[id_T].unsqueeze(1))
