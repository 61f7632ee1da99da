"""``scripts/report.sh``: tables, verdicts and pictures of what is kept of a study."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from smoe_fairseq.analysis.figures import new, save, styled
from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import write_whole
from smoe_fairseq.recipes.config import Dataset
from smoe_fairseq.recipes.evaluation.grid import Grid, markdown
from smoe_fairseq.recipes.evaluation.table import columns, system_costs
from smoe_fairseq.recipes.folders import method_of, order
from smoe_fairseq.recipes.processes import dry_run
from smoe_fairseq.recipes.study import sentences, tables
from smoe_fairseq.recipes.study.claims import claims_table, planned_claims
from smoe_fairseq.recipes.study.results import (
    Result,
    Systems,
    folder_of,
    groups,
    mean_capacity,
    mean_experts_per_token,
    read,
)

FILE = "report.md"
BASELINES = ("moe", "moe-16")  # the first of these that the study has
ROW = 8  # the most systems in a row of a picture, so that they can be told apart
COLOURS = (
    *("black", "#3f6ea8", "#9dbcdc", "#777777", "#a2641b", "#d9a066"),
    *("#bbbbbb", "#8a8a5c", "#b0413e", "#e08a87", "#5b8c5a", "#a9cba4"),
)


def write_report(dataset: Dataset) -> None:
    """Write ``results/DATASET/report.md`` and the pictures in it; a dry run does nothing.

    Raises:
        UsageError: there are no results.
    """
    if dry_run():
        return
    folder = folder_of(dataset.name)
    systems = _systems(dataset)
    sentences.keep(dataset, [result for results in systems.values() for result in results])
    costs = {
        method: system_costs(
            dataset,
            method,
            mean_capacity(results),
            mean_experts_per_token(results),
            results[0].about.get("flags"),
        )
        for method, results in systems.items()
    }
    flops = {method: cost[1] for method, cost in costs.items() if cost[1] is not None}
    baseline = next((name for name in BASELINES if name in systems), BASELINES[0])
    beside = groups(dataset.study, systems, baseline)
    parts = [f"# Study: {dataset.name}"]

    def add(title: str, grid: Grid) -> None:
        parts.extend([f"## {title}", markdown(grid)] if grid.rows else [])

    parts.append(markdown(tables.systems_table(dataset, systems, beside, costs, baseline)))
    add("At equal cost", tables.equal_cost_table(systems, flops, baseline))
    add("The paper's claims", claims_table(dataset, systems, flops, baseline))
    if dataset.claims:
        add("Claims written down before", planned_claims(dataset, systems, flops))
        add("By other measures", tables.other_measures(systems, baseline))
    if dataset.classes:
        add("By resource", tables.by_class(dataset, systems))
        add("Requested capacity by target language", tables.by_target(dataset, systems))
    add("BLEU by direction", tables.directions_table(dataset, beside))
    shown = groups(dataset.study, systems, baseline, largest=ROW)
    parts += ["## Pictures", *_pictures(dataset, folder, shown, flops, baseline)]
    add("Runs", tables.runs_table(dataset, systems))
    write_whole(folder / FILE, "\n\n".join(part.rstrip() for part in parts) + "\n")
    runs = sum(map(len, systems.values()))
    what = f"what {runs} runs show" if runs > 1 else "what one run shows"
    print(f"# {folder / FILE}: {what}", flush=True)


def _systems(dataset: Dataset) -> dict[str, list[Result]]:
    """The results by method, in the study's order, each method's ordered by seed."""
    results = sorted(read(dataset.name), key=lambda result: order(result.name))
    if not results:
        raise UsageError(f"{folder_of(dataset.name)} holds no runs: scripts/study.sh makes them")
    for result in results[1:]:  # means over different directions cannot be compared
        if result.scores.keys() != results[0].scores.keys():
            there = (f"{r.folder} in {', '.join(r.scores)}" for r in (results[0], result))
            raise UsageError(f"runs are scored in different directions: {' and '.join(there)}")
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(method_of(result.name), []).append(result)
    place = {method: i for i, method in enumerate(dataset.study)}
    return dict(sorted(found.items(), key=lambda item: (place.get(item[0], len(place)), item[0])))


def _pictures(
    dataset: Dataset,
    folder: Path,
    shown: Sequence[Systems],
    flops: Mapping[str, float],
    baseline: str,
) -> list[str]:
    """Save pictures of the study's own systems, and of all others; return the lines that show them."""
    colour, per_token = colours(shown), {m: 1e6 * value for m, value in flops.items()}
    drawn = {}
    for suffix, of_picture in (("", shown[:1]), ("_others", shown[1:])):
        if of_picture:
            drawn[f"costs{suffix}"] = draw_costs(of_picture, per_token, colour)
            drawn[f"directions{suffix}"] = draw_directions(dataset, of_picture, baseline, colour)
    drawn = {name: figure for name, figure in drawn.items() if figure is not None}
    for name, figure in drawn.items():
        save(figure, folder / name)
    return [f"![{name}]({name}.png)" for name in drawn]


