"""Records the gates' choices while a model reads a data set."""

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from fairseq.data import Dictionary
from numpy import ndarray
from torch import Tensor, nn

from smoe_fairseq.analysis import inputs
from smoe_fairseq.models.transformer import moe_blocks
from smoe_fairseq.modules import StratifiedMoE
from smoe_fairseq.modules.routing import Routing
from smoe_fairseq.modules.strata import Strata


@dataclass(frozen=True)
class Block:
    """One MoE layer: its name (``encoder.layer.1``) and its strata."""

    name: str
    strata: Strata

    @property
    def side(self) -> str:
        """ "encoder" or "decoder"."""
        return self.name.split(".")[0]

    @property
    def title(self) -> str:
        """``encoder layer 1``."""
        return self.name.replace(".", " ")

    def choices(self) -> list[tuple[int, int]]:
        """(stratum, expert) for all experts that the gate of a stratum sees."""
        pairs = zip(self.strata.first_experts, self.strata.visible, strict=True)
        return [(i, first + e) for i, (first, size) in enumerate(pairs) for e in range(size)]


@dataclass(frozen=True)
class Counts:
    """Counters of one block over some tokens.

    Every token stops at stratum 0, and has one first choice per stop. So the first choices determine the
    number of tokens, their requested capacity and their routes.
    """

    block: Block
    first_choices: ndarray  # ``(L, E)``, tokens in stratum i whose first choice is expert e

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(self.block, self.first_choices + other.first_choices)

    @property
    def tokens(self) -> int:
        return int(self.first_choices[0].sum())

    @property
    def stops(self) -> int:
        """The number of stops of all tokens."""
        return int(self.first_choices.sum())

    @property
    def requested_capacity(self) -> float:
        """Mean per token; nan without tokens."""
        return self.stops / self.tokens if self.tokens else float("nan")

    def load(self) -> ndarray:
        """``(E,)``: first choices of each expert in all strata, relative to their mean."""
        per_expert = self.first_choices.sum(axis=0)
        return per_expert / max(per_expert.mean(), 1e-12)

    def flow(self) -> ndarray:
        """``(L, L)``: tokens whose gate in stratum i chose an expert of stratum j.

        They skip the gates of strata i + 1 to j and continue at stratum j + 1, or leave the block if j is
        the last one. At a fixed depth all tokens continue at the next stratum.
        """
        strata = self.block.strata
        if strata.fixed_depth:
            return np.diag(self.first_choices.sum(axis=1))
        flow = np.zeros((len(strata), len(strata)), dtype=np.int64)
        for expert, stratum in enumerate(strata.stratum_of_expert):
            flow[:, stratum] += self.first_choices[:, expert]
        return flow


# Each token's choices, counted while a model runs.
#
# Shapes: B sentences, S positions, T tokens, N of them in a stratum, V token types, L strata, E
# experts.


class BlockFollower:
    """Follows the tokens of a batch through one block."""

    def __init__(self, block: StratifiedMoE, dictionary: Dictionary):
        self.block = block
        self.padding = dictionary.pad()

    def begin(self, tokens_BS: Tensor) -> None:
        """Start a batch: all tokens except padding are in stratum 0."""
        self.type_T = tokens_BS.reshape(-1)
        padding_T, depth = self.type_T == self.padding, len(self.block.strata)
        self.position_T = torch.zeros_like(self.type_T).masked_fill(padding_T, depth)

    def record(self, stratum: int, _gate, arguments: tuple, routing: Routing) -> None:
        """A gate's forward hook. Rows are the tokens in its stratum or, with a mask, all tokens."""
        strata = self.block.strata
        index_N = (self.position_T == stratum).nonzero().squeeze(1)
        active_T = arguments[1] if len(arguments) > 1 else None
        row_N = torch.arange(len(index_N), device=index_N.device) if active_T is None else index_N
        expert_N = routing.first_choice_T[row_N] + strata.first_experts[stratum]
        self.note(stratum, index_N, expert_N, routing, row_N)
        if strata.fixed_depth:
            self.position_T[index_N] = stratum + 1
        else:
            self.position_T[index_N] = self.block.stratum_of_expert[expert_N] + 1

    def note(
        self, stratum: int, index_N: Tensor, expert_N: Tensor, routing: Routing, row_N: Tensor
    ) -> None:
        """Record N tokens: their indices in the batch, first choices and rows of the routing."""


