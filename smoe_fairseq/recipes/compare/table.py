"""``smoe table``: the scores of a data set's runs next to the paper's."""

import itertools
import math
import re
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from smoe_fairseq.errors import UsageError, quietly
from smoe_fairseq.forms import read_json
from smoe_fairseq.languages import code_of
from smoe_fairseq.recipes.compare.grid import FORMATS, Grid, not_trained, number
from smoe_fairseq.recipes.datasets import Dataset
from smoe_fairseq.recipes.evaluation import metrics, scores
from smoe_fairseq.recipes.evaluation.evaluate import again, state_notes
from smoe_fairseq.recipes.folders import SIZES, Folders, run_method, runs_of, vocab_size
from smoe_fairseq.recipes.methods import method_flags, tables
from smoe_fairseq.recipes.processes import warn
from smoe_fairseq.recipes.training import identity

Scores = dict[str, scores.Score]


@dataclass(frozen=True)
class Column:
    """An average over directions; None if they are not known."""

    name: str
    directions: tuple[str, ...] | None


def columns(dataset: Dataset, tested: tuple[str, ...]) -> list[Column]:
    """The ``tested`` directions or averages over classes of languages, in the paper's order; the mean."""
    if classes := dataset.classes or resource_classes(dataset):
        parts = _by_class(dataset, classes, tested)
    else:
        parts = [Column(direction, (direction,)) for direction in tested]
    kept = [Column(not_trained(kept), (kept,)) for kept in dataset.kept_directions]
    return [*parts, Column("average", tested), *kept]


def resource_classes(dataset: Dataset) -> dict[str, list[str] | None]:
    """The languages in each class of the paper's table, which is a range of training sentence pairs.

    None for each class if no sizes are known; empty if the table has no classes.
    """
    content = tables().get(dataset.name, {})
    classes = content.get("classes", {})
    sizes = content.get("sizes") or (classes and _training_sizes(dataset))
    if sizes is None:
        return dict.fromkeys(classes)

    def languages(least: float = 0, most: float = math.inf) -> list[str]:
        return [language for language, size in sizes.items() if least <= size <= most]

    return {name: languages(**bounds) for name, bounds in classes.items()}


def _training_sizes(dataset: Dataset) -> dict[str, int] | None:
    """Training sentence pairs by language, as counted by prepare.sh; None before that."""
    path = Folders(dataset).data / SIZES
    if not path.exists():
        return None
    sizes = read_json(path, {str: int})
    by_language = Counter()
    for pair in dataset.pairs:
        first, second = pair.split("-")
        language = first if second == dataset.hub else second
        size = sizes.get(pair)
        if size is None:
            raise UsageError(f"{path} has no size for {pair}: prepare the data again")
        by_language[language] += size
    return by_language


def _by_class(
    dataset: Dataset, classes: Mapping[str, Sequence[str] | None], tested: Sequence[str]
) -> list[Column]:
    hub = "eng" if code_of(dataset.hub) == "en" else dataset.hub  # as in the paper's table
    parts = []
    for side, position in ((f"{hub}-xxx", 0), (f"xxx-{hub}", 1)):
        both = ((d, d.split("-")) for d in tested)
        other = {d: langs[1 - position] for d, langs in both if langs[position] == dataset.hub}
        parts.append(Column(f"{side} all", tuple(other)))
        for name, languages in classes.items():
            chosen = None if languages is None else tuple(d for d in other if other[d] in languages)
            parts.append(Column(f"{side} {name}", chosen))
    without = (d for d in tested if dataset.hub not in d.split("-"))
    return [*parts, *(Column(direction, (direction,)) for direction in without)]


def print_table(dataset: Dataset, format: str, metric: str, compare: Sequence[str] | None) -> None:
    """Print the table of a data set, or the comparison of two of its methods or runs."""
    known = {name.lower(): name for name in (*scores.METRICS, *dataset.metrics)}
    if metric.lower() not in known and not compare:  # chrF3, by the data set's `sacrebleu`
        runs = (scores.read(Folders(dataset).runs / name) for name in runs_of(dataset))
        known |= {n.lower(): n for run in runs for score in run.values() for n in score.others}
    if metric.lower() not in known:
        raise UsageError(f"--metric {metric}: expected one of {', '.join(known)}")
    metric = known[metric.lower()]
    if compare:
        # sacreBLEU is slow to import.
        from smoe_fairseq.recipes.compare.comparison import comparison

        grid = comparison(dataset, *compare, metric)
    else:
        grid = side_by_side(dataset, metric)
    if format == "markdown":
        print(f"{metric} on the test set:\n")
    print(FORMATS[format](grid))
    if format == "csv":
        print("\n".join(grid.notes), file=sys.stderr)


