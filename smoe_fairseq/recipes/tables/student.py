"""Student's t: how far the mean of a few runs, or of what lies between two systems, may be chance."""

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Difference:
    """``mean`` of ``count`` and the ends of its 95 percent interval; both None where it is a single one's."""

    mean: float
    low: float | None
    high: float | None
    count: int

    def map(self, function: Callable[[float], float]) -> "Difference":
        """The same in other units, by a function that rises."""
        ends = (None if end is None else function(end) for end in (self.low, self.high))
        return Difference(function(self.mean), *ends, self.count)

    def __format__(self, spec: str) -> str:
        """``spec`` is that of each number."""
        mean, low, high = (
            None if number is None else format(number, spec or "+.2f")
            for number in (self.mean, self.low, self.high)
        )
        return mean if low is None else f"{mean} [{low}, {high}]"

    def interval(self, spec: str) -> str:
        """Only the interval; nothing where there is none."""
        return format(self, spec).partition(" ")[2]


def interval(values: Sequence[float]) -> Difference:
    """Of the mean of a few values, against zero."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Difference(mean, None, None, 1)
    width = (
        quantile(0.975, len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    )
    return Difference(mean, mean - width, mean + width, len(values))


def paired(first: Mapping, second: Mapping) -> Difference | None:
    """``second`` less ``first``, each a value by seed, over the seeds of both; None where these are none.

    A seed gives all systems the same batches in the same order, so part of what it does is the same to both.
    """
    common = [seed for seed in first if seed in second]
    return interval([second[seed] - first[seed] for seed in common]) if common else None


@functools.cache
def quantile(probability: float, freedom: float) -> float:
    """Of Student's distribution, for probabilities above one half, by bisection."""
    low, high = 0.0, 1.0
    while _probability(high, freedom) < probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _probability(middle, freedom) > probability else (middle, high)
    return (low + high) / 2


def _probability(t: float, freedom: float) -> float:
    """Below ``t``: Simpson's rule over the angle whose tangent is ``t`` over the root of ``freedom``.

    There the density is a power of the cosine, which is smooth to the end whatever ``freedom`` is.
    """
    steps = 2000  # an even number
    angle = math.atan2(t, math.sqrt(freedom))
    half = freedom / 2
    constant = math.exp(math.lgamma(half + 0.5) - math.lgamma(half)) / math.sqrt(math.pi)
    density = np.cos(np.linspace(0, angle, steps + 1)) ** (freedom - 1)
    total = density[0] + 4 * density[1::2].sum() + 2 * density[2:-1:2].sum() + density[-1]
    return 0.5 + constant * angle / steps / 3 * float(total)
