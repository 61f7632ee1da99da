"""``scripts/report.sh``: tables, verdicts and pictures of a study's results."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from smoe_fairseq.analysis.figures import new, save, styled
from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import write_whole
from smoe_fairseq.recipes.compare import study_tables
from smoe_fairseq.recipes.compare.grid import Grid, markdown
from smoe_fairseq.recipes.compare.statements import (
    draw_statements,
    judge,
    measures_of,
    statements_of,
    statements_table,
)
from smoe_fairseq.recipes.compare.table import system_costs
from smoe_fairseq.recipes.datasets import Dataset, load_dataset
from smoe_fairseq.recipes.evaluation import scores
from smoe_fairseq.recipes.folders import run_method, run_order
from smoe_fairseq.recipes.pretrained import STARTED
from smoe_fairseq.recipes.study import results as study_results
from smoe_fairseq.recipes.study.results import Result, Systems, folder_of
from smoe_fairseq.recipes.training import identity

FILE = "report.md"
COLOURS = ("black", "#3f6ea8", "#9dbcdc", "#a2641b", "#d9a066", "#b0413e", "#5b8c5a", "#777777")
LINES = ("-", "--", ":", "-.")
Curve = dict[float, tuple[float, float]]  # TFLOP of training and loss at each validation, by update


def write_report(dataset: Dataset) -> None:
    """Write ``report.md`` and its pictures, unless in a dry run; raises UsageError without results."""
    if dataset.settings.dry_run:
        return
    folder = folder_of(dataset)
    own = [load_dataset(name, dataset.settings) for name in dataset.parts] or [dataset]
    everything, parts = [*map(_systems, own)], []
    folder.mkdir(parents=True, exist_ok=True)
    for each in everything:
        parts.append({m: [r for r in rs if not r.diverged] or rs for m, rs in each.items()})
    systems = {} if dataset.parts else parts[0]
    costs = {}
    for method, results in systems.items():
        known = {name: results[0].about.get(name) for name in ("flags", "vocabulary")}
        known["requested_capacity"] = study_results.mean_capacity(results)
        known["experts_per_token"] = study_results.mean_experts_per_token(results)
        costs[method] = system_costs(dataset, method, **known)
    flops = {method: cost[1] for method, cost in costs.items() if cost[1] is not None}
    statements, measures = statements_of(dataset, parts[0]), measures_of(dataset)
    verdicts = judge(statements, parts, measures)
    text = [f"# Study: {dataset.name}"]

    def add(title: str, grid: Grid) -> None:
        text.extend([f"## {title}", markdown(grid)] if grid.rows else [])

    add("Statements", statements_table(statements, verdicts, measures, everything, flops))
    pictures = {}
    if statements:
        pictures["statements"] = draw_statements(statements, verdicts, measures)
    if any(result.logged for results in systems.values() for result in results):
        pictures["costs"] = draw_costs(systems, flops)
    for name, figure in pictures.items():
        save(figure, folder / name)
        text.append(f"![{name}]({name}.png)")
    if dataset.parts:
        links = ", ".join(f"[{name}](../{name}/{FILE})" for name in dataset.parts)
        text.append(f"Differences are means over {links}, of the seeds that all have.")
    else:
        add("Systems", study_tables.systems_table(dataset, systems, costs))
        if dataset.classes:
            add("By resource", study_tables.by_class(dataset, systems))
        add("Requested capacity", study_tables.capacity_table(dataset, systems))
        add("BLEU by direction", study_tables.directions_table(dataset, systems))
        add("Runs", study_tables.runs_table(everything[0]))
    write_whole(folder / FILE, "\n\n".join(part.rstrip() for part in text) + "\n")
    runs = sum(len(results) for each in everything for results in each.values())
    what = f"what {runs} runs show" if runs > 1 else "what one run shows"
    print(f"# {folder / FILE}: {what}", flush=True)


def _systems(dataset: Dataset) -> dict[str, list[Result]]:
    """The results by method in the study's order, then by seed."""
    results = sorted(study_results.read(dataset), key=lambda result: run_order(result.name))
    if not results:
        raise UsageError(f"{folder_of(dataset)} holds no runs: scripts/study.sh makes them")
    for result in results[1:]:  # means over different directions cannot be compared
        if {*result.scores, *result.kept} != {*results[0].scores, *results[0].kept}:
            both = (f"{r.folder} in {', '.join(r.scores)}" for r in (results[0], result))
            raise UsageError(f"runs are scored in different directions: {' and '.join(both)}")
        if different := scores.different_tests(results[0].scores, result.scores, now={}):
            both = f"{result.folder} and {results[0].folder} are scored on different test sets"
            raise UsageError(f"{both} ({', '.join(different)}): score and save them again")
        runs = {scores.other_search(dataset, r.folder): r.folder for r in (results[0], result)}
        if len(runs) > 1:
            ways = " and ".join(f"{run} with {way or 'the usual'}" for way, run in runs.items())
            raise UsageError(f"runs are evaluated in different ways: {ways}: evaluate them alike")
    for metric in scores.BLEU, scores.CHRF:
        if mixed := scores.different_signatures(*(r.scores for r in results), metric=metric):
            where = f"{folder_of(dataset)}: {metric} of {', '.join(sorted(mixed))}"
            raise UsageError(f"{where} has different signatures of sacreBLEU: score them alike")
    systems: dict[str, list[Result]] = {}
    for result in results:
        systems.setdefault(run_method(result.name), []).append(result)
    left_out = {*identity.NOT_OF_A_STUDY, STARTED}
    for runs in systems.values():
        records = {r.name: r.about | {"trained": r.about.get("limits") or {}} for r in runs}
        records = {name: each for name, each in records.items() if "flags" in each}
        if different := identity.differing(records, left_out):
            raise UsageError(f"{folder_of(dataset)}: {'; '.join(different)}: expected them equal")
    rank = {method: i for i, method in enumerate(dataset.study)}
    return dict(sorted(systems.items(), key=lambda item: (rank.get(item[0], len(rank)), item[0])))


