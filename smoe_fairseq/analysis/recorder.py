"""Which expert each token chose: counters filled while a model runs.

Shapes: B sentences, S positions, T tokens, N of them in a stratum, V token types, L strata, E experts.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from smoe_fairseq.analysis.inputs import dictionary_of
from smoe_fairseq.models.moe_layers import moe_blocks
from smoe_fairseq.modules import StratifiedMoE
from smoe_fairseq.modules.routing import Routing


class BlockFollower:
    """Follows the tokens of a batch through one block.

    Attributes:
        requested_BS: strata that each token of the last batch stopped at, 0 at padding.
    """

    def __init__(self, block: StratifiedMoE, vocabulary: int, padding: int):
        self.block = block
        self.vocabulary = vocabulary
        self.padding = padding

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

    def record(self, stratum: int, routing: Routing, active_T: Tensor | None) -> None:
        """One gate has chosen, for the tokens in its stratum or, with a mask, for all rows."""
        strata = self.block.strata
        index_N = (self.position_T == stratum).nonzero().squeeze(1)
        row_N = torch.arange(len(index_N), device=index_N.device) if active_T is None else index_N
        expert_N = routing.first_choice_T[row_N] + strata.first_experts[stratum]
        self.note(stratum, index_N, expert_N, routing, row_N)
        self.requested_T[index_N] += 1
        if strata.fixed_depth:
            self.position_T[index_N] = stratum + 1
        else:
            self.position_T[index_N] = self.block.stratum_of_expert[expert_N] + 1

    def note(
        self, stratum: int, index_N: Tensor, expert_N: Tensor, routing: Routing, row_N: Tensor
    ) -> None:
        """What is kept of N tokens: numbers in the batch, first choices, rows of the routing."""


class BlockRecorder(BlockFollower):
    """Counts the first choices of a block's gates by token type.

    Attributes:
        counts: ``(V, L, E)``, how often a token of type v that was in stratum i chose expert e first.
    """

    def __init__(self, block: StratifiedMoE, vocabulary: int, padding: int):
        super().__init__(block, vocabulary, padding)
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

    def note(
        self, stratum: int, index_N: Tensor, expert_N: Tensor, routing: Routing, row_N: Tensor
    ) -> None:
        strata = self.block.strata
        cell_N = (self.type_T[index_N] * len(strata) + stratum) * strata.num_experts + expert_N
        self.counts.view(-1).index_add_(0, cell_N, torch.ones_like(cell_N))


class Recorder:
    """A follower for every MoE layer of a model, by the layer's name.

    Args:
        model: one of ours in evaluation mode.
        task: the fairseq task of its dictionaries.
        follower: what is kept of each layer.
    """

    def __init__(self, model: nn.Module, task, follower: type[BlockFollower] = BlockRecorder):
        self.model = model
        self.blocks = {}
        for name, block in moe_blocks(model).items():
            dictionary = dictionary_of(task, name.split(".")[0])
            self.blocks[name] = follower(block, len(dictionary), dictionary.pad())

    @contextmanager
    def recording(self) -> Iterator["Recorder"]:
        """Listens to the gates as long as the context is open."""
        hooks = [
            (gate, _listener(recorder, stratum))
            for recorder in self.blocks.values()
            for stratum, gate in enumerate(recorder.block.gates)
        ]
        with hooked(hooks):
            yield self

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


@contextmanager
def hooked(hooks: Iterable[tuple[nn.Module, Callable]]) -> Iterator[None]:
    """Each hook is called after its module's forward pass as long as the context is open."""
    handles = [module.register_forward_hook(hook) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def given(net_input: dict, side: str) -> Tensor:
    """``(B, S)``: the tokens that a side is given; a language model's decoder has the only ones."""
    if side == "decoder" and "prev_output_tokens" in net_input:
        return net_input["prev_output_tokens"]
    return net_input["src_tokens"]


def _listener(recorder: BlockFollower, stratum: int):
    def listen(gate, inputs, routing):
        active_T = inputs[1] if len(inputs) > 1 else None
        recorder.record(stratum, routing, active_T)

    return listen
