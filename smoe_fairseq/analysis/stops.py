"""Where single tokens stop, and which experts compute them there, with which weights.

Shapes: B sentences, S positions, T tokens, N of them in a stratum, K choices.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from smoe_fairseq.analysis import inputs
from smoe_fairseq.analysis.counts import Block
from smoe_fairseq.analysis.recorder import BlockFollower, Recorder
from smoe_fairseq.analysis.visible import visible
from smoe_fairseq.modules.routing import Routing


@dataclass(frozen=True)
class Stop:
    """One token at one stratum.

    Args:
        stratum: counted from 0.
        first: the expert of its first choice, by which it goes on; numbered over the block.
        experts: those that compute it and their weights, best first; none where all were dropped.
    """

    stratum: int
    first: int
    experts: list[tuple[int, float]]


@dataclass(frozen=True)
class SideStops:
    """One side of a sentence pair.

    Args:
        side: "encoder" or "decoder".
        tokens: what the side was given, special tokens included; as they are to be shown.
        special: whether each stands for no text (see `inputs.special`).
        blocks: its MoE layers.
        stops: ``stops[b][t]`` of token t in block b, in the order of its way.
    """

    side: str
    tokens: list[str]
    special: list[bool]
    blocks: list[Block]
    stops: list[list[list[Stop]]]


class StopRecorder(BlockFollower):
    """Keeps each token's stops.

    Attributes:
        stops: of each token of the last batch, ``B * S`` lists.
    """

    def begin(self, tokens_BS: Tensor) -> None:
        super().begin(tokens_BS)
        self.stops: list[list[Stop]] = [[] for _ in range(tokens_BS.numel())]

    def note(
        self, stratum: int, index_N: Tensor, expert_N: Tensor, routing: Routing, row_N: Tensor
    ) -> None:
        before = self.block.strata.first_experts[stratum]
        chosen = zip(
            index_N.tolist(),
            expert_N.tolist(),
            routing.expert_TK[row_N].tolist(),
            routing.weight_TK[row_N].tolist(),
            strict=True,
        )
        for token, first, expert_K, weight_K in chosen:
            experts = [
                (before + expert, weight)
                for expert, weight in zip(expert_K, weight_K, strict=True)
                if expert < routing.num_experts
            ]
            self.stops[token].append(Stop(stratum, first, experts))


class StopFinder:
    """A model's dictionaries and what it takes to follow tokens, made once for many batches.

    Args:
        model: a `SMoETransformerModel` in evaluation mode.
        task: the fairseq task of its dictionaries.
    """

    def __init__(self, model: nn.Module, task):
        self.model, self.task = model, task
        self.dictionaries = {"encoder": task.source_dictionary, "decoder": task.target_dictionary}
        self.special = {
            side: inputs.special(dictionary, task) for side, dictionary in self.dictionaries.items()
        }

    def run(self, net_input: dict) -> list[list[SideStops]]:
        """Both sides of each sentence pair of a batch, teacher-forced: one forward pass.

        A decoder position stands for the token that it is given, as in all of the analysis.

        Args:
            net_input: fairseq's, with ``prev_output_tokens``.
        """
        recorder = Recorder(self.model, self.task, StopRecorder)
        with recorder.recording(), torch.inference_mode():
            recorder.run(net_input)
        given = {"encoder": net_input["src_tokens"], "decoder": net_input["prev_output_tokens"]}
        return [
            [self._side(side, tokens_BS, sentence, recorder) for side, tokens_BS in given.items()]
            for sentence in range(len(given["encoder"]))
        ]

    def _side(self, side: str, tokens_BS: Tensor, sentence: int, recorder: Recorder) -> SideStops:
        dictionary = self.dictionaries[side]
        tokens = tokens_BS[sentence].tolist()
        real = [s for s, token in enumerate(tokens) if token != dictionary.pad()]
        start = sentence * len(tokens)
        of_side = {n: r for n, r in recorder.blocks.items() if n.startswith(side)}
        return SideStops(
            side,
            [visible(dictionary[tokens[s]]) for s in real],
            [bool(self.special[side][tokens[s]]) for s in real],
            [Block(name, recorder.block.strata) for name, recorder in of_side.items()],
            [[recorder.stops[start + s] for s in real] for recorder in of_side.values()],
        )
