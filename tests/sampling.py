"""Which of many combinations `make test` runs, and which `make soak`; ``--full-grid`` adds the rest."""

import itertools
from collections.abc import Sequence

import pytest


def soak(*values):
    """A case that is left to ``make soak``."""
    return pytest.param(*values, marks=pytest.mark.soak)


def rest(*values):
    """A case that is run by ``make soak`` with ``--full-grid`` alone."""
    return pytest.param(*values, marks=(pytest.mark.soak, pytest.mark.rest))


def some(values, *chosen, first: int = 0) -> list:
    """All values, of which those that are not chosen are left to ``make soak``: every second one.

    first: 0 or 1, the first of these. Tests of one property each begin differently, so that any value is in
    about half of them.
    """
    others = [value for value in values if value not in chosen]
    halves = {value: soak if i % 2 == first else rest for i, value in enumerate(others)}
    return [value if value in chosen else halves[value](value) for value in values]


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
