"""The gate of BASE layers: in training every expert gets as many tokens as the others.

Shapes: T tokens, D embedding, E experts; K is 1.
"""

from torch import Tensor, nn

from smoe_fairseq.modules.gates.assignment import balanced_assignment
from smoe_fairseq.modules.gates.linear import LinearGate, all_active
from smoe_fairseq.modules.gates.single import route_to_one
from smoe_fairseq.modules.routing import Routing


class BaseGate(LinearGate):
    """One expert per token, by a balanced assignment (Lewis et al. 2021), weighted by ``sigmoid(w_e x)``.

    In training the assignment is that of `balanced_assignment` over the tokens of this process, and through
    it there is no gradient; in evaluation each token has the expert of its highest affinity ``w_e x``.
    There is no loss and no other limit on the experts.
    """

    top_k = 1
    expected_choices = 1.0

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
        weight_T1 = logits_TE.gather(1, expert_T.unsqueeze(1)).sigmoid()
        return route_to_one(expert_T, weight_T1, active_T, logits_TE.softmax(dim=-1), logits_TE)

    @staticmethod
    def balance(expert_T: Tensor, logits_TE: Tensor, active_T: Tensor) -> Tensor:
        """The expert of each token; of those that take part, as many for each."""
        balanced = balanced_assignment(logits_TE[active_T]).to(expert_T.device)
        return expert_T.index_put((active_T,), balanced)
