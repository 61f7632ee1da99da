"""``scripts/report.sh``: the tables and pictures of a study."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from smoe_fairseq.analysis.figures import new, styled
from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import write_whole
from smoe_fairseq.recipes import folders, study_results, study_sentences
from smoe_fairseq.recipes.config import Dataset
from smoe_fairseq.recipes.planned_claims import other_measures, planned_claims
from smoe_fairseq.recipes.processes import dry_run
from smoe_fairseq.recipes.scores import CHRF
from smoe_fairseq.recipes.statistics import spearman
from smoe_fairseq.recipes.study import unlike
from smoe_fairseq.recipes.study_claims import chance, claims_table, equal_cost_table
from smoe_fairseq.recipes.study_results import Result, Systems, groups
from smoe_fairseq.recipes.table import (
    MISSING,
    Grid,
    average,
    columns,
    markdown,
    number,
    system_costs,
)

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


# What a study with many languages shows by language: scores of classes, and where the capacity
# goes.

ALIKE = 0.52  # rank correlation of fifteen languages that chance exceeds once in twenty, two-sided


def by_class(dataset: Dataset, systems) -> Grid:
    """chrF++ into English and out of it, of languages with much, some and little text."""
    found = columns(dataset)
    rows = []
    for method, results in systems.items():
        cells = []
        for column in found:
            values = [average(result.scores, column, CHRF) for result in results]
            known = None not in values
            cells.append(number(statistics.fmean(values) if known else None))
        rows.append([method, str(len(results)), *cells])
    classes = "; ".join(f"{name}: {', '.join(found)}" for name, found in dataset.classes.items())
    notes = [f"chrF++, means over the directions of a class and over seeds. {classes}."]
    return Grid(["method", "seeds", *(column.name for column in found)], rows, notes)


def by_target(dataset: Dataset, systems) -> Grid:
    """Requested capacity of the decoder by target language, out of the first language, in every seed."""
    rows, notes = [], []
    source = dataset.languages[0]
    targets = dataset.languages[1:]
    for method, results in systems.items():
        requested = {result.name: _requested(result, source) for result in results}
        requested = {name: found for name, found in requested.items() if found}
        for name, of_run in requested.items():
            seed = str(folders.seed_in(name, dataset))
            rows.append([method, seed, *(number(of_run.get(target)) for target in targets)])
        alike = [
            spearman(*(np.array([each[t] for t in targets]) for each in both))
            for both in itertools.combinations(requested.values(), 2)
            if all(t in each for each in both for t in targets)
        ]
        if alike:
            shown = ", ".join(f"{value:.2f}" for value in alike)
            notes.append(
                f"{method}: rank correlation between seeds {shown} (above {ALIKE} is more than chance for "
                "fifteen languages)."
            )
    return Grid(["method", "seed", *targets], rows, notes)


def _requested(result: Result, source: str) -> dict[str, float]:
    """By target language, the mean over the decoder's MoE layers."""
    if not result.routing:
        return {}
    found = {}
    for direction, layers in result.routing["requested_capacity"].items():
        first, target = direction.split("-")
        values = [value for name, value in layers.items() if name.startswith("decoder.")]
        if first == source and values:
            found[target] = statistics.fmean(values)
    return found


# Of what is kept of a study: its table, verdicts and pictures, as ``report.md`` beside the runs.

FILE = "report.md"
BASELINES = ("moe", "moe-16")  # the first of these that the study has
ROW = 8  # systems that can be told apart in a row of a picture


def report_study(dataset: Dataset) -> None:
    """``scripts/report.sh``."""
    if not dry_run():
        write_report(dataset)