class BlockRecorder(BlockFollower):
    """Counts the first choices of a block's gates by token type, for those that occur."""

    def __init__(self, block: StratifiedMoE, dictionary: Dictionary):
        super().__init__(block, dictionary)
        self.choices: Counter[int] = Counter()  # by ``(type L + stratum) E + expert``

    def note(
        self, stratum: int, index_N: Tensor, expert_N: Tensor, routing: Routing, row_N: Tensor
    ) -> None:
        strata = self.block.strata
        first_N = self.type_T[index_N] * len(strata) + stratum
        choices, numbers = (first_N * strata.num_experts + expert_N).unique(return_counts=True)
        self.choices.update(dict(zip(choices.tolist(), numbers.tolist(), strict=True)))

    def counts(self) -> tuple[ndarray, ndarray]:
        """The token types that occurred, ``(N,)``, and their first choices, ``(N, L, E)``."""
        strata = self.block.strata
        choices_C = np.array(list(self.choices), dtype=np.int64)
        size = len(strata) * strata.num_experts
        types_N, row_C = np.unique(choices_C // size, return_inverse=True)
        counts = np.zeros((len(types_N), size), dtype=np.int64)
        counts[row_C, choices_C % size] = list(self.choices.values())
        return types_N, counts.reshape(-1, len(strata), strata.num_experts)


@torch.no_grad()
def follow(model: nn.Module, task, net_inputs: Iterable[dict], kind: type[BlockFollower]) -> dict:
    """A follower of a ``kind`` for each MoE layer, by its name, that has seen a pass over each input.

    References are the decoder's input, of which a position counts for its own token, not the predicted one.

    Args:
        model: one of ours, in evaluation mode.
    """
    followers = {
        name: kind(block, inputs.dictionary_of(task, name.split(".")[0]))
        for name, block in moe_blocks(model).items()
    }
    handles = [
        gate.register_forward_hook(functools.partial(follower.record, stratum))
        for follower in followers.values()
        for stratum, gate in enumerate(follower.block.gates)
    ]
    try:
        for net_input in net_inputs:
            for name, follower in followers.items():
                follower.begin(input_tokens(net_input, name.split(".")[0]))
            model(**net_input)
    finally:
        for handle in handles:
            handle.remove()
    return followers


def input_tokens(net_input: dict, side: str) -> Tensor:
    """``(B, S)``: the input of a side."""
    if side == "decoder" and "prev_output_tokens" in net_input:
        return net_input["prev_output_tokens"]
    return net_input["src_tokens"]


# Teacher-forced collection: first choices by direction, block and token type.


@dataclass(frozen=True)
class TypeCounts:
    """Counters of one direction and block, for the token types that occurred."""

    block: Block
    types: ndarray  # ``(N,)``, ids in the dictionary of the block's side
    special: ndarray  # ``(N,)``, see `inputs.special`
    first_choices: ndarray  # ``(N, L, E)``

    @property
    def occurrences(self) -> ndarray:
        return self.first_choices[:, 0].sum(axis=1)

    @property
    def stops(self) -> ndarray:
        """``(N,)``: the number of stops of all occurrences."""
        return self.first_choices.sum(axis=(1, 2))

    def total(self, special: bool) -> Counts:
        """The sum over special tokens, or over all others."""
        return Counts(self.block, self.first_choices[self.special == special].sum(axis=0))


def collect(samples: inputs.Samples) -> list[TypeCounts]:
    """Runs a model over samples, with the references as decoder input.

    The numbers do not depend on the size of the batches. Blocks are in the order of the forward pass.
    """
    task, blocks = samples.task, []
    net_inputs = (sample["net_input"] for sample in samples)
    for name, recorder in follow(samples.model, task, net_inputs, BlockRecorder).items():
        block = Block(name, recorder.block.strata)
        types, counts = recorder.counts()
        special = inputs.special(inputs.dictionary_of(task, block.side), task)[types]
        blocks.append(TypeCounts(block, types, special, counts))
    return blocks


def requested_capacity(model: nn.Module, task, subset: str = "valid") -> dict[str, float]:
    """Mean requested capacity of all tokens of a subset, by MoE layer (see `moe_blocks`).

    References are the decoder's input; special tokens are included. Empty for a dense model.
    """
    if not moe_blocks(model):
        return {}
    stops, tokens = Counter(), Counter()
    for direction in inputs.directions(task):
        for counts in collect(inputs.Samples(model, task, direction, inputs.Subset(subset))):
            stops[counts.block.name] += int(counts.stops.sum())
            tokens[counts.block.name] += int(counts.occurrences.sum())
    return {name: stops[name] / tokens[name] for name in stops}
