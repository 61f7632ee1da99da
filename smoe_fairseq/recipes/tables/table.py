"""``smoe table`` and ``scripts/table.sh``: the runs of a data set side by side, in the paper's layout."""

import itertools
import statistics
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

from smoe_fairseq.recipes import seeds
from smoe_fairseq.recipes.evaluating import scores
from smoe_fairseq.recipes.folders import Folders
from smoe_fairseq.recipes.shell import report
from smoe_fairseq.recipes.tables.columns import SIZES, Column, columns
from smoe_fairseq.recipes.tables.render import FORMATS, Grid, number
from smoe_fairseq.recipes.training.identity import given_flags
from smoe_fairseq.settings.dataset import Dataset, load_dataset
from smoe_fairseq.settings.flags import arguments
from smoe_fairseq.settings.method import method_flags
from smoe_fairseq.settings.paper_tables import tables
from smoe_fairseq.system.errors import UsageError
from smoe_fairseq.system.quiet import quietly

Scores = dict[str, scores.Score]


def add_arguments(parser: ArgumentParser) -> None:
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


def run(args: Namespace) -> None:
    """Prints the table of a data set, or the comparison of two of its runs."""
    dataset = load_dataset(args.dataset)
    metric = next(metric for metric in scores.METRICS if metric.lower() == args.metric)
    if args.compare:
        from smoe_fairseq.recipes.tables.compare import compare

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
    names.sort(key=seeds.order)
    runs = {m: list(found) for m, found in itertools.groupby(names, key=seeds.method_of)}
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
        from smoe_fairseq.analysis.paper import system_cost

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
    said = "sacreBLEU" if metric == scores.BLEU else f"sacreBLEU's {metric}"
    notes = [f"{name}: {said} {signature}" for signature in signatures]
    if missing:
        notes.append(
            f"{name}: {len(there)} of {len(dataset.directions)} directions are scored, "
            "averages over missing ones are left out"
        )
    if len(signatures) > 1:
        notes.append(f"{name}: scores of different sacreBLEU signatures are not averaged")
    return notes