def write_report(dataset: Dataset) -> Path:
    """Writes ``results/DATASET/report.md`` and, where matplotlib is there, the pictures in it.

    Raises:
        UsageError: no run is kept.
    """
    folder = study_results.folder_of(dataset.name)
    systems = _systems(dataset)
    study_sentences.keep(dataset, [result for results in systems.values() for result in results])
    costs = {
        method: system_costs(
            dataset,
            method,
            study_results.mean([r.routing for r in results]),
            study_results.mean_experts_per_token(results),
        )
        for method, results in systems.items()
    }
    flops = {method: cost[1] for method, cost in costs.items() if cost[1] is not None}
    baseline = next((name for name in BASELINES if name in systems), BASELINES[0])
    equal_cost = equal_cost_table(systems, flops, baseline)
    claims = claims_table(dataset, systems, flops, baseline)
    beside = groups(dataset.study, systems, baseline)
    in_rows = groups(dataset.study, systems, baseline, largest=ROW)
    parts = [
        f"# Study: {dataset.name}",
        markdown(_table(dataset, systems, beside, costs, baseline)),
        *(["## At equal cost", markdown(equal_cost)] if equal_cost.rows else []),
        *(["## The paper's claims", markdown(claims)] if claims.rows else []),
        *_of_second_series(dataset, systems, flops, baseline),
        "## BLEU by direction",
        markdown(_directions(dataset, beside)),
        *_pictures(folder, in_rows, flops, baseline),
        "## Runs",
        markdown(_made(dataset, systems)),
    ]
    write_whole(folder / FILE, "\n\n".join(part.rstrip() for part in parts) + "\n")
    print(f"# {folder / FILE}: what {sum(map(len, systems.values()))} runs show", flush=True)
    return folder / FILE


def _of_second_series(dataset: Dataset, systems, flops, baseline: str) -> list[str]:
    """What the data set's ``claims`` and ``classes`` ask for."""
    parts = []
    if dataset.claims:
        claims = planned_claims(dataset, systems, flops)
        parts += ["## Claims written down before", markdown(claims)]
        parts += ["## By other measures", markdown(other_measures(systems, baseline))]
    if dataset.classes:
        parts += ["## By resource", markdown(by_class(dataset, systems))]
        capacity = by_target(dataset, systems)
        if capacity.rows:
            parts += ["## Requested capacity by target language", markdown(capacity)]
    return parts


def _systems(dataset: Dataset) -> dict[str, list[study_results.Result]]:
    """By method in the study's order, its runs in the order of their seeds."""
    results = sorted(
        study_results.read(dataset.name), key=lambda result: folders.order(result.name)
    )
    if not results:
        raise UsageError(
            f"{study_results.folder_of(dataset.name)} holds no runs: scripts/study.sh makes them"
        )
    for result in results[1:]:  # of others a mean would say nothing
        if result.scores.keys() != results[0].scores.keys():
            there = (f"{r.folder} in {', '.join(r.scores)}" for r in (results[0], result))
            raise UsageError(f"runs are scored in different directions: {' and '.join(there)}")
    found: dict[str, list[study_results.Result]] = {}
    for result in results:
        found.setdefault(folders.method_of(result.name), []).append(result)
    order = {method: i for i, method in enumerate(dataset.study)}
    return dict(sorted(found.items(), key=lambda item: (order.get(item[0], len(order)), item[0])))


def _table(dataset: Dataset, systems, beside, costs, baseline: str) -> Grid:
    """``beside``: `groups` of the systems."""
    timed = (r.machine for results in systems.values() for r in results if r.time)
    machines = list(dict.fromkeys(timed)) or [""]
    bleu = _Column(systems, lambda result: result.bleu, 2, baseline)
    losses = _Column(systems, lambda result: result.validation, 3, baseline)
    rows = []
    for of_group, method, results in _rows(beside):
        parameters, flops = costs[method]
        times = [[r.time for r in results if r.time and r.machine == m] for m in machines]
        updates = {result.about["updates"] for result in results}
        rows.append(
            [
                method,
                number(parameters, 1),
                number(flops, 1),
                *(number(1e6 * statistics.fmean(t) if t else None, 0) for t in times),
                _seeds(dataset, results),
                " ".join(f"{u:,}" for u in sorted(updates)),
                *losses.cells(of_group, method),
                *bleu.cells(of_group, method),
            ]
        )
    time = "time/token (us)"
    of_machines = [f"{time}, {machine}" if len(machines) > 1 else time for machine in machines]
    header = ["method", "parameters (M)", "FLOPs/token (M)", *of_machines, "seeds", "updates"]
    header += ["validation loss", f"less {baseline}'s", "BLEU", f"less {baseline}'s"]
    notes = [
        "FLOPs of a forward pass (at the requested capacity of the test set's text, where a model has "
        "strata; with the experts per token of training, where a gate learns how many; of others copies "
        "count that an expert had no room for, as in the paper), time of a whole "
        "update (the median), per target token. Validation loss in bits per target token, the lowest of "
        "a run; BLEU mean over the directions. Mean over the row's seeds and, behind it, their standard "
        "deviation; less the baseline's over those of them that it has, with a 95 percent interval (how "
        "chance is told, is said below the claims). Below the study's systems are the others, and seeds "
        "that few have, beside the baseline of the same seeds."
    ]
    return Grid(header, rows, notes)


