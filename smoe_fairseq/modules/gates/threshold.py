"""The expert-threshold gate: an expert processes the tokens whose logit is above its threshold.

Shapes: T tokens, D embedding, E experts that this gate sees; K is E here.
"""

import torch
from torch import Tensor, nn

from smoe_fairseq.modules.gates.linear import AnyNumberGate
from smoe_fairseq.modules.routing import Routing


class ThresholdGate(AnyNumberGate):
    """Expert e processes the tokens with ``s_te > c_e``, ``s = W x``, weighted by ``sigmoid(s_te)``.

    ``c_e`` is a running mean over updates of the score of rank ``k T / E`` among the T tokens of a batch
    (expert threshold routing, arXiv 2603.11535). It is expert choice for decoders, since a token's experts do
    not depend on other tokens. There is no balance loss: the threshold of an expert without tokens falls
    until it has tokens again. A token without an expert keeps its residual. The first choice is the expert
    whose threshold is exceeded by most; an exit bias changes only the first choice.
    """

    summary = "all with a score above a running threshold"
    options = AnyNumberGate.options | {"top_k", "threshold_step"}
    learner = "threshold"
    learns_by_counts = True

    def __init__(self, config, *sizes: int):
        super().__init__(config, *sizes)
        self.target = config.top_k  # k
        self.threshold = RunningThreshold(self.num_experts, config.threshold_step)

    def decide(self, x_TD: Tensor, active_T: Tensor) -> Routing:
        logits_TE, threshold_E = self.checked_logits(x_TD), self.threshold.value()
        margin_TE = (logits_TE - threshold_E).detach()
        margin_TE, choice_TE = margin_TE.sort(dim=1, descending=True, stable=True)
        weight_TE = logits_TE.sigmoid().gather(1, choice_TE)
        chosen_TE = (margin_TE > 0) & active_T.unsqueeze(1)
        biased_TE = self.exit_bias(logits_TE)
        first_choice_T = (biased_TE - threshold_E).argmax(1)
        routing = self.route(choice_TE, weight_TE, chosen_TE, active_T, biased_TE, first_choice_T)
        observed_N = self.threshold.observed(logits_TE.detach(), active_T, self.target)
        return routing._replace(observed_N=observed_N)


class RunningThreshold(nn.Module):
    """A threshold per expert, stored in whole numbers of `UNIT`, which stay exact in half precision.

    Args:
        step: weight of the newest score in the mean.
    """

    UNIT, MAX = 2.0**-16, 2.0**15  # scores are clamped to `MAX`
    UNSET = torch.iinfo(torch.long).min

    def __init__(self, num_experts: int, step: float):
        super().__init__()
        self.step, self.num_observed = step, num_experts + 1
        self.register_buffer("steps", torch.full((num_experts,), self.UNSET))

    def value(self) -> Tensor:
        """``(E,)``, float32; 0 before the first update."""
        return self.steps.masked_fill(self.steps == self.UNSET, 0).float() * self.UNIT

    def observed(self, score_TE: Tensor, active_T: Tensor, target: float) -> Tensor:
        """``(E + 1,)`` for `update`: the highest score with ``k T / E`` scores above it, times T; and T.

        Zeros in evaluation.
        """
        if not self.training:
            return self.steps.new_zeros(len(self.steps) + 1)
        number = active_T.sum()
        rank = (target * number / score_TE.shape[1]).round().long().minimum(number)
        score_TE = score_TE.masked_fill(~active_T.unsqueeze(1), -self.MAX)
        score_TE = score_TE.sort(dim=0, descending=True).values
        lowest_1E = score_TE.new_full((1, score_TE.shape[1]), -self.MAX)
        score_E = torch.cat([score_TE, lowest_1E]).index_select(0, rank.unsqueeze(0))[0]
        units_E = (score_E.clamp(-self.MAX, self.MAX) / self.UNIT).ceil().long()
        return torch.cat([units_E * number, number.unsqueeze(0)])

    def update(self, observed_N: Tensor) -> None:
        """``observed`` are sums of `observed`; the first update sets the mean, later ones move it."""
        exact = torch.float32 if self.steps.device.type == "mps" else torch.float64
        observed_N = observed_N.to(self.steps.device)
        newest_E = (observed_N[:-1].to(exact) / observed_N[-1].clamp(min=1)).round().long()
        moved_E = self.steps + (self.step * (newest_E - self.steps).to(exact)).round().long()
        moved_E = torch.where(self.steps == self.UNSET, newest_E, moved_E)
        self.steps.copy_(torch.where(observed_N[-1] > 0, moved_E, self.steps))
