"""The gate of Mixture-of-Depths: in training the best tokens of each sentence, else those above a threshold.

Shapes: T tokens, D embedding, E experts; K is E here, and choice e is expert e's.
"""

from torch import Tensor

from smoe_fairseq.modules.gates.expert_choice import ExpertChoiceGate
from smoe_fairseq.modules.gates.linear import all_active
from smoe_fairseq.modules.gates.threshold import RunningThreshold
from smoe_fairseq.modules.routing import Routing


class DepthsGate(ExpertChoiceGate):
    """``x + r FFN(x)`` for some tokens, ``x`` for the others, ``r = w x`` (Raposo et al. 2024).

    With one expert of the FFN's width it is Mixture-of-Depths, with more of them each chooses by itself. In
    training an expert takes the ``ceil(factor T / E)`` tokens of highest r of each sentence, later ones of
    the decoder too. In evaluation it takes those whose r is above its threshold, a running mean over the
    batches of training: then no token depends on another one. There is no loss.

    Args:
        factor: experts per token on average.
        step: share of an update's score in the running mean.
    """

    learns_number = True
    default_capacity = 0.5
    learns_by_counts = True

    @classmethod
    def of_config(cls, config, embed_dim: int, num_experts: int, own_experts: int):
        """As of `Gate`."""
        scales = config.gate_init_scale, config.threshold_step
        return cls(embed_dim, num_experts, config.capacity_factor, *scales)

    def __init__(
        self,
        embed_dim: int,
        num_experts: int,
        factor: float = 0.5,
        init_scale: float = 1.0,
        step: float = 0.05,
    ):
        super().__init__(embed_dim, num_experts, factor, init_scale=init_scale)
        self.threshold = RunningThreshold(num_experts, step)

    @property
    def observes(self) -> int:
        """As of `ThresholdGate`."""
        return self.num_experts + 1

    def update(self, observed_N: Tensor) -> None:
        """As of `Gate`."""
        self.threshold.update(observed_N)

    def forward(self, x_TD: Tensor, active_T: Tensor | None, sentence_T: Tensor) -> Routing:
        """As of `ExpertChoiceGate`."""
        if active_T is None:
            active_T = all_active(x_TD)
        logits_TE = self.logits(x_TD)
        if self.training:
            taken_TE = self.take(logits_TE.detach(), sentence_T, active_T, self.factor)
        else:
            taken_TE = (logits_TE > self.threshold.value()) & active_T.unsqueeze(1)
        first_choice_T = logits_TE.detach().masked_fill(~taken_TE, float("-inf")).argmax(1)
        scores = logits_TE.softmax(dim=-1), logits_TE, first_choice_T
        observed_N = self.threshold.observed(logits_TE.detach(), active_T, self.factor)
        return self.route(taken_TE, logits_TE, active_T, *scores, observed_N=observed_N)