def _rows(beside) -> Iterator[tuple[dict, str, list[study_results.Result]]]:
    """Of each group its systems one after the other: the group, the method and its results."""
    for of_group in beside:
        for method, results in of_group.items():
            yield of_group, method, results


def _seeds(dataset: Dataset, results: Sequence[study_results.Result]) -> str:
    return " ".join(str(folders.seed_in(result.name, dataset)) for result in results)


class _Column:
    """A number of each run, and beside it what it is less the baseline's.

    How wide chance is, is told from all ``systems``.
    """

    def __init__(
        self, systems, of: Callable[[study_results.Result], float], digits: int, baseline: str
    ):
        self.of, self.digits, self.baseline = of, digits, baseline
        self.chance = chance(study_results.by_seed(systems, of))

    def cells(self, of_group, method: str) -> list[str]:
        points = study_results.by_seed(of_group, self.of)
        values = list(points[method].values())
        mean = number(statistics.fmean(values), self.digits)
        if len(values) > 1:
            mean += f" ± {number(float(np.std(values, ddof=1)), self.digits)}"
        found = None
        if method != self.baseline and self.baseline in points:
            found = self.chance.between(points[self.baseline], points[method])
        return [mean, MISSING if found is None else format(found, f"+.{self.digits}f")]


def _directions(dataset: Dataset, beside) -> Grid:
    directions = list(next(iter(beside[0].values()))[0].scores)
    rows = [
        [method, _seeds(dataset, results)]
        + [number(statistics.fmean(r.scores[d].bleu for r in results)) for d in directions]
        for _, method, results in _rows(beside)
    ]
    signatures = {s.signature for _, _, rs in _rows(beside) for r in rs for s in r.scores.values()}
    notes = [f"sacreBLEU {signature}" for signature in sorted(signatures)]
    return Grid(["method", "seeds", *directions], rows, notes)


def _pictures(folder: Path, shown, flops, baseline: str) -> list[str]:
    try:
        from smoe_fairseq.analysis import figures
    except ImportError:
        return []

    drawn = {
        "costs": draw_costs(shown, {m: 1e6 * value for m, value in flops.items()}),
        "directions": draw_directions(shown, baseline),
    }
    drawn = {name: figure for name, figure in drawn.items() if figure is not None}
    for name, figure in drawn.items():
        figures.save(figure, folder / name)
    return ["## Pictures", *(f"![{name}]({name}.png)" for name in drawn)]


def _made(dataset: Dataset, systems) -> Grid:
    """Of the study's systems also those that have not all seeds that most of them have."""
    rows = []
    for results in systems.values():
        for result in results:
            about = result.about
            machine = result.machine
            if result.untimed:
                machine += f" (times left out: {result.untimed})"
            versions = ", ".join(f"{name} {v}" for name, v in about["versions"].items())
            rows.append([result.name, about["commit"], versions, machine, about["command"]])
    names = [result.name for results in systems.values() for result in results]
    header = ["run", "commit", "versions", "machine", "command"]
    results = [result for of_method in systems.values() for result in of_method]
    return Grid(header, rows, _absent(dataset, names) + unlike(dataset, results), texts=len(header))


def _absent(dataset: Dataset, names: Sequence[str]) -> list[str]:
    """Which of the study's systems lack seeds that others have."""
    notes, absent = [], []
    for suffix in sorted({name.removeprefix(folders.method_of(name)) for name in names}):
        of_seed = [method + suffix for method in dataset.study]
        there = [name for name in of_seed if name in names]
        if 2 * len(there) >= len(of_seed):
            absent += [name for name in of_seed if name not in names]
        elif there:
            notes.append(f"The study's other systems do not have the seed of {', '.join(there)}.")
    if absent:
        notes.append(f"Not there, since they failed or are to be made: {', '.join(absent)}.")
    return notes
