"""``scripts/table.sh``: the scores of all runs, beside the paper's."""

import csv
import io
import itertools
import json
import statistics
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tabulate import tabulate

from smoe_fairseq.errors import UsageError, quietly
from smoe_fairseq.recipes import processes, scores
from smoe_fairseq.recipes.config import (
    Dataset,
    arguments,
    load_dataset,
    method_flags,
    resource_classes,
    tables,
)
from smoe_fairseq.recipes.identity import given_flags
from smoe_fairseq.recipes.processes import Folders, report
from smoe_fairseq.recipes.statistics import SAMPLES, SentenceCounter, p_value, paired

MISSING = "-"


@dataclass(frozen=True)
class Grid:
    """Words to print: the first ``texts`` columns are text, the others numbers or `MISSING`."""

    header: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    texts: int = 1


def number(value: float | None, digits: int = 2, sign: bool = False) -> str:
    """What is not known is `MISSING`, never zero."""
    if value is None:
        return MISSING
    return f"{value:{'+' if sign else ''}.{digits}f}"


def markdown(grid: Grid) -> str:
    """A table and, below it, the notes."""
    return "\n".join([_table(grid, "pipe"), "", *grid.notes])


def as_csv(grid: Grid) -> str:
    """Header and rows alone: the notes are for standard error."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([grid.header, *grid.rows])
    return text.getvalue().rstrip("\n")


def latex(grid: Grid) -> str:
    """A tabular that needs no package, with the notes as comments before it."""
    rows = [["--" if word == MISSING else word for word in row] for row in grid.rows]
    comments = [f"% {note}" for note in grid.notes]
    return "\n".join([*comments, _table(replace(grid, rows=rows), "latex")])


def _table(grid: Grid, kind: str) -> str:
    numbers = len(grid.header) - grid.texts
    alignment = ["left"] * grid.texts + ["right"] * numbers
    return tabulate(
        grid.rows, grid.header, tablefmt=kind, colalign=alignment, disable_numparse=True
    )


FORMATS: dict[str, Callable[[Grid], str]] = {"markdown": markdown, "csv": as_csv, "latex": latex}


# The columns of a data set's table: directions, or averages over classes of languages.

SIZES = "sizes.json"  # in the data set's folder: {language: training sentence pairs}


@dataclass(frozen=True)
class Column:
    """The average over some directions, or one of them; None: which ones is not known."""

    name: str
    directions: tuple[str, ...] | None


def columns(dataset: Dataset) -> list[Column]:
    """In the paper's order; the last one is the average over all directions."""
    if classes := dataset.classes or resource_classes(dataset.name):
        if None in classes.values():
            classes = resource_classes(dataset.name, _counted(dataset))
        found = _by_class(dataset, classes)
    else:
        found = [Column(direction, (direction,)) for direction in dataset.directions]
    return [*found, Column("average", dataset.directions)]


def _counted(dataset: Dataset) -> dict[str, int] | None:
    """Sentence pairs of each language's training text, as prepare.sh counted them; None: it did not."""
    path = Folders(dataset.name).data / SIZES
    if not path.exists():
        return None
    try:
        sizes = json.loads(path.read_text("utf-8"))
        if not all(isinstance(size, int) for size in sizes.values()):
            raise ValueError
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, AttributeError):
        raise UsageError(f"{path} has to hold {{language: sentence pairs}} in JSON") from None
    missing = [language for language in dataset.languages[1:] if language not in sizes]
    if missing:
        raise UsageError(f"{path} has no size for {', '.join(missing)}: prepare the data again")
    return sizes


def _by_class(dataset: Dataset, classes: Mapping[str, Sequence[str] | None]) -> list[Column]:
    english = dataset.languages[0]
    found = []
    for side, position in (("eng-xxx", 0), ("xxx-eng", 1)):
        here = [d for d in dataset.directions if d.split("-")[position] == english]
        found.append(Column(f"{side} all", tuple(here)))
        for name, languages in classes.items():
            chosen = None
            if languages is not None:
                chosen = tuple(d for d in here if d.split("-")[1 - position] in languages)
            found.append(Column(f"{side} {name}", chosen))
    return found


# Is one system better than another? By the sentences of the test set, and by the seeds of both.


