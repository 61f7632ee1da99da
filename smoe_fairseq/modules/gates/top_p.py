"""The top-p gate: more experts when the gate is uncertain.

Shapes: T tokens, D embedding, E experts that this gate sees; K is E here.
"""

import math

import torch
from torch import Tensor

from smoe_fairseq.modules.gates.linear import AnyNumberGate
from smoe_fairseq.modules.routing import Routing


class TopPGate(AnyNumberGate):
    """The fewest experts whose probabilities sum to ``p`` or more (Dynamic MoE, Huang et al. 2024).

    The probabilities weight their outputs. There is no sampling.
    """

    summary = "the best, up to a probability of --moe-top-p"
    options = AnyNumberGate.options | {"top_p"}
    has_balance_loss = True
    has_entropy_loss = True
    weights_depend_on_all = True

    def __init__(self, config, *sizes: int):
        super().__init__(config, *sizes)
        self.p = config.top_p

    @classmethod
    def experts_per_token(cls, config, num_experts: int) -> float:
        # Rounded, since 0.4 * 5 must be 2.
        return float(min(num_experts, math.ceil(round(config.top_p * num_experts, 9))))

    def decide(self, x_TD: Tensor, active_T: Tensor) -> Routing:
        logits_TE = self.exit_bias(self.checked_logits(x_TD))
        probs_TE = logits_TE.softmax(dim=-1)
        sorted_TE, choice_TE = probs_TE.detach().sort(dim=1, descending=True, stable=True)
        # The sum of the larger probabilities; 0 for the best expert, which is always chosen.
        before_TE = torch.cat(
            [sorted_TE.new_zeros(x_TD.shape[0], 1), sorted_TE.cumsum(1)[:, :-1]], 1
        )
        chosen_TE = (before_TE < self.p) & active_T.unsqueeze(1)
        return self.route(choice_TE, probs_TE.gather(1, choice_TE), chosen_TE, active_T, logits_TE)
