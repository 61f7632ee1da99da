"""The ReLU gate: an expert processes the tokens whose logit is above 0.

Shapes: T tokens, D embedding, E experts that this gate sees; K is E here.
"""

import torch
from torch import Tensor, nn

from smoe_fairseq.modules.gates.linear import AnyNumberGate
from smoe_fairseq.modules.routing import Routing


class ReLUGate(AnyNumberGate):
    """``g = relu(W x)``, ``y = sum_e g_e FFN_e(x)`` (ReMoE, Wang et al., ICLR 2025).

    The number of experts per token is learnt by gradient. An L1 loss keeps its mean over all layers at k:
    ``coefficient * sum_e f_e mean(g_e)`` with ``f_e = E / (k T) #{g_te > 0}``, which is larger for busy
    experts. A token without an expert keeps its residual. The routing's probabilities are a softmax of the
    logits; the first choice has the highest logit. An exit bias changes only the first choice.
    """

    summary = "all with a logit above 0"
    options = AnyNumberGate.options | {"top_k"}
    own_loss = "moe_l1_loss"
    learner = "coefficient"
    learns_by_counts = True
    shares_counts = True

    def __init__(self, config, *sizes: int):
        super().__init__(config, *sizes)
        self.target = config.top_k  # k
        self.coefficient = L1Coefficient(self.target)

    def decide(self, x_TD: Tensor, active_T: Tensor) -> Routing:
        logits_TE = self.checked_logits(x_TD)
        weight_TE, choice_TE = logits_TE.relu().sort(dim=1, descending=True, stable=True)
        chosen_TE = (weight_TE > 0) & active_T.unsqueeze(1)
        logits_TE = self.exit_bias(logits_TE)
        first_choice_T = logits_TE.argmax(1)
        routing = self.route(choice_TE, weight_TE, chosen_TE, active_T, logits_TE, first_choice_T)
        tokens = active_T.sum()
        share_E = routing.all_choices_E / tokens.clamp(min=1)
        mean_busy = (share_E[choice_TE] * weight_TE * chosen_TE).sum() / tokens.clamp(min=1)
        return routing._replace(
            own_loss=self.coefficient.value() * self.num_experts / self.target * mean_busy,
            observed_N=torch.stack([chosen_TE.sum(), tokens]),
        )


class L1Coefficient(nn.Module):
    """``1e-8 * 1.2^n``: n rises by 1 after an update with more than ``target`` experts per token, else falls.

    n is stored, since a whole number stays exact in half precision.
    """

    START, FACTOR, MAX_STEPS = 1e-8, 1.2, 400
    num_observed = 2

    def __init__(self, target: int):
        super().__init__()
        self.target = target
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def value(self) -> Tensor:
        """A scalar, float32."""
        return self.START * self.FACTOR ** self.steps.float()

    def update(self, observed_N: Tensor) -> None:
        """``observed`` are the numbers of copies and of tokens."""
        copies, tokens = observed_N.unbind()
        steps = self.steps + (copies - self.target * tokens).to(self.steps).sign()
        self.steps.copy_(steps.clamp(-self.MAX_STEPS, self.MAX_STEPS))  # keeps the value finite