@styled
def draw_costs(systems: Systems, flops: Mapping[str, float]) -> Figure:
    """Validation loss over training FLOPs in the second half of training.

    ``flops`` are of a forward pass per target token, in millions. Thin lines are seeds, thick ones means.
    """
    figure, axes = new(width=7.0, height=max(4.0, 0.5 + 0.19 * len(systems)))
    ax = axes[0][0]
    for i, (method, results) in enumerate(systems.items()):
        each = flops.get(method, math.nan)
        curves = [_second_half(result, each) for result in results if result.logged]
        style = {"color": COLOURS[i % len(COLOURS)], "ls": LINES[i // len(COLOURS) % len(LINES)]}
        _draw_curves(ax, curves, label=method, **style)
    ax.set_xlabel("training, TFLOP")
    ax.set_ylabel("validation loss (bits per token)")
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    return figure


def _draw_curves(ax, curves: Sequence[Curve], label: str, **style) -> None:
    """Plot loss over FLOPs; the mean is over updates at which all seeds were validated."""
    if not curves:
        return
    for curve in curves if len(curves) > 1 else ():
        ax.plot(*zip(*curve.values()), lw=0.5, alpha=0.4, **style)
    common = set.intersection(*map(set, curves))
    if not common:  # seeds were validated at different updates
        common, curves = set(curves[0]), curves[:1]
    means = [np.mean([curve[update] for curve in curves], axis=0) for update in sorted(common)]
    ax.plot(*zip(*means), lw=1.6, label=label, **style)


def _second_half(result: Result, flops: float) -> Curve:
    """The curve of a run; words are interpolated between lines of the log."""
    rows = [row for row in result.curve if row["validation_nll"] is not None]
    rows = [row for row in rows if row["update"] >= rows[-1]["update"] / 2]
    logged = [[row[name] for row in result.logged] for name in ("update", "words")]
    return {
        row["update"]: (3e-6 * flops * np.interp(row["update"], *logged), row["validation_nll"])
        for row in rows
    }