def side_by_side(dataset: Dataset, metric: str) -> Grid:
    """A row for each method; for BLEU of the paper's systems, also the paper's numbers and the difference.

    Several seeds give a mean and a standard deviation. An average is missing if one of its directions is
    missing, or if signatures differ within a run or between seeds.
    """
    folder = Folders(dataset).runs
    names = runs_of(dataset)
    if not names:
        raise UsageError(f"{folder} holds no runs: run scripts/train.sh {dataset.name} METHOD")
    table = tables().get(dataset.name, {})
    paper = table.get("rows", {}) if metric == scores.BLEU else {}
    runs = {m: list(group) for m, group in itertools.groupby(names, key=run_method)}
    methods = [*(m for m in paper if m in runs), *(m for m in runs if m not in paper)]
    tests = scores.test_checksums(dataset, dataset.all_directions)
    parts = columns(dataset, _tested(dataset, tests))

    rows, notes = [], []
    for name in methods:
        results = {run: scores.read(folder / run) for run in runs[name]}
        scored = {run: result for run, result in results.items() if result} or results
        if mixed := {*scores.different_signatures(*scored.values(), metric=metric)}:
            notes.append(f"{name}: seeds with different sacreBLEU signatures are not averaged")
        searches = {scores.other_search(dataset, folder / run) for run in scored}
        starts = {identity.start_of(folder / run) for run in scored}
        for kind, found in (("checkpoints or searches", searches), ("pretrained models", starts)):
            if len(found) > 1:
                notes.append(f"{name}: seeds with different {kind} are not averaged")
                mixed = {*dataset.all_directions}
        usable = [Column(c.name, None) if mixed & {*(c.directions or ())} else c for c in parts]
        each = [[average(result, c, metric) for c in usable] for result in scored.values()]
        bleu = [_over_seeds(statistics.fmean, values) for values in zip(*each, strict=True)]
        records = {run: identity.record(folder / run) for run in scored}
        notes += [f"{name}: {each}" for each in identity.differing(records) if len(records) > 1]
        cost = system_costs(dataset, name, flags=next(iter(records.values())).get("flags"))
        count = f", mean of {len(scored)} seeds" if len(scored) > 1 else ""
        label = [name, f"ours{count}"] if paper else [f"{name}{count}"]
        rows.append([*label, *_cells(cost, bleu)])
        if count:
            spread = [_over_seeds(statistics.stdev, values) for values in zip(*each, strict=True)]
            label = [name, "standard deviation"] if paper else [f"{name}, standard deviation"]
            rows.append([*label, *_cells([None, None], spread)])
        if paper:
            printed = paper.get(name, {})
            paper_cost = [printed.get("parameters"), printed.get("flops_per_token")]
            by_name = dict(zip(table["columns"], printed.get("bleu", []), strict=False))
            paper_bleu = [by_name.get(column.name) for column in parts]
            rows.append([name, "paper", *_cells(paper_cost, paper_bleu, digits=0)])
            less = _cells(_differences(cost, paper_cost), _differences(bleu, paper_bleu), sign=True)
            rows.append([name, "difference", *less])
        for run, result in results.items():
            notes += _notes(dataset, run, result, metric, tests)
            notes += scores.search_notes(dataset, run)
    if any(column.directions is None for column in parts):
        path = Folders(dataset).data / SIZES
        notes.append(f"{path} is missing: run scripts/prepare.sh {dataset.name} for the classes")
    texts = ["method", *(["source"] if paper else [])]
    costs = ["parameters (M)", "FLOPs/token (M)"]
    return Grid([*texts, *costs, *(c.name for c in parts)], rows, notes, texts=len(texts))


def average(result: Scores, column: Column, metric: str = scores.BLEU) -> float | None:
    """In points; None if a direction is missing, or signatures differ (except by languages' tokenizers)."""
    all_points = scores.points(result, metric)
    points = [all_points.get(direction) for direction in column.directions or ()]
    if not points or None in points or not _are_comparable(dict(zip(column.directions, points))):
        return None
    return statistics.fmean(value for value, _ in points)


