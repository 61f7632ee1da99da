"""Of what is kept of a study: its table, verdicts and pictures, as ``report.md`` beside the runs."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from smoe_fairseq.recipes import seeds
from smoe_fairseq.recipes.study import capacity_summary, kept, sentence_counts
from smoe_fairseq.recipes.study.blocks import chance
from smoe_fairseq.recipes.study.claims_table import claims_table
from smoe_fairseq.recipes.study.equal_cost import equal_cost_table
from smoe_fairseq.recipes.study.groups import groups
from smoe_fairseq.recipes.study.likeness import unlike
from smoe_fairseq.recipes.tables.render import MISSING, Grid, markdown, number
from smoe_fairseq.recipes.tables.table import system_costs
from smoe_fairseq.settings.dataset import Dataset
from smoe_fairseq.system.errors import UsageError
from smoe_fairseq.system.files import write_whole

FILE = "report.md"
BASELINE = "moe"
ROW = 8  # systems that can be told apart in a row of a picture


def write_report(dataset: Dataset) -> Path:
    """Writes ``results/DATASET/report.md`` and, where matplotlib is there, the pictures in it.

    Raises:
        UsageError: no run is kept.
    """
    folder = kept.folder_of(dataset.name)
    systems = _systems(dataset)
    sentence_counts.keep(dataset, [result for results in systems.values() for result in results])
    costs = {
        method: system_costs(
            dataset,
            method,
            capacity_summary.mean([r.routing for r in results]),
            kept.mean_experts_per_token(results),
        )
        for method, results in systems.items()
    }
    flops = {method: cost[1] for method, cost in costs.items() if cost[1] is not None}
    equal_cost = equal_cost_table(systems, flops, BASELINE)
    claims = claims_table(dataset, systems, flops, BASELINE)
    beside = groups(dataset.study, systems, BASELINE)
    in_rows = groups(dataset.study, systems, BASELINE, largest=ROW)
    parts = [
        f"# Study: {dataset.name}",
        markdown(_table(dataset, systems, beside, costs)),
        *(["## At equal cost", markdown(equal_cost)] if equal_cost.rows else []),
        *(["## The paper's claims", markdown(claims)] if claims.rows else []),
        "## BLEU by direction",
        markdown(_directions(dataset, beside)),
        *_pictures(folder, in_rows, flops),
        "## Runs",
        markdown(_made(dataset, systems)),
    ]
    write_whole(folder / FILE, "\n\n".join(part.rstrip() for part in parts) + "\n")
    print(f"# {folder / FILE}: what {sum(map(len, systems.values()))} runs show", flush=True)
    return folder / FILE


def _systems(dataset: Dataset) -> dict[str, list[kept.Result]]:
    """By method in the study's order, its runs in the order of their seeds."""
    results = sorted(kept.read(dataset.name), key=lambda result: seeds.order(result.name))
    if not results:
        raise UsageError(
            f"{kept.folder_of(dataset.name)} holds no runs: scripts/study.sh makes them"
        )
    for result in results[1:]:  # of others a mean would say nothing
        if result.scores.keys() != results[0].scores.keys():
            there = (f"{r.folder} in {', '.join(r.scores)}" for r in (results[0], result))
            raise UsageError(f"runs are scored in different directions: {' and '.join(there)}")
    found: dict[str, list[kept.Result]] = {}
    for result in results:
        found.setdefault(seeds.method_of(result.name), []).append(result)
    order = {method: i for i, method in enumerate(dataset.study)}
    return dict(sorted(found.items(), key=lambda item: (order.get(item[0], len(order)), item[0])))


def _table(dataset: Dataset, systems, beside, costs) -> Grid:
    """``beside``: `groups` of the systems."""
    timed = (r.machine for results in systems.values() for r in results if r.time)
    machines = list(dict.fromkeys(timed)) or [""]
    bleu = _Column(systems, lambda result: result.bleu, 2)
    losses = _Column(systems, lambda result: result.validation, 3)
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
    header += ["validation loss", f"less {BASELINE}'s", "BLEU", f"less {BASELINE}'s"]
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


def _rows(beside) -> Iterator[tuple[dict, str, list[kept.Result]]]:
    """Of each group its systems one after the other: the group, the method and its results."""
    for of_group in beside:
        for method, results in of_group.items():
            yield of_group, method, results


def _seeds(dataset: Dataset, results: Sequence[kept.Result]) -> str:
    return " ".join(str(seeds.number_in(dataset, result.name)) for result in results)


class _Column:
    """A number of each run, and beside it what it is less the baseline's.

    How wide chance is, is told from all ``systems``.
    """

    def __init__(self, systems, of: Callable[[kept.Result], float], digits: int):
        self.of, self.digits = of, digits
        self.chance = chance(kept.by_seed(systems, of))

    def cells(self, of_group, method: str) -> list[str]:
        points = kept.by_seed(of_group, self.of)
        values = list(points[method].values())
        mean = number(statistics.fmean(values), self.digits)
        if len(values) > 1:
            mean += f" ± {number(float(np.std(values, ddof=1)), self.digits)}"
        found = None
        if method != BASELINE and BASELINE in points:
            found = self.chance.between(points[BASELINE], points[method])
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


def _pictures(folder: Path, shown, flops) -> list[str]:
    try:
        from smoe_fairseq.analysis.figures import style
    except ImportError:
        return []
    from smoe_fairseq.recipes.study import study_figures as figures

    drawn = {
        "costs": figures.draw_costs(shown, {m: 1e6 * value for m, value in flops.items()}),
        "directions": figures.draw_directions(shown, BASELINE),
    }
    drawn = {name: figure for name, figure in drawn.items() if figure is not None}
    for name, figure in drawn.items():
        style.save(figure, folder / name)
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
    for suffix in sorted({name.removeprefix(seeds.method_of(name)) for name in names}):
        of_seed = [method + suffix for method in dataset.study]
        there = [name for name in of_seed if name in names]
        if 2 * len(there) >= len(of_seed):
            absent += [name for name in of_seed if name not in names]
        elif there:
            notes.append(f"The study's other systems do not have the seed of {', '.join(there)}.")
    if absent:
        notes.append(f"Not there, since they failed or are to be made: {', '.join(absent)}.")
    return notes
