"""Statements of a study: two systems, measures with margins, and verdicts.

Differences are paired by seed, which determines the order of batches. Two one-sided t-tests decide whether
two systems are equal within a margin, a two-sided t-test whether one is ahead. Both are corrected over the
statements of a study by Holm's method.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from matplotlib.figure import Figure

from smoe_fairseq.analysis.figures import DARK, LIGHT, MIDDLE, new, styled
from smoe_fairseq.recipes.compare.grid import MISSING, Grid
from smoe_fairseq.recipes.compare.statistics import LEVEL, Difference, in_words, interval, verdicts
from smoe_fairseq.recipes.datasets import Dataset
from smoe_fairseq.recipes.evaluation import scores
from smoe_fairseq.recipes.program_flags import value_of
from smoe_fairseq.recipes.study.results import Result, Systems


@dataclass(frozen=True)
class Measure:
    """A number of a run. A difference below ``margin`` does not matter."""

    of: Callable[[Result], float]
    margin: float
    sign: int  # 1 if higher is better, else -1
    digits: int
    unit: str


KEPT = "kept loss"
# The first one decides.
MEASURES = {
    "loss": Measure(lambda r: r.validation, 0.02, -1, 3, "bits per token"),
    "chrF++": Measure(lambda r: scores.mean_points(r.scores, scores.CHRF), 0.5, 1, 2, "points"),
    "BLEU": Measure(lambda r: scores.mean_points(r.scores), 0.3, 1, 2, "points"),
    KEPT: Measure(lambda r: r.about.get("kept_loss") or math.nan, 0.02, -1, 3, "bits per token"),
}


@dataclass(frozen=True)
class Statement:
    """``first`` is compared with ``second``."""

    name: str
    first: str
    second: str


def statements_of(dataset: Dataset, systems: Systems) -> list[Statement]:
    """The data set's; without any, each system is compared with `moe`, or with the first one."""
    if dataset.statements:
        return [Statement(name, *pair) for name, pair in dataset.statements.items()]
    reference = "moe" if "moe" in systems else next(iter(systems))
    return [Statement("", method, reference) for method in systems if method != reference]


def measures_of(dataset: Dataset) -> dict[str, Measure]:
    """`MEASURES` with the data set's margins; that of kept pairs only if it has some."""
    return {
        name: replace(measure, margin=value_of(dataset.margins, name, measure.margin))
        for name, measure in MEASURES.items()
        if dataset.keep or name != KEPT
    }


def pairs(systems: Systems, statement: Statement) -> dict[int | None, tuple[Result, Result]]:
    """The runs of both systems, by common seed."""
    both = (systems.get(method, ()) for method in (statement.first, statement.second))
    first, second = ({result.seed: result for result in results} for results in both)
    return {seed: (run, second[seed]) for seed, run in first.items() if seed in second}


def difference(parts: Sequence[Systems], statement: Statement, measure: Measure) -> Difference:
    """The mean over parts, of seeds with finite losses whose runs are paired in each part."""
    values: dict[int | None, list[float]] = {}
    for systems in parts:
        for seed, (one, other) in pairs(systems, statement).items():
            if one.is_paired(other) and not (one.diverged or other.diverged):
                values.setdefault(seed, []).append(measure.of(one) - measure.of(other))
    means = {seed: fmean(each) for seed, each in values.items() if len(each) == len(parts)}
    return Difference({s: mean for s, mean in means.items() if math.isfinite(mean)}, measure.margin)


Verdicts = Mapping[str, Sequence[tuple[Difference, str]]]


def judge(
    statements: Sequence[Statement], parts: Sequence[Systems], measures: Mapping[str, Measure]
) -> Verdicts:
    """The difference and the verdict of each statement, by measure."""
    judged = {}
    for name, measure in measures.items():
        differences = [difference(parts, s, measure) for s in statements]
        judged[name] = list(zip(differences, verdicts(differences, measure.sign), strict=True))
    return judged


