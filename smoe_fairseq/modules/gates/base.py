"""The gate of BASE layers: in training every expert gets as many tokens as the others.

Shapes: T tokens, D embedding, E experts; K is 1.
"""

from torch import Tensor, nn

from smoe_fairseq.modules.capacity import Capacity
from smoe_fairseq.modules.gates.assignment import balanced_assignment
from smoe_fairseq.modules.gates.linear import LinearGate, all_active
from smoe_fairseq.modules.routing import Routing


class BaseGate(LinearGate):
    """One expert per token, by a balanced assignment (Lewis et al. 2021), weighted by ``sigmoid(w_e x)``.

    In training the assignment is that of `balanced_assignment` over the tokens of this process, and through
    it there is no gradient; in evaluation each token has the expert of its highest affinity ``w_e x``.
    There is no loss and no other limit on the experts.
    """

    top_k = 1
    expected_choices = 1.0

    def __init__(self, embed_dim: int, num_experts: int, init_scale: float = 1.0):
        super().__init__(embed_dim, num_experts, init_scale)
        self.capacity = Capacity(0.0, 0.0)

    def reset_parameters(self):
        """As the authors'."""
        nn.init.orthogonal_(self.weight, gain=0.1 * self.init_scale)

    def forward(self, x_TD: Tensor, active_T: Tensor | None = None) -> Routing:
        """As of `TopKGate`."""
        if active_T is None:
            active_T = all_active(x_TD)
        logits_TE = self.logits(x_TD)
        expert_T = logits_TE.argmax(dim=1)
        if self.training:
            expert_T = self.balance(expert_T, logits_TE, active_T)
        asked_T1 = expert_T.masked_fill(~active_T, self.num_experts).unsqueeze(1)
        weight_T1 = logits_TE.gather(1, expert_T.unsqueeze(1)).sigmoid()
        places = self.capacity(asked_T1, logits_TE, active_T.sum())
        return Routing(
            expert_TK=asked_T1,
            weight_TK=weight_T1 * active_T.unsqueeze(1),
            rank_TK=places.rank_TK,
            kept_E=places.kept_E,
            first_choice_T=expert_T,
            active_T=active_T,
            logits_TE=logits_TE,
            probs_TE=logits_TE.softmax(dim=-1),
            asked_TK=asked_T1,
            chosen_TK=active_T.unsqueeze(1),
            kept_TK=active_T.unsqueeze(1),
        )

    @staticmethod
    def balance(expert_T: Tensor, logits_TE: Tensor, active_T: Tensor) -> Tensor:
        """The expert of each token; of those that take part, as many for each."""
        balanced = balanced_assignment(logits_TE[active_T]).to(expert_T.device)
        return expert_T.index_put((active_T,), balanced)
