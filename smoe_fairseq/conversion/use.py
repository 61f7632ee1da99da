"""What directions use the experts for: choices of the gates and their confidence, by teacher forcing.

Shapes: E experts, K choices per token.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy import ndarray
from torch import nn

from smoe_fairseq.analysis import inputs
from smoe_fairseq.analysis.collect import run_direction
from smoe_fairseq.analysis.recorder import hooked
from smoe_fairseq.models.moe_layers import moe_blocks
from smoe_fairseq.modules.routing import Routing


@dataclass(frozen=True)
class Use:
    """What one direction, or several, use the experts of one MoE layer for; all its gates taken together.

    Args:
        choices: ``(E,)``, how often an expert was chosen, as first or as further expert.
        importance: ``(E,)``, see `LayerRecorder.importance`.
    """

    choices: ndarray
    importance: ndarray

    @property
    def load(self) -> ndarray:
        """``(E,)``: choices of each expert over their mean in the layer; 0: it was never chosen."""
        return self.choices / max(self.choices.mean(), 1e-12)


class LayerRecorder:
    """Sums over what the gates of one MoE layer decide, ``(E,)``, while a model runs."""

    def __init__(self, num_experts: int, device: torch.device):
        self.tokens = 0
        self.firsts, self.confidence, self.choices = (
            torch.zeros(num_experts, dtype=torch.float64, device=device) for _ in range(3)
        )

    def record(self, first_expert: int, is_first: bool, routing: Routing) -> None:
        """One gate has decided, which sees the experts from ``first_expert`` on; padding counts nowhere."""
        seen = slice(first_expert, first_expert + routing.num_experts)
        active_T = routing.active_T
        choice_T = routing.first_choice_T[active_T]
        confidence_T = routing.probs_TE[active_T].gather(1, choice_T.unsqueeze(1)).squeeze(1)
        firsts_E = routing.first_choices_E.double()
        self.tokens += int(active_T.sum()) if is_first else 0
        self.firsts[seen] += firsts_E
        self.confidence[seen].index_add_(0, choice_T, confidence_T.double())
        # The first choice decides where a token goes on even if null experts are all that it gets.
        self.choices[seen] += torch.maximum(routing.kept_E.double(), firsts_E)

    def use(self) -> Use:
        return Use(self.choices.cpu().numpy(), self.importance().cpu().numpy())

    def importance(self) -> torch.Tensor:
        """Rate of first choices x exp(mean confidence of these), ``(E,)`` (Koishekenov et al. 2023).

        The rate is per token of the layer, the confidence a gate's probability of its first choice.
        """
        mean = self.confidence / self.firsts.clamp(min=1)
        return self.firsts / max(self.tokens, 1) * mean.exp()


def use_of(
    model: nn.Module,
    task,
    directions: Iterable[str],
    subset: str = "valid",
    sentences: int | None = None,
    max_tokens: int = inputs.TOKENS_PER_BATCH,
) -> Iterator[dict[str, Use]]:
    """Of one direction after the other, by MoE layer (see `moe_blocks`), over all tokens, special ones too.

    Arguments and errors are those of `collect`.
    """
    device = next(model.parameters()).device

    @torch.no_grad()
    def run(net_input: dict) -> None:
        model(**net_input)

    for name in directions:
        with _recording(model, device) as recorders:
            run_direction(run, model, task, name, subset, sentences, max_tokens)
        yield {layer: recorder.use() for layer, recorder in recorders.items()}


def together(uses: Sequence[dict[str, Use]]) -> dict[str, Use]:
    """Of several directions: all choices, and the mean importance, to which each adds the same."""
    return {
        layer: Use(
            np.sum([use[layer].choices for use in uses], axis=0),
            np.mean([use[layer].importance for use in uses], axis=0),
        )
        for layer in uses[0]
    }


def highest_load(uses: Sequence[dict[str, Use]]) -> dict[str, ndarray]:
    """``(E,)`` of each layer: the load in the direction where it is highest."""
    return {layer: np.max([use[layer].load for use in uses], axis=0) for layer in uses[0]}


@contextmanager
def _recording(model: nn.Module, device: torch.device) -> Iterator[dict[str, LayerRecorder]]:
    recorders, hooks = {}, []
    for layer, block in moe_blocks(model).items():
        recorders[layer] = LayerRecorder(block.strata.num_experts, device)
        for i, gate in enumerate(block.gates):
            first = block.strata.first_experts[i]
            hooks.append((gate, _listener(recorders[layer], first, i == 0)))
    with hooked(hooks):
        yield recorders


def _listener(recorder: LayerRecorder, first_expert: int, is_first: bool):
    def listen(gate, inputs, routing):
        recorder.record(first_expert, is_first, routing)

    return listen
