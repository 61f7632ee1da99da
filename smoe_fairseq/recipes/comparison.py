"""``--compare A B``: is one system better than another, by the test set's sentences and by seeds?"""

import itertools
import statistics
from collections.abc import Collection, Sequence
from pathlib import Path

from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes import scores
from smoe_fairseq.recipes.config import Dataset
from smoe_fairseq.recipes.folders import Folders, method_of, order, seed_in
from smoe_fairseq.recipes.grid import Grid, number
from smoe_fairseq.recipes.statistics import SAMPLES, SentenceCounter, p_value, paired


def comparison(dataset: Dataset, first: str, second: str, metric: str = scores.BLEU) -> Grid:
    """By direction the means over seeds, their difference and p-values.

    ``first`` and ``second`` are methods, with all seeds that are scored, or runs (``moe.seed-2``).
    "p (sentences)" is that of sacreBLEU's paired bootstrap, in which a sentence is drawn with the
    translations of all seeds. "p (seeds)" is that of an exact permutation test over the runs.

    Raises:
        UsageError: one is not scored, they have no direction in common, or their signatures differ.
    """
    if first == second:
        raise UsageError(f"--compare {first} {second}: expected two different methods")
    if metric == scores.COMET:
        raise UsageError("--metric comet: --compare takes bleu, chrf++ or spbleu only")
    systems = {name: _System(dataset, name, metric) for name in (first, second)}
    one, other = systems.values()
    if shared := sorted({*one.runs} & {*other.runs}):
        raise UsageError(
            f"--compare {first} {second}: {', '.join(shared)} is of both; expected two that share no run"
        )
    common = [d for d in dataset.directions if one.has(d) and other.has(d)]
    if not common:
        runs = ", ".join([*one.runs, *other.runs])
        raise UsageError(
            f"no direction is scored in all of {runs}: run scripts/evaluate.sh {dataset.name} for each "
            "of them"
        )
    several = len(one.runs) + len(other.runs) > 2
    rows, signatures = [], set()
    for direction in dataset.directions:
        if direction not in common:
            rows.append([direction, *(number(None) for _ in range(4 + several))])
            continue
        kinds = one.signatures(direction) | other.signatures(direction)
        if len(kinds) > 1:
            raise UsageError(
                f"{first} and {second} were scored differently on {direction} "
                f"({' and '.join(sorted(kinds))}): evaluate both again with the same settings"
            )
        signatures |= kinds
        points = [system.points([direction]) for system in systems.values()]
        rows.append([direction, *_row(points, _bootstrap(dataset, direction, one, other, metric))])
        if several:
            rows[-1].append(number(by_seeds(*points), digits=4))
    names = [f"{name}, mean of {len(s.runs)}" if several else name for name, s in systems.items()]
    header = ["direction", *names, "difference", "p (sentences)" if several else "p"]
    notes = [f"paired bootstrap, {SAMPLES} samples: the difference is significant where p < 0.05"]
    if several:
        header.append("p (seeds)")
        points = [system.points(common) for system in systems.values()]
        rows.append(["average", *_row(points, None), number(by_seeds(*points), digits=4)])
        notes += [f"{name}: {', '.join(system.runs)}" for name, system in systems.items()]
        notes.append(_smallest(*points))
        notes += _within_seeds(systems.values(), points)
    said = "sacreBLEU" if metric == scores.BLEU else f"sacreBLEU's {metric}"
    notes += [f"{said} {signature}" for signature in sorted(signatures)]
    return Grid(header, rows, notes)


class _System:
    """The scored runs of a method, or one run."""

    def __init__(self, dataset: Dataset, name: str, metric: str):
        self.metric, self.folder = metric, Folders(dataset.name).runs
        found = sorted((p.name for p in self.folder.glob("*") if p.is_dir()), key=order)
        runs = [run for run in found if name in (run, method_of(run))]
        self.runs = {run: scores.read(self.folder / run) for run in runs}
        self.runs = {run: result for run, result in self.runs.items() if result}
        if not self.runs:
            raise UsageError(
                f"{self.folder / name / scores.FILE} is missing: run scripts/evaluate.sh "
                f"{dataset.name} {name} first"
            )

    def has(self, direction: str) -> bool:
        return all(
            direction in result and result[direction].of(self.metric)
            for result in self.runs.values()
        )

    def signatures(self, direction: str) -> set[str]:
        return {result[direction].of(self.metric)[1] for result in self.runs.values()}

    def points(self, directions: Sequence[str]) -> list[float]:
        """The mean of each run."""
        return [
            statistics.fmean(result[d].of(self.metric)[0] for d in directions)
            for result in self.runs.values()
        ]

    def translations(self, direction: str) -> list[Path]:
        return [self.folder / run / "test" / f"{direction}.txt" for run in self.runs]


def by_seeds(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The two-sided p-value of the permutation test; None unless both have two runs."""
    if min(len(first), len(second)) < 2:
        return None
    everything = [*first, *second]
    total, far = sum(everything), abs(statistics.fmean(first) - statistics.fmean(second))

    def distance(chosen: tuple[float, ...]) -> float:
        rest = (total - sum(chosen)) / len(second)
        return abs(sum(chosen) / len(first) - rest)

    distances = [distance(c) for c in itertools.combinations(everything, len(first))]
    return sum(d >= far - 1e-9 for d in distances) / len(distances)


def _smallest(first: Sequence[float], second: Sequence[float]) -> str:
    """A note on the smallest p-value that is possible with so many runs."""
    if by_seeds(first, second) is None:
        return "p (seeds) takes two runs of each"
    apart = by_seeds(range(len(first)), range(100, 100 + len(second)))
    return f"p (seeds): permutation test over the runs; with so many it is at least {apart:.4f}"


def _within_seeds(systems: Collection["_System"], points: Sequence[Sequence[float]]) -> list[str]:
    by_seed = [
        dict(zip(map(seed_in, system.runs), of_runs, strict=True))
        for system, of_runs in zip(systems, points, strict=True)
    ]
    apart = paired(*by_seed)
    if apart is None or apart.low is None:
        return []
    return [f"within the {apart.count} seeds of both: {apart}, 95 percent interval (paired t)"]


def _row(points: Sequence[Sequence[float]], p: float | None) -> list[str]:
    means = [statistics.fmean(values) for values in points]
    difference = number(means[1] - means[0], sign=True)
    return [*(number(mean) for mean in means), difference, number(p, digits=4)]


def _bootstrap(
    dataset: Dataset, direction: str, first: _System, second: _System, metric: str
) -> float:
    counter = SentenceCounter(dataset, direction, metric)
    counts = (sum(map(counter.count, system.translations(direction))) for system in (first, second))
    return p_value(counter.metric, *counts)
