"""Pictures of a study: what training costs and brings, and scores by direction."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from smoe_fairseq.analysis.figures.style import new, styled
from smoe_fairseq.recipes.study.groups import Systems
from smoe_fairseq.recipes.study.kept import Result

COLOURS = (
    *("black", "#3f6ea8", "#9dbcdc", "#777777", "#a2641b", "#d9a066"),
    *("#bbbbbb", "#8a8a5c", "#b0413e", "#e08a87", "#5b8c5a", "#a9cba4"),
)


@styled
def draw_costs(groups: Sequence[Systems], flops: Mapping[str, float]) -> Figure:
    """Validation loss over FLOPs of training (``flops``: forward, per target token) and over hours.

    Of the second half of each run's updates, where systems can be told apart. A row for each group of
    systems; seeds are thin lines, and their mean a thick one. Hours are those of one machine, on which most
    of a row's systems were trained, and of the seeds that it trained all of these with, where there are
    such; there are none where it trained a single one.
    """
    rows, colours = len(groups), _colours(groups)
    figure, axes = new(rows, 2, width=9.0, height=3.6 * rows + 0.4, sharey="row")
    for (by_flops, by_hours), systems in zip(axes, groups, strict=True):
        machine = _machine(systems)
        timed = _timed(systems, machine)
        for method, results in systems.items():
            curves = {result.name: _second_half(result) for result in results if result.logged}
            for curve in curves.values():
                curve["tflop"] = 3e-12 * flops.get(method, math.nan) * curve["words"]
            _draw_curves(by_flops, colours[method], list(curves.values()), "tflop", method)
            there = [curves[r.name] for r in timed.get(method, ())] if len(timed) > 1 else []
            _draw_curves(by_hours, colours[method], there, "hours")
        of_row = by_flops.get_legend_handles_labels()
        by_hours.legend(*of_row, loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
        by_flops.set_xlabel("training, TFLOP")
        by_hours.set_xlabel(f"hours of training, {machine}")
        if len(timed) < 2:  # which is beside nothing
            by_hours.set_axis_off()
    title = "Validation loss (bits per token), second half of training"
    if any(len(results) > 1 for systems in groups for results in systems.values()):
        title += " (thin: seeds, thick: their mean)"
    figure.suptitle(title, fontsize=11)
    return figure


def _machine(systems: Systems) -> str:
    """That of most of them, and of two with as many that of more runs."""
    runs = [(r.machine, method) for method, results in systems.items() for r in results if r.time]
    count = Counter(machine for machine, _ in runs)
    of_systems = Counter(machine for machine, _ in set(runs))
    return max(count, key=lambda machine: (of_systems[machine], count[machine]), default="")


def _timed(systems: Systems, machine: str) -> dict[str, list[Result]]:
    """Runs whose time is that of the machine, of the seeds that all such systems have, if there are any."""
    there = {m: [r for r in rs if r.time and r.machine == machine] for m, rs in systems.items()}
    there = {method: results for method, results in there.items() if results}
    seeds = [{r.seed for r in results} for results in there.values()]
    common = set.intersection(*seeds) if seeds else set()
    return {m: [r for r in rs if r.seed in common or not common] for m, rs in there.items()}


def _draw_curves(ax, colour: str, curves: Sequence[dict], column: str, label: str | None = None):
    """Loss over a column; the mean is of the updates that all seeds were validated at."""
    if not curves:
        return
    for curve in curves if len(curves) > 1 else ():
        ax.plot(curve[column], curve["loss"], lw=0.6, color=colour, alpha=0.6)
    common = set.intersection(*(set(curve["update"]) for curve in curves))
    if not common:  # of seeds that were validated at other updates
        common, curves = set(curves[0]["update"]), curves[:1]
    at = [np.isin(curve["update"], sorted(common)) for curve in curves]
    x, y = (
        np.mean([curve[name][w] for curve, w in zip(curves, at, strict=True)], axis=0)
        for name in (column, "loss")
    )
    ax.plot(x, y, "o-", ms=3, lw=1.6, color=colour, label=label)


def _second_half(result: Result) -> dict[str, np.ndarray]:
    """Where a run was validated: update, loss, target words seen and hours trained until then."""
    found = result.validated()
    found["hours"] = found.pop("seconds") / 3600
    late = found["update"] >= found["update"][-1] / 2
    return {name: values[late] for name, values in found.items()}


@styled
def draw_directions(groups: Sequence[Systems], baseline: str) -> Figure | None:
    """BLEU above that of the baseline: of each direction and their mean a column, of each method a line.

    Bars are means over the seeds that both have, dots are the seeds. A row for each group that has the
    baseline, in which all columns share their scale. None where nothing can be compared.
    """
    shown = [(systems, others) for systems in groups if (others := _beside(systems, baseline))]
    if not shown:
        return None
    directions = list(shown[0][0][baseline][0].scores)
    columns = [("mean", directions), *((d, [d]) for d in directions)]
    lines = [len(others) for _, others in shown]
    figure, axes = new(
        len(shown),
        len(columns),
        width=11.0,
        height=0.8 + 0.4 * len(shown) + 0.21 * sum(lines),
        sharex="row",
        sharey="row",
        height_ratios=[n + 0.5 for n in lines],
    )
    colours = _colours(groups)
    for of_row, (systems, others) in zip(axes, shown, strict=True):
        at = range(len(others))
        for ax, (_, of_column) in zip(of_row, columns, strict=True):
            base = {result.seed: _bleu(result, of_column) for result in systems[baseline]}
            for y, method in zip(at, others, strict=True):
                of_both = [result for result in systems[method] if result.seed in base]
                above = [_bleu(result, of_column) - base[result.seed] for result in of_both]
                ax.barh(y, statistics.fmean(above), height=0.75, color=colours[method])
                ax.plot(above, [y] * len(above), "o", ms=3, color="black", mec="white", mew=0.5)
            ax.axvline(0, color="black", lw=0.8)
        of_row[0].set_yticks(at, others, fontsize=8)
        of_row[0].set_ylim(len(others) - 0.4, -0.6)
    for ax, (name, _) in zip(axes[0], columns, strict=True):
        ax.set_title(name)
    figure.supxlabel(f"BLEU above {baseline}", fontsize=10)
    return figure


def _beside(systems: Systems, baseline: str) -> list[str]:
    """Those that have a seed that the baseline has."""
    of_baseline = {result.seed for result in systems.get(baseline, ())}
    return [
        method
        for method, results in systems.items()
        if method != baseline and of_baseline & {result.seed for result in results}
    ]


def _bleu(result: Result, directions: Sequence[str]) -> float:
    return statistics.fmean(result.scores[d].bleu for d in directions)


def _colours(groups: Sequence[Systems]) -> dict[str, str]:
    """Of a method the same in all pictures, of two in a group as long as possible different ones."""
    found: dict[str, str] = {}
    for systems in groups:
        free = [c for c in COLOURS if c not in {found.get(method) for method in systems}]
        new_ones = (method for method in systems if method not in found)
        found |= zip(new_ones, itertools.cycle(free))  # noqa: B905
    return found
