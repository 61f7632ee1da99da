"""Systems compared within seeds: a seed gives all of them the same batches in the same order.

So a score is taken to be what its system does, what its seed does, and chance, which is as wide for all (a
randomized block design). How wide, is told from the seeds of all systems together: those of two alone say
little about it.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from smoe_fairseq.recipes.tables.student import Difference, quantile

BySeed = Mapping[int | None, float]


@dataclass(frozen=True)
class Chance:
    """Its standard deviation in one run, and the degrees of freedom that this is known from.

    ``shares``: by system, of the squares that it is made of; where one has most, it is not as wide for all.
    """

    deviation: float
    freedom: int
    shares: Mapping[str, float] = field(default_factory=dict)

    def between(self, first: BySeed, second: BySeed) -> Difference | None:
        """``second`` less ``first`` over the seeds of both; None where these are none."""
        apart = [second[seed] - first[seed] for seed in first if seed in second]
        return self.around(apart) if apart else None

    def around(self, apart: Sequence[float]) -> Difference:
        """The mean of what lies between two systems in some seeds, with its 95 percent interval.

        Where there are no other systems, it is that of the paired t-test.
        """
        mean, count = statistics.fmean(apart), len(apart)
        if not self.freedom:
            return Difference(mean, None, None, count)
        width = quantile(0.975, self.freedom) * self.deviation * math.sqrt(2 / count)
        return Difference(mean, mean - width, mean + width, count)


def chance(points: Mapping[str, BySeed]) -> Chance:
    """Of ``points`` by system and seed: what is left by least squares of a sum of both.

    Those that are no number, of a run that diverged, say nothing of it.
    """
    cells = [(s, seed) for s in points for seed, x in points[s].items() if math.isfinite(x)]
    if not cells:
        return Chance(0.0, 0)
    values = np.array([points[system][seed] for system, seed in cells])
    systems, seeds = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
    sums = np.zeros((len(cells), len(systems) + len(seeds)))
    for row, (system, seed) in enumerate(cells):
        sums[row, systems.index(system)] = sums[row, len(systems) + seeds.index(seed)] = 1
    found, _, rank, _ = np.linalg.lstsq(sums, values, rcond=None)
    freedom = len(cells) - int(rank)
    squares: dict[str, float] = {}
    for (system, _), left in zip(cells, values - sums @ found, strict=True):
        squares[system] = squares.get(system, 0.0) + float(left) ** 2
    total = math.fsum(squares.values())
    if not freedom or not total:
        return Chance(0.0, freedom)
    shares = {system: each / total for system, each in squares.items()}
    return Chance(math.sqrt(total / freedom), freedom, shares)
