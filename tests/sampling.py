"""Which of many combinations `make test` runs; `make soak` runs the others."""

import itertools

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
