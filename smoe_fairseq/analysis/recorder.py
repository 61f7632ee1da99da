"""Which expert each token chose: counters filled while a model runs.

Shapes: B sentences, S positions, T tokens, V token types, L strata, E experts.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from smoe_fairseq.analysis.inputs import dictionary_of
from smoe_fairseq.models.moe_layers import moe_blocks
from smoe_fairseq.modules import StratifiedMoE


class BlockRecorder:
    """Follows the tokens through one block and counts the first choices of its gates by token type.

    Attributes:
        counts: ``(V, L, E)``, how often a token of type v that was in stratum i chose expert e first.
        requested_BS: strata that each token of the last batch stopped at, 0 at padding.
    """

    def __init__(self, block: StratifiedMoE, vocabulary: int, padding: int):
        self.block = block
        self.padding = padding
        self.vocabulary = vocabulary
        self.reset()

    def reset(self) -> None:
        """Empties the counters."""
        strata = self.block.strata
        self.counts = torch.zeros(
            self.vocabulary,
            len(strata),
            strata.num_experts,
            dtype=torch.int64,
            device=self.block.stratum_of_expert.device,
        )

    def begin(self, tokens_BS: Tensor) -> None:
        """A batch begins: all tokens but padding are in stratum 0."""
        self.shape = tokens_BS.shape
        self.type_T = tokens_BS.reshape(-1)
        in_no_stratum = self.type_T == self.padding
        self.position_T = torch.zeros_like(self.type_T).masked_fill(
            in_no_stratum, len(self.block.strata)
        )
        self.requested_T = torch.zeros_like(self.type_T)

    @property
    def requested_BS(self) -> Tensor:
        return self.requested_T.view(self.shape)

    def record(self, stratum: int, first_choice_T: Tensor, active_T: Tensor | None) -> None:
        """One gate has chosen, for the tokens in its stratum or, with a mask, for all rows."""
        strata = self.block.strata
        index = (self.position_T == stratum).nonzero().squeeze(1)
        chosen = first_choice_T if active_T is None else first_choice_T[index]
        expert = chosen + strata.first_experts[stratum]
        cell = (self.type_T[index] * len(strata) + stratum) * strata.num_experts + expert
        self.counts.view(-1).index_add_(0, cell, torch.ones_like(cell))
        self.requested_T[index] += 1
        if strata.fixed_depth:
            self.position_T[index] = stratum + 1
        else:
            self.position_T[index] = self.block.stratum_of_expert[expert] + 1


class Recorder:
    """A `BlockRecorder` for every MoE layer of a model, by the layer's name.

    Args:
        model: one of ours in evaluation mode.
        task: the fairseq task of its dictionaries.
    """

    def __init__(self, model: nn.Module, task):
        self.model = model
        self.blocks = {}
        for name, block in moe_blocks(model).items():
            dictionary = dictionary_of(task, name.split(".")[0])
            self.blocks[name] = BlockRecorder(block, len(dictionary), dictionary.pad())

    @contextmanager
    def recording(self) -> Iterator["Recorder"]:
        """Listens to the gates as long as the context is open."""
        handles = []
        for recorder in self.blocks.values():
            for stratum, gate in enumerate(recorder.block.gates):
                handles.append(gate.register_forward_hook(_listener(recorder, stratum)))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def reset(self) -> None:
        for recorder in self.blocks.values():
            recorder.reset()

    @torch.no_grad()
    def run(self, net_input: dict) -> None:
        """One forward pass, the references as decoder input.

        A decoder position counts for the token that it is given, not for the one that it predicts.
        """
        for name, recorder in self.blocks.items():
            recorder.begin(given(net_input, name.split(".")[0]))
        self.model(**net_input)


def given(net_input: dict, side: str) -> Tensor:
    """``(B, S)``: the tokens that a side is given; a language model's decoder has the only ones."""
    if side == "decoder" and "prev_output_tokens" in net_input:
        return net_input["prev_output_tokens"]
    return net_input["src_tokens"]


def _listener(recorder: BlockRecorder, stratum: int):
    def listen(gate, inputs, routing):
        active_T = inputs[1] if len(inputs) > 1 else None
        recorder.record(stratum, routing.first_choice_T, active_T)

    return listen
