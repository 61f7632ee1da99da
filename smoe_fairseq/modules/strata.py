"""The strata of a block ("4-12": 4 experts in the first stratum, 12 in the second), and its error class."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

MAX_STRATA, MAX_EXPERTS = 1_000, 9_999_999  # of one block


@dataclass(frozen=True)
class Strata:
    """Sizes of the strata of one block, first stratum first (paper, section 3).

    Experts are numbered from the first stratum on. The gate of stratum ``i`` sees the experts of
    stratum ``i`` and of all later strata; with naive stacking (``stacked``) only those of stratum ``i``.
    The gate of a stratum of size 0 sees only later experts.

    In a ``chain`` (Wang et al. 2025) every token makes this number of passes over the experts of one
    stratum. Each pass has its own gate, and counts as one stratum.
    """

    sizes: tuple[int, ...]
    stacked: bool = False
    chain: int = 1

    @classmethod
    def parse(cls, text: str, stacked: bool = False, chain: int = 1) -> "Strata":
        """Read the paper's notation.

        Raises:
            OptionError: a stratum is not a whole number; the last or a stacked stratum has no experts; a
                chain has several strata or is stacked.
        """
        sizes = str(text).split("-")
        if not all(size.isascii() and size.isdigit() for size in sizes) or int(sizes[-1]) == 0:
            raise OptionError(
                "{strata} {value}: expected positive numbers of experts joined by '-', such as 16, 4-12 "
                "or 2-2-2-2, or 0 for any but the last",
                value=repr(text),
            )
        if len(sizes) > MAX_STRATA or max(map(len, sizes)) > len(str(MAX_EXPERTS)):
            raise OptionError(
                f"{{strata}} '{text:.20}...': expected at most {MAX_STRATA:,} strata of "
                f"{MAX_EXPERTS:,} experts in all"
            )
        sizes = tuple(map(int, sizes))
        if stacked and 0 in sizes:
            raise OptionError(
                f"{{strata}} {text} with {{stacked}}: a gate has no experts to choose from; expected "
                "positive numbers"
            )
        if not 1 <= chain <= MAX_STRATA:
            raise OptionError(f"{{chain}} {chain}: expected 1 to {MAX_STRATA:,}")
        if chain > 1 and stacked:
            raise OptionError(f"{{chain}} {chain} with {{stacked}}: expected one of the two")
        if chain > 1 and len(sizes) > 1:
            one = f"expected one stratum, such as {{strata}} {sum(sizes)}, not {text}"
            raise OptionError(f"{{chain}} {chain}: {one}")
        return cls(sizes, stacked, chain)

    def __str__(self) -> str:
        return "-".join(map(str, self.sizes))

    def __len__(self) -> int:
        return self.chain if self.chain > 1 else len(self.sizes)

    @property
    def fixed_depth(self) -> bool:
        """Whether all tokens pass all gates."""
        return self.stacked or self.chain > 1

    @property
    def num_experts(self) -> int:
        return sum(self.sizes)

    @property
    def first_experts(self) -> list[int]:
        """Number of the first expert of each stratum."""
        if self.chain > 1:
            return [0] * self.chain
        return [0, *accumulate(self.sizes)][:-1]

    @property
    def visible(self) -> list[int]:
        """``E_i``: the number of experts that the gate of each stratum sees."""
        if self.stacked:
            return list(self.sizes)
        return [self.num_experts - first for first in self.first_experts]

    @property
    def own(self) -> list[int]:
        """The number of experts that each gate sees in its own stratum."""
        return self.visible if self.chain > 1 else list(self.sizes)

    @property
    def experts_of_gate(self) -> list[range]:
        """The experts that each gate sees and no later gate does; they come first among its experts."""
        if self.chain > 1:
            return [range(0)] * (self.chain - 1) + [range(self.num_experts)]
        return [
            range(first, first + size)
            for first, size in zip(self.first_experts, self.sizes, strict=True)
        ]

    @property
    def stratum_of_expert(self) -> list[int]:
        return [i for i, size in enumerate(self.sizes) for _ in range(size)]

    def expected_visits(self) -> list[float]:
        """The share of tokens that visit each stratum, if every gate chooses uniformly.

        The sum is ``N_1`` of the recursion ``N_L = 1``, ``N_i = 1 + sum_{j=i..L-1} size_j / E_i * N_{j+1}``.
        """
        if self.fixed_depth:
            return [1.0] * len(self)
        visits = [1.0] + [0.0] * len(self)
        for i in range(len(self)):
            for j in range(i, len(self)):
                visits[j + 1] += visits[i] * self.sizes[j] / self.visible[i]
        return visits[:-1]

    def expected_requested_capacity(self) -> float:
        """The mean requested capacity, if every gate chooses uniformly."""
        return sum(self.expected_visits())


class OptionError(ValueError):
    """An invalid option of the block; one sentence names the parameter and the values that are expected.

    Args:
        sentence: the message, with parameter names in braces, ``{top_k}``.
        values: values of other names in braces.
    """

    def __init__(self, sentence: str, **values):
        self.sentence = sentence
        self.values = values
        super().__init__(self.named({}))

    def named(self, names: Mapping[str, str]) -> str:
        """The sentence with other names for the parameters, such as the flags that set them."""
        found = {**names, **self.values}  # other braces are the user's
        return re.sub(r"{(\w+)}", lambda match: found.get(match[1], match[1]), self.sentence)
