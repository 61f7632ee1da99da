"""The gate of Mixture-of-Depths: the best tokens of each sentence, or in evaluation those above a threshold.

Shapes: T tokens, D embedding, E experts; K is E here, and choice e is expert e.
"""

from torch import Tensor

from smoe_fairseq.modules.gates.expert_choice import ExpertChoiceGate
from smoe_fairseq.modules.gates.threshold import RunningThreshold
from smoe_fairseq.modules.routing import Routing


class DepthsGate(ExpertChoiceGate):
    """``x + r FFN(x)`` for some tokens, ``x`` for the others, ``r = w x`` (Raposo et al. 2024).

    With one expert of the FFN's width it is Mixture-of-Depths; several experts choose independently. In
    training, an expert takes the ``ceil(factor T / E)`` tokens of each sentence with the highest r; in a
    decoder this depends on later tokens. In evaluation, it takes the tokens whose r is above its threshold,
    a running mean over training batches, so tokens do not depend on each other. There is no loss.
    """

    summary = "Mixture-of-Depths"
    options = frozenset({"capacity_factor", "threshold_step"})
    in_decoder = None
    decoder_options = frozenset()
    skips_tokens = True
    learns_num_experts = True
    default_capacity = 0.5
    weights_depend_on_all = False
    learner = "threshold"
    learns_by_counts = True

    def __init__(self, config, *sizes: int):
        super().__init__(config, *sizes)
        self.threshold = RunningThreshold(self.num_experts, config.threshold_step)

    def decide(self, x_TD: Tensor, active_T: Tensor, sentence_T: Tensor) -> Routing:
        """As `ExpertChoiceGate.decide`."""
        logits_TE = self.checked_logits(x_TD)
        if self.training:
            taken_TE = self.take(logits_TE.detach(), sentence_T, active_T, self.factor)
        else:
            taken_TE = (logits_TE > self.threshold.value()) & active_T.unsqueeze(1)
        first_choice_T = logits_TE.detach().masked_fill(~taken_TE, float("-inf")).argmax(1)
        scores = logits_TE.softmax(dim=-1), logits_TE, first_choice_T
        observed_N = self.threshold.observed(logits_TE.detach(), active_T, self.factor)
        return self.route(taken_TE, logits_TE, active_T, *scores, observed_N=observed_N)
