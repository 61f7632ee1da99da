"""Gates that look up an expert by the token's id: the only one, or the first of several.

Shapes: T tokens, D embedding, E experts, K choices per token.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from smoe_fairseq.modules.gates.linear import Gate, route_to_one
from smoe_fairseq.modules.gates.top_k import RANKED, TopKGate
from smoe_fairseq.modules.routing import Routing


class HashGate(Gate):
    """``expert = table[id]``, weight 1: nothing is learnt (hash layers, Roller et al. 2021).

    There is no capacity and no loss.

    Attributes:
        table: the expert of each id, ``(V,)``; part of the state dict.
    """

    summary = "one, by a table of token ids"
    options = frozenset({"hash_table"})
    extra_input = "id"
    top_k = 1
    has_logits = False
    single_stratum = True
    unprunable = "a table with an expert for every token of the dictionary"

    def __init__(self, config, *sizes: int):
        super().__init__(config, *sizes)
        self.register_buffer("table", config.hash_table.clone())

    def decide(self, x_TD: Tensor, active_T: Tensor, id_T: Tensor) -> Routing:
        """The probabilities are 1 or 0."""
        expert_T = self.table[id_T]
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        probs_TE = F.one_hot(expert_T, self.num_experts).to(dtype)
        return route_to_one(expert_T, probs_TE.new_ones(x_TD.shape[0], 1), active_T, probs_TE)


class HashTopKGate(TopKGate):
    """The first expert is ``table[id]``; the others have the highest scores, as in `TopKGate`.

    Scores weight all K experts, so the gate learns from the first one, too. The balance loss counts first
    choices, which the table fixes, so it moves the other choices towards experts with few first choices.
    """

    summary = "the first by that table, the others by score"
    options = RANKED | {"hash_table"}
    extra_input = "id"
    single_stratum = True
    can_upcycle = False  # the table is made for a dictionary
    unprunable = HashGate.unprunable

    def __init__(self, config, *sizes: int):
        super().__init__(config, *sizes)
        self.register_buffer("table", config.hash_table.clone())

    def decide(self, x_TD: Tensor, active_T: Tensor, id_T: Tensor) -> Routing:
        """As `TopKGate.decide`, with the first choices from the table."""
        return super().decide(x_TD, active_T, first_T1=self.table[id_T].unsqueeze(1))