def statements_table(
    statements: Sequence[Statement],
    judged: Verdicts,
    measures: Mapping[str, Measure],
    parts: Sequence[Systems],
    flops: Mapping[str, float],
) -> Grid:
    """A row for each statement; ``judged`` is from `judge`, ``flops`` are per token, by method."""
    rows = []
    for i, s in enumerate(statements):
        both = s.first in flops and s.second in flops
        cost = f"{flops[s.first] / flops[s.second] - 1:+.0%}" if both else MISSING
        row = [s.name, f"{s.first} and {s.second}", str(len(judged["loss"][i][0].by_seed)), cost]
        for name, measure in measures.items():
            diff, verdict = judged[name][i]
            cell = in_words(diff.values, measure.digits) if diff.by_seed else MISSING
            row += [cell, verdict]
        rows.append(row)
    header = ["statement", "systems", "seeds", "FLOPs"]
    for name in measures:
        header += [name, "verdict"]
    shown = ", ".join(f"{m.margin:g} {m.unit} ({name})" for name, m in measures.items())
    notes = [
        "- **Differences** are the first system less the second, the mean over the seeds in which one "
        "machine trained both, with the 95 percent t interval, which is not corrected for the number of "
        "statements. A lower loss is better. FLOPs: how much more a token costs with the first.",
        f"- **Verdicts**: *equal within the margin* if two one-sided t-tests show it (margins: {shown}), "
        "otherwise *ahead* or *behind* if a two-sided t-test shows that the difference is not zero, "
        "otherwise *open*. Both tests are corrected over the statements by Holm's method, at a level of "
        f"{LEVEL:.0%}. The verdict of the loss decides.",
        *_left_out(statements, parts),
    ]
    return Grid(header, rows, notes, texts=2)


def _left_out(statements: Sequence[Statement], parts: Sequence[Systems]) -> list[str]:
    """Notes on seeds that were not trained alike, runs that diverged, and runs of different lengths."""
    pairs_left_out, lengths = [], []
    for systems, s in itertools.product(parts, statements):
        both = pairs(systems, s).items()
        seeds = [seed for seed, (a, b) in both if not a.is_paired(b)]
        names = ", ".join("the first" if seed is None else str(seed) for seed in seeds)
        pairs_left_out += [f"{s.first} and {s.second} ({names})"] if seeds else []
        updates = [(a.about.get("updates"), b.about.get("updates")) for _, (a, b) in both]
        if different := next((pair for pair in updates if pair[0] != pair[1]), None):
            lengths.append(f"{s.first} {different[0]:,} and {s.second} {different[1]:,}")
    notes = []
    if pairs_left_out:
        differ = "since machine, torch or pretrained model of the two systems differ"
        notes.append(f"- **Seeds left out**, {differ}: {'; '.join(pairs_left_out)}.")
    everything = [r for systems in parts for results in systems.values() for r in results]
    if diverged := [result.name for result in everything if result.diverged]:
        start = "- **Runs left out**, since their last loss is not finite"
        notes.append(f"{start}: {', '.join(diverged)}.")
    if lengths:
        notes.append(f"- **Different numbers of updates**: {'; '.join(dict.fromkeys(lengths))}.")
    return notes


@styled
def draw_statements(
    statements: Sequence[Statement], judged: Verdicts, measures: Mapping[str, Measure]
) -> Figure:
    """A panel for each measure: differences with 95 percent intervals, seeds as dots, margins shaded."""
    height = 1.2 + 0.5 * len(statements)
    figure, axes = new(1, len(measures), width=11.0, height=height, sharey=True)
    for ax, (name, measure) in zip(axes[0], measures.items(), strict=True):
        ax.axvspan(-measure.margin, measure.margin, color=LIGHT, alpha=0.35, lw=0)
        ax.axvline(0, color=MIDDLE, lw=0.8)
        for y, (diff, _) in enumerate(judged[name]):
            if not diff.by_seed:
                continue
            ax.plot(diff.values, [y] * len(diff.values), "o", ms=3, color=MIDDLE, alpha=0.7)
            mean, *ends = interval(diff.values)
            ax.plot(ends, [y, y], "-", lw=2, color=DARK)
            ax.plot([mean], [y], "D", ms=5, color=DARK)
        better = "left" if measure.sign < 0 else "right"
        ax.set_title(f"{name}: the first is better on the {better}", fontsize=9)
        ax.set_xlabel(measure.unit)
    labels = [f"{s.first} − {s.second}" for s in statements]
    axes[0][0].set_yticks(range(len(statements)), labels, fontsize=9)
    axes[0][0].set_ylim(len(statements) - 0.4, -0.6)
    return figure