def _are_comparable(points: Mapping[str, tuple[float, str]]) -> bool:
    """Whether the signatures differ at most in the languages' default tokenizers."""
    signatures = {direction: signature for direction, (_, signature) in points.items()}

    def usual(direction: str) -> str:
        return metrics.tokenizer_of({"tokenize": metrics.AUTO}, direction.split("-")[1])

    # The signature of a tokenizer by MeCab has the versions of it and of its dictionary.
    pairs = signatures.items()
    kinds = {re.sub(rf"tok:{re.escape(usual(d))}[^|]*", "tok:auto", s) for d, s in pairs}
    return len(set(signatures.values())) <= 1 or len(kinds) == 1


def _over_seeds(function, values: Sequence[float | None]) -> float | None:
    """A function of the runs' values; None if a run has no value."""
    return None if None in values else function(values)


def system_costs(dataset: Dataset, method: str, **known) -> list[float | None]:
    """Parameters and FLOPs per token, in millions; ``known`` are further arguments of `system_cost`.

    None if the folder is not named after a method, or the model cannot be built.
    """
    try:
        method_flags(method, dataset)
    except UsageError:  # another folder, such as a copy
        return [None, None]
    with quietly():
        from smoe_fairseq.recipes.cost import system_cost  # imports fairseq

        try:
            size = known.pop("vocabulary", None) or vocab_size(dataset)
            cost = system_cost(dataset, method, size, **known)
        except (UsageError, ValueError) as error:  # refused in training, too, which left its folder
            warn(f"{Folders(dataset).runs / method} has no cost: {error}")
            return [None, None]
    return [cost.parameters / 1e6, cost.flops_per_token / 1e6]


def _differences(ours: Sequence[float | None], paper: Sequence[float | None]) -> list[float | None]:
    return [None if a is None or b is None else a - b for a, b in zip(ours, paper, strict=True)]


def _cells(cost, bleu, digits: int = 1, sign: bool = False) -> list[str]:
    return [*(number(n, digits, sign) for n in cost), *(number(n, 2, sign) for n in bleu)]


def _tested(dataset: Dataset, tests: Mapping[str, str]) -> tuple[str, ...]:
    """The directions that have a test set; all of them where no text is."""
    return tuple(d for d in dataset.directions if d in tests) or dataset.directions


def _notes(
    dataset: Dataset, name: str, result: Scores, metric: str, tests: Mapping[str, str]
) -> list[str]:
    """How a run was scored, and why averages are missing; ``tests`` are `scores.test_checksums`."""
    points = scores.points(result, metric)
    tested = _tested(dataset, tests)
    missing = [d for d in tested if d not in points]
    signatures = sorted({signature for _, signature in points.values()})
    notes = [f"{name}: {scores.label(metric)} {signature}" for signature in signatures]
    notes += state_notes(dataset, name)
    advice = again(dataset, name)
    if result and not points:
        download = f"python -P -m smoe_fairseq.recipes tokenizer {scores.SPBLEU_TOKENIZER}"
        rest = {
            scores.COMET: " --comet comet-score",
            scores.SPBLEU: f", after {download}",
            scores.CHRF: f", with `sacrebleu: {{chrf-word-order: 2, chrf-beta: 2}}` in {dataset.file}",
            "TER": f", with `sacrebleu: {{metrics: [bleu, chrf, ter]}}` in {dataset.file}",
            "chrF": f", with `sacrebleu: {{chrf-word-order: 0}}` in {dataset.file}",
        }
        notes.append(f"{name}: was scored without {metric}: {advice}{rest.get(metric, '')}")
    elif missing:
        scored = f"{len(tested) - len(missing)} of {len(tested)} directions are scored"
        notes.append(f"{name}: {scored}, averages over missing ones are left out: {advice}")
    if different := scores.different_tests(result, now=tests):
        texts = f"another test set than that in {Folders(dataset).raw} ({', '.join(different)})"
        notes.append(f"{name}: was scored on {texts}: {advice}")
    averaged = {d: points[d] for d in tested if d in points}
    if not _are_comparable(averaged):
        notes.append(f"{name}: scores of different sacreBLEU signatures are not averaged")
    elif len({signature for _, signature in averaged.values()}) > 1:
        notes.append(f"{name}: averages are over directions with different tokenizers")
    return notes


def print_methods(dataset: Dataset) -> None:
    """Print the systems of the paper's table, else those of the study, for scripts/slurm_table.sh."""
    methods = list(tables().get(dataset.name, {}).get("rows", {})) or dataset.study
    if not methods:
        raise UsageError(f"{dataset.name} has no table: name the methods behind it")
    print("\n".join(methods))
