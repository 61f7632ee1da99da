"""The expert-threshold gate: an expert processes the tokens whose logit is above its threshold.

Shapes: T tokens, D embedding, E experts that this gate sees; K is E here.
"""

import torch
from torch import Tensor, nn

from smoe_fairseq.modules.gates.linear import AnyNumberGate
from smoe_fairseq.modules.routing import Routing


class ThresholdGate(AnyNumberGate):
    """Expert e has the tokens with ``s_te > c_e``, ``s = W x``, weighted by ``sigmoid(s_te)``.

    ``c_e`` is a running mean, over updates, of the score of rank ``k T / E`` among the T tokens of a batch
    (expert threshold routing, arXiv 2603.11535): expert choice for a decoder, since a token's experts do not
    depend on other tokens. There is no balance loss. An expert that no token reaches keeps its score of that
    rank, so its threshold falls until it has tokens again. A token without any expert keeps its residual. The
    first choice is the expert whose threshold is exceeded by most; an exit bias is of it alone, and changes
    no weight.
    """

    takes_top_k = True
    learner = "threshold"
    learns_by_counts = True

    def __init__(self, config, *sizes: int):
        super().__init__(config, *sizes)
        self.goal = config.top_k  # k
        self.threshold = RunningThreshold(self.num_experts, config.threshold_step)

    def decide(self, x_TD: Tensor, active_T: Tensor) -> Routing:
        logits_TE, threshold_E = self.logits(x_TD), self.threshold.value()
        margin_TE = (logits_TE - threshold_E).detach()
        margin_TE, choice_TE = margin_TE.sort(dim=1, descending=True, stable=True)
        weight_TE = logits_TE.sigmoid().gather(1, choice_TE)
        chosen_TE = (margin_TE > 0) & active_T.unsqueeze(1)
        biased_TE = self.exit_bias(logits_TE)
        first_choice_T = (biased_TE - threshold_E).argmax(1)
        routing = self.route(choice_TE, weight_TE, chosen_TE, active_T, biased_TE, first_choice_T)
        observed_N = self.threshold.observed(logits_TE.detach(), active_T, self.goal)
        return routing._replace(observed_N=observed_N)


class RunningThreshold(nn.Module):
    """A threshold for each expert, kept in whole numbers of `UNIT`: exact in a model of half precision.

    Args:
        step: share of the newest score in the mean.
    """

    UNIT, MOST = 2.0**-16, 2.0**15  # scores beyond the latter count as that
    UNSET = torch.iinfo(torch.long).min

    def __init__(self, num_experts: int, step: float):
        super().__init__()
        self.step, self.observes = step, num_experts + 1
        self.register_buffer("steps", torch.full((num_experts,), self.UNSET))

    def value(self) -> Tensor:
        """``(E,)``, float32; 0 before the first update."""
        return self.steps.masked_fill(self.steps == self.UNSET, 0).float() * self.UNIT

    def observed(self, score_TE: Tensor, active_T: Tensor, goal: float) -> Tensor:
        """``(E + 1,)``, for `update`: the highest score that leaves ``k T / E`` above it, times T; and T.

        0 in evaluation, where nothing is updated.
        """
        if not self.training:
            return self.steps.new_zeros(len(self.steps) + 1)
        number = active_T.sum()
        rank = (goal * number / score_TE.shape[1]).round().long().minimum(number)
        score_TE = score_TE.masked_fill(~active_T.unsqueeze(1), -self.MOST)
        score_TE = score_TE.sort(dim=0, descending=True).values
        lowest_1E = score_TE.new_full((1, score_TE.shape[1]), -self.MOST)
        score_E = torch.cat([score_TE, lowest_1E]).index_select(0, rank.unsqueeze(0))[0]
        units_E = (score_E.clamp(-self.MOST, self.MOST) / self.UNIT).ceil().long()
        return torch.cat([units_E * number, number.unsqueeze(0)])

    def update(self, observed_N: Tensor) -> None:
        """With sums of `observed`; the first ones are taken as they are, later ones move the mean."""
        exact = torch.float32 if self.steps.device.type == "mps" else torch.float64
        observed_N = observed_N.to(self.steps.device)
        found_E = (observed_N[:-1].to(exact) / observed_N[-1].clamp(min=1)).round().long()
        moved_E = self.steps + (self.step * (found_E - self.steps).to(exact)).round().long()
        moved_E = torch.where(self.steps == self.UNSET, found_E, moved_E)
        self.steps.copy_(torch.where(observed_N[-1] > 0, moved_E, self.steps))
