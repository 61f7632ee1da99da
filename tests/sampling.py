"""Which of many combinations `make test` runs; `make soak` runs the others."""

import itertools
from collections.abc import Sequence

import pytest


def soak(*values):
    """A case that is left to ``make soak``."""
    return pytest.param(*values, marks=pytest.mark.soak)


def some(values, *chosen) -> list:
    """All values, of which those that are not chosen are left to ``make soak``."""
    return [value if value in chosen else soak(value) for value in values]


def sample(chosen: list[tuple], *values) -> list:
    """All combinations, of which those that are not chosen are left to ``make soak``."""
    return [case if case in chosen else soak(*case) for case in itertools.product(*values)]


def pairwise(cases: Sequence[dict]) -> list[int]:
    """A few of the cases, by position, in which any two values occur together that do so in one of all.

    Greedy: always the case with most pairs that have not been seen yet.

    Args:
        cases: {parameter: value} each.
    """
    left = [set(itertools.combinations(sorted(case.items()), 2)) for case in cases]
    chosen = []
    while any(left):
        best = max(range(len(left)), key=lambda i: len(left[i]))
        chosen.append(best)
        seen = set(left[best])
        for pairs in left:
            pairs -= seen
    return sorted(chosen)
