"""First choices of the gates of one block, and all that follows from them.

Shapes: L strata, E experts.
"""

from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from smoe_fairseq.modules.strata import Strata


@dataclass(frozen=True)
class Block:
    """One MoE layer: its name (``encoder.layer.1``) and how its experts are arranged."""

    name: str
    strata: Strata

    @property
    def side(self) -> str:
        """ "encoder" or "decoder"."""
        return self.name.split(".")[0]

    @property
    def title(self) -> str:
        """The same in words: ``encoder layer 1``."""
        return self.name.replace(".", " ")


@dataclass(frozen=True)
class Counts:
    """Counters of one block over some tokens.

    Every token stops at stratum 0 and, wherever it stops, has one first choice. So the first choices
    say how many tokens there are, what capacity they requested and where they went.

    Args:
        block: the block.
        first_choices: ``(L, E)``, tokens in stratum i whose first choice is expert e.
    """

    block: Block
    first_choices: ndarray

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(self.block, self.first_choices + other.first_choices)

    @property
    def tokens(self) -> int:
        return int(self.first_choices[0].sum())

    @property
    def stops(self) -> int:
        """Strata that the tokens stopped at, summed over the tokens."""
        return int(self.first_choices.sum())

    @property
    def requested_capacity(self) -> float:
        """Mean per token; nan without tokens."""
        return self.stops / self.tokens if self.tokens else float("nan")

    def load(self) -> ndarray:
        """``(E,)``: first choices of each expert, all strata taken together, over their mean.

        1 everywhere when the experts are evenly loaded.
        """
        per_expert = self.first_choices.sum(axis=0)
        return per_expert / max(per_expert.mean(), 1e-12)

    def flow(self) -> ndarray:
        """``(L, L)``: tokens whose gate in stratum i chose an expert of stratum j.

        They go on to stratum j + 1, past strata i to j - 1, or leave the block where j is the last one. At a
        fixed depth all go from each stratum to the next.
        """
        strata = self.block.strata
        if strata.fixed_depth:
            return np.diag(self.first_choices.sum(axis=1))
        flow = np.zeros((len(strata), len(strata)), dtype=np.int64)
        for expert, stratum in enumerate(strata.stratum_of_expert):
            flow[:, stratum] += self.first_choices[:, expert]
        return flow

    def visible(self) -> list[tuple[int, int]]:
        """(stratum, expert) of every choice that a gate has."""
        strata = self.block.strata
        pairs = zip(strata.first_experts, strata.visible, strict=True)
        return [(i, first + e) for i, (first, size) in enumerate(pairs) for e in range(size)]