def compare(dataset: Dataset, first: str, second: str, metric: str = scores.BLEU) -> Grid:
    """Means of both over their seeds, the difference and its p-values; missing where either is.

    ``first`` and ``second`` are methods, with all seeds that are scored, or runs (``moe.seed-2``). The
    p-value of the sentences is that of sacreBLEU's paired bootstrap, where a sentence is drawn with the
    translations of all seeds; its own seed is sacreBLEU's (``SACREBLEU_SEED``), so a comparison repeats
    itself exactly. That of the seeds is exact: the share of all ways to call so many of the runs ``first``
    that are as far apart.

    Raises:
        UsageError: either is not scored, or not as the other one, or they have no direction in common.
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
    if not (common := _of_both(dataset, one, other)):
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


def _of_both(dataset: Dataset, one: "_System", other: "_System") -> list[str]:
    return [d for d in dataset.directions if one.has(d) and other.has(d)]


class _System:
    """A method's scored runs, or one run."""

    def __init__(self, dataset: Dataset, name: str, metric: str):
        self.metric, self.folder = metric, Folders(dataset.name).runs
        found = sorted((p.name for p in self.folder.glob("*") if p.is_dir()), key=processes.order)
        runs = [run for run in found if name in (run, processes.method_of(run))]
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
        """Of each run, their mean."""
        return [
            statistics.fmean(result[d].of(self.metric)[0] for d in directions)
            for result in self.runs.values()
        ]

    def translations(self, direction: str) -> list[Path]:
        return [self.folder / run / "test" / f"{direction}.txt" for run in self.runs]