@styled
def draw_costs(
    groups: Sequence[Systems], flops: Mapping[str, float], colour: Mapping[str, str]
) -> Figure:
    """Validation loss over training FLOPs (``flops``: forward, per target token) and over hours.

    Only the second half of training, where systems can be told apart; a row for each group. Thin lines are
    seeds, a thick line is their mean. Hours are of the machine that trained most of a row's systems, and of
    the seeds with which it trained all of them; there are none where fewer than two systems were timed.
    """
    rows = len(groups)
    machines = [_machine(systems) for systems in groups]
    times = [_timed(*each) for each in zip(groups, machines, strict=True)]
    columns = 2 if any(len(timed) > 1 for timed in times) else 1
    size = {"width": 2.0 + 3.5 * columns, "height": 3.6 * rows + 0.4}
    figure, axes = new(rows, columns, **size, sharey="row")
    for of_row, systems, machine, timed in zip(axes, groups, machines, times, strict=True):
        by_flops, beside = of_row[0], of_row[-1]
        for method, results in systems.items():
            curves = {result.name: _second_half(result) for result in results if result.logged}
            for curve in curves.values():
                curve["tflop"] = 3e-12 * flops.get(method, math.nan) * curve["words"]
            _draw_curves(by_flops, colour[method], list(curves.values()), "tflop", method)
            if len(timed) > 1:
                there = [curves[r.name] for r in timed.get(method, ())]
                _draw_curves(beside, colour[method], there, "hours")
        labels = by_flops.get_legend_handles_labels()
        beside.legend(*labels, loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
        by_flops.set_xlabel("training, TFLOP")
        if len(timed) > 1:
            beside.set_xlabel(f"hours of training, {machine}")
        elif columns > 1:
            beside.set_axis_off()
    title = "Validation loss (bits per token), second half of training"
    if any(len(results) > 1 for systems in groups for results in systems.values()):
        title += "\n(thin: seeds, thick: their mean)"
    figure.suptitle(title, fontsize=11)
    return figure


def _machine(systems: Systems) -> str:
    """The machine that trained most systems; of several such, the one that trained most runs."""
    runs = [(r.machine, method) for method, results in systems.items() for r in results if r.time]
    count = Counter(machine for machine, _ in runs)
    of_systems = Counter(machine for machine, _ in set(runs))
    return max(count, key=lambda machine: (of_systems[machine], count[machine]), default="")


def _timed(systems: Systems, machine: str) -> dict[str, list[Result]]:
    """By method, the runs timed on the machine; only those of common seeds, if there are such seeds."""
    there = {m: [r for r in rs if r.time and r.machine == machine] for m, rs in systems.items()}
    there = {method: results for method, results in there.items() if results}
    seeds = [{r.seed for r in results} for results in there.values()]
    common = set.intersection(*seeds) if seeds else set()
    return {m: [r for r in rs if r.seed in common or not common] for m, rs in there.items()}


def _draw_curves(ax, colour: str, curves: Sequence[dict], column: str, label: str | None = None):
    """Plot loss over a column; the mean takes the updates at which all seeds were validated."""
    if not curves:
        return
    for curve in curves if len(curves) > 1 else ():
        ax.plot(curve[column], curve["loss"], lw=0.6, color=colour, alpha=0.6)
    common = set.intersection(*(set(curve["update"]) for curve in curves))
    if not common:  # seeds were validated at different updates
        common, curves = set(curves[0]["update"]), curves[:1]
    at = [np.isin(curve["update"], sorted(common)) for curve in curves]
    x, y = (
        np.mean([curve[name][w] for curve, w in zip(curves, at, strict=True)], axis=0)
        for name in (column, "loss")
    )
    ax.plot(x, y, "o-", ms=3, lw=1.6, color=colour, label=label)


def _second_half(result: Result) -> dict[str, np.ndarray]:
    """Update, loss, target words and hours of training at each validation."""
    found = result.validated()
    found["hours"] = found.pop("seconds") / 3600
    late = found["update"] >= found["update"][-1] / 2
    return {name: values[late] for name, values in found.items()}


@styled
def draw_directions(
    dataset: Dataset, groups: Sequence[Systems], baseline: str, colour: Mapping[str, str]
) -> Figure | None:
    """BLEU less the baseline's: a panel for the mean and for each direction, a bar for each method.

    Where languages have classes, a panel is a mean over a class in place of one direction. Bars are means
    over common seeds, dots are single seeds. A row for each group that has the baseline. None if nothing
    can be compared.
    """
    shown = [(systems, others) for systems in groups if (others := _comparable(systems, baseline))]
    if not shown:
        return None
    scored = shown[0][0][baseline][0].scores
    panels = [("mean", tuple(scored))]
    for column in columns(dataset)[:-1]:
        if column.directions and scored.keys() >= set(column.directions):
            panels.append((column.name, column.directions))
    lines = [len(others) for _, others in shown]
    figure, axes = new(
        len(shown),
        len(panels),
        width=11.0,
        height=0.8 + 0.4 * len(shown) + 0.21 * sum(lines),
        sharex="row",
        sharey="row",
        height_ratios=[n + 0.5 for n in lines],
    )
    for of_row, (systems, others) in zip(axes, shown, strict=True):
        at = range(len(others))
        for ax, (_, of_column) in zip(of_row, panels, strict=True):
            base = {result.seed: _bleu(result, of_column) for result in systems[baseline]}
            for y, method in zip(at, others, strict=True):
                of_both = [result for result in systems[method] if result.seed in base]
                above = [_bleu(result, of_column) - base[result.seed] for result in of_both]
                ax.barh(y, statistics.fmean(above), height=0.75, color=colour[method])
                ax.plot(above, [y] * len(above), "o", ms=3, color="black", mec="white", mew=0.5)
            ax.axvline(0, color="black", lw=0.8)
        of_row[0].set_yticks(at, others, fontsize=8)
        of_row[0].set_ylim(len(others) - 0.4, -0.6)
    for ax, (name, _) in zip(axes[0], panels, strict=True):
        ax.set_title(name.replace(" ", "\n"))
    figure.supxlabel(f"BLEU above {baseline}", fontsize=10)
    return figure


def _comparable(systems: Systems, baseline: str) -> list[str]:
    """The methods that have a seed in common with the baseline."""
    of_baseline = {result.seed for result in systems.get(baseline, ())}
    return [
        method
        for method, results in systems.items()
        if method != baseline and of_baseline & {result.seed for result in results}
    ]


def _bleu(result: Result, directions: Sequence[str]) -> float:
    return statistics.fmean(result.scores[d].bleu for d in directions)


def colours(groups: Sequence[Systems]) -> dict[str, str]:
    """A colour for each method: one in all groups, and if possible different within a group."""
    found: dict[str, str] = {}
    for systems in groups:
        free = [c for c in COLOURS if c not in {found.get(method) for method in systems}]
        new_ones = (method for method in systems if method not in found)
        found |= zip(new_ones, itertools.cycle(free))  # noqa: B905
    return found