def by_seeds(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The permutation test's two-sided p-value; None where one side has no second run."""
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
    if by_seeds(first, second) is None:
        return "p (seeds) takes two runs of each"
    apart = by_seeds(range(len(first)), range(100, 100 + len(second)))
    return f"p (seeds): permutation test over the runs; with so many it is at least {apart:.4f}"


def _within_seeds(systems: Collection["_System"], points: Sequence[Sequence[float]]) -> list[str]:
    """A seed gives all systems the same batches, so that less is left to chance than between seeds."""
    by_seed = [
        dict(zip(map(processes.seed_in, system.runs), of_runs, strict=True))
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


# ``smoe table`` and ``scripts/table.sh``: the runs of a data set side by side, in the paper's
# layout.

Scores = dict[str, scores.Score]


def add_table_arguments(parser: ArgumentParser) -> None:
    """As the commands of ``smoe`` have it."""
    parser.add_argument("dataset", metavar="DATASET")
    parser.add_argument("--format", choices=FORMATS, default="markdown", help="default: markdown")
    parser.add_argument(
        "--metric",
        choices=[metric.lower() for metric in scores.METRICS],
        default=scores.BLEU.lower(),
        help="default: bleu; the paper's numbers are beside this one only",
    )
    parser.add_argument(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help="is B better or worse than A, by direction? over all seeds of both methods (A.seed-2 is one): "
        "paired bootstrap over sentences, permutations of the seeds",
    )


def run_table(args: Namespace) -> None:
    """Prints the table of a data set, or the comparison of two of its runs."""
    dataset = load_dataset(args.dataset)
    metric = next(metric for metric in scores.METRICS if metric.lower() == args.metric)
    if args.compare:
        grid = compare(dataset, *args.compare, metric)
    else:
        grid = side_by_side(dataset, metric)
    print(FORMATS[args.format](grid))
    if args.format == "csv":
        print("\n".join(grid.notes), file=sys.stderr)


def side_by_side(dataset: Dataset, metric: str = scores.BLEU) -> Grid:
    """A row for each method and, where the paper has the system, its values and the differences.

    The paper's values are BLEU; beside another ``metric`` of `scores.METRICS` they are left out.
    Of several seeds the row has the mean of those that are scored, and the next one the standard deviation.
    The average of a class of which any direction is missing is missing itself, and a note gives the
    count; scores of different sacreBLEU signatures are not averaged.
    """
    folder = Folders(dataset.name).runs
    names = [path.name for path in folder.glob("*") if path.is_dir()]
    if not names:
        raise UsageError(
            f"{folder} holds no runs: start with scripts/train.sh {dataset.name} METHOD"
        )
    table = tables().get(dataset.name, {})
    paper = table.get("rows", {}) if metric == scores.BLEU else {}
    order = list(paper)
    names.sort(key=processes.order)
    runs = {m: list(found) for m, found in itertools.groupby(names, key=processes.method_of)}
    methods = sorted(runs, key=lambda m: (order.index(m) if m in paper else len(order), m))
    found = columns(dataset)

    rows, notes = [], []
    for name in methods:
        results = {run: scores.read(folder / run) for run in runs[name]}
        scored = {run: result for run, result in results.items() if result} or results
        cost = system_costs(dataset, name)
        each = [[average(result, column, metric) for column in found] for result in scored.values()]
        bleu = [_over_seeds(statistics.fmean, values) for values in zip(*each, strict=True)]
        spread = [_over_seeds(statistics.stdev, values) for values in zip(*each, strict=True)]
        count = f"mean of {len(scored)} seeds"
        if not paper:
            rows.append([name, *_words(cost, bleu)])
            if len(scored) > 1:
                rows[-1][0] += f", {count}"
                rows.append([f"{name}, standard deviation", *_words([None, None], spread)])
        else:
            printed = paper.get(name, {})
            paper_cost = [printed.get("parameters"), printed.get("flops_per_token")]
            by_name = dict(zip(table["columns"], printed.get("bleu", []), strict=False))
            paper_bleu = [by_name.get(column.name) for column in found]
            rows.append([name, "ours", *_words(cost, bleu)])
            if len(scored) > 1:
                rows[-1][1] += f", {count}"
                rows.append([name, "standard deviation", *_words([None, None], spread)])
            rows.append([name, "paper", *_words(paper_cost, paper_bleu, digits=0)])
            rows.append(
                [
                    *(name, "difference"),
                    *_words(_less(cost, paper_cost), _less(bleu, paper_bleu), sign=True),
                ]
            )
        for run, result in results.items():
            notes += _notes(dataset, run, result, metric)
            if flags := _unusual_search(dataset, folder / run):
                notes.append(f"{run}: translated with {flags}")
    if any(column.directions is None for column in found):
        path = Folders(dataset.name).data / SIZES
        notes.append(f"{path} is missing: run scripts/prepare.sh {dataset.name} for the classes")
    texts = ["method", *(["source"] if paper else [])]
    costs = ["parameters (M)", "FLOPs/token (M)"]
    return Grid([*texts, *costs, *(c.name for c in found)], rows, notes, texts=len(texts))


def _unusual_search(dataset: Dataset, run: Path) -> str:
    """Flags that its translations were made with and that the data set does not have."""
    usual = given_flags(arguments(dataset.generate))
    given = given_flags(scores.search_flags(run).split())
    return " ".join(f"{flag} {v}".strip() for flag, v in given.items() if usual.get(flag) != v)


def average(result: Scores, column: Column, metric: str = scores.BLEU) -> float | None:
    """In points; None where a direction is missing or they were not computed alike."""
    there = _of(result, metric)
    if not column.directions or not all(d in there for d in column.directions):
        return None
    points, signatures = zip(*(there[d] for d in column.directions), strict=True)
    return None if len(set(signatures)) > 1 else statistics.fmean(points)


def _of(result: Scores, metric: str) -> dict[str, tuple[float, str]]:
    """Points and signature of the directions that have this metric."""
    found = {direction: score.of(metric) for direction, score in result.items()}
    return {direction: value for direction, value in found.items() if value is not None}


def _over_seeds(function, values: Sequence[float | None]) -> float | None:
    """None where a run has no such value, or there are too few of them."""
    try:
        return None if None in values else function(values)
    except statistics.StatisticsError:
        return None


def system_costs(
    dataset: Dataset,
    method: str,
    requested_capacity: Mapping[str, float] | None = None,
    experts_per_token: float | None = None,
) -> list[float | None]:
    """Parameters and FLOPs per token in millions, of the model that the recipe's flags describe.

    ``requested_capacity``, by MoE layer, and ``experts_per_token`` are what was measured; by default those
    of uniform routing.
    """
    try:
        method_flags(method, dataset)
    except UsageError:  # a folder that is no method's, such as a copy
        return [None, None]
    with quietly():
        from smoe_fairseq.analysis.cost_command import system_cost

        try:
            cost = system_cost(
                dataset,
                method,
                requested_capacity=requested_capacity,
                experts_per_token=experts_per_token,
            )
        except (UsageError, ValueError) as error:  # training refused it too, and left its folder
            report(f"{Folders(dataset.name).runs / method} has no cost: {error}")
            return [None, None]
    return [cost.parameters / 1e6, cost.flops_per_token / 1e6]


def _less(ours: Sequence[float | None], paper: Sequence[float | None]) -> list[float | None]:
    return [None if a is None or b is None else a - b for a, b in zip(ours, paper, strict=True)]


def _words(cost, bleu, digits: int = 1, sign: bool = False) -> list[str]:
    return [*(number(n, digits, sign) for n in cost), *(number(n, 2, sign) for n in bleu)]


def _notes(dataset: Dataset, name: str, result: Scores, metric: str) -> list[str]:
    """What a reader of a row has to know: how it was scored and why averages are missing."""
    there = _of(result, metric)
    missing = [d for d in dataset.directions if d not in there]
    signatures = sorted({signature for _, signature in there.values()})
    said = {scores.BLEU: "sacreBLEU", scores.COMET: metric}.get(metric, f"sacreBLEU's {metric}")
    notes = [f"{name}: {said} {signature}" for signature in signatures]
    if missing:
        notes.append(
            f"{name}: {len(there)} of {len(dataset.directions)} directions are scored, "
            "averages over missing ones are left out"
        )
    if len(signatures) > 1:
        notes.append(f"{name}: scores of different sacreBLEU signatures are not averaged")
    return notes
