"""The tables of a study's report, except the one of statements."""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from smoe_fairseq.recipes.compare.grid import MISSING, Grid, number
from smoe_fairseq.recipes.compare.statements import measures_of
from smoe_fairseq.recipes.compare.statistics import spearman
from smoe_fairseq.recipes.compare.table import average, columns
from smoe_fairseq.recipes.datasets import Dataset
from smoe_fairseq.recipes.evaluation.scores import CHRF, mean_of
from smoe_fairseq.recipes.study.results import Result, Systems, means


def systems_table(
    dataset: Dataset, systems: Systems, costs: Mapping[str, Sequence[float | None]]
) -> Grid:
    """Size, cost, loss and scores of each system; ``costs``: parameters and FLOPs per token, in millions."""
    timed = (r.about["machine"] for results in systems.values() for r in results if r.time)
    machines = list(dict.fromkeys(timed)) or [""]
    rows, measures = [], measures_of(dataset)
    for method, results in systems.items():
        parameters, flops = costs[method]
        times = [[r.time for r in results if r.time and r.about["machine"] == m] for m in machines]
        updates = {result.about["updates"] for result in results}
        row = [method, number(parameters, 1), number(flops, 1)]
        row += [number(1e6 * statistics.fmean(t) if t else None, 0) for t in times]
        row += [_seeds(results), " ".join(f"{u:,}" for u in sorted(updates))]
        for measure in measures.values():
            values = [measure.of(result) for result in results]
            mean = number(statistics.fmean(values), measure.digits)
            if len(values) > 1:
                mean += f" ± {number(float(np.std(values, ddof=1)), measure.digits)}"
            row.append(mean)
        lengths = [mean_of(r.scores, lambda score: score.length_ratio) for r in results]
        rows.append([*row, number(statistics.fmean(lengths))])
    time = "time/token (us)"
    times = [f"{time}, {machine}" if len(machines) > 1 else time for machine in machines]
    header = ["method", "parameters (M)", "FLOPs/token (M)", *times, "seeds", "updates"]
    notes = [
        "- **FLOPs** are those of a forward pass per target token. Models with strata are counted at the "
        "requested capacity of the test set's text, and gates that learn how many experts a token has at "
        "the experts per token of training. For the others, the copies that an expert had no room for "
        "count too, as in the paper.",
        "- **Time** is that of a whole update per target token (the median).",
        "- **loss** is the lowest validation loss of a run, in bits per target token. **chrF++** and "
        "**BLEU** are means over the directions. **Length** is that of the translations relative to the "
        "references. A row has the mean and the standard deviation over its seeds.",
    ]
    return Grid([*header, *measures, "length"], rows, notes)


def _seeds(results: Sequence[Result]) -> str:
    return " ".join(str(result.seed) for result in results)


def directions_table(dataset: Dataset, systems: Systems) -> Grid:
    """BLEU by direction."""
    first = next(iter(systems.values()))[0]
    rows = []
    for method, results in systems.items():
        scored = [{**r.scores, **r.kept} for r in results]
        each = (statistics.fmean(s[d].bleu for s in scored) for d in (*first.scores, *first.kept))
        rows.append([method, _seeds(results), *map(number, each)])
    signatures = {s.signature for rs in systems.values() for r in rs for s in r.scores.values()}
    notes = [f"sacreBLEU {signature}" for signature in sorted(signatures)]
    return Grid(["method", "seeds", *first.scores, *first.kept], rows, notes)


def by_class(dataset: Dataset, systems: Systems) -> Grid:
    """chrF++ into and out of English, by classes of languages."""
    scored = next(iter(systems.values()))[0].scores
    parts = columns(dataset, tuple(d for d in dataset.directions if d in scored))
    rows = []
    for method, results in systems.items():
        each = ([average(result.scores, c, CHRF) for result in results] for c in parts)
        cells = (number(None if None in v else statistics.fmean(v)) for v in each)
        rows.append([method, str(len(results)), *cells])
    classes = "; ".join(f"{name}: {', '.join(langs)}" for name, langs in dataset.classes.items())
    notes = [f"chrF++, means over the directions of a class and over seeds. {classes}."]
    return Grid(["method", "seeds", *(column.name for column in parts)], rows, notes)


def capacity_table(dataset: Dataset, systems: Systems) -> Grid:
    """Whether seeds agree on requested capacity, for each system with strata."""
    rows = []
    for method, results in systems.items():
        routings = [result.routing for result in results if result.routing]
        if not routings:
            continue
        decoders = [_values(routing["requested_capacity"], "decoder") for routing in routings]
        targets = [means((d.split("-")[-1], v) for d, _, v in each) for each in decoders]
        alike = [
            spearman(*(np.array([each[t] for t in first]) for each in (first, second)))
            for first, second in itertools.combinations(targets, 2)
            if first.keys() == second.keys() and len(first) > 2
        ]
        low, high = (number(f(alike) if alike else None, sign=True) for f in (min, max))
        middle = number(statistics.fmean(alike) if alike else None, sign=True)
        row = [method, str(len(routings)), f"{middle} ({low} to {high})" if alike else MISSING]
        for kept in (False, True) if dataset.keep else ():
            each = [v for of in decoders for d, _, v in of if (d in results[0].kept) == kept]
            row.append(number(statistics.fmean(each) if each else None, 3))
        for side in ("encoder", "decoder"):
            each = [_values(routing["rank_correlation"], side) for routing in routings]
            row.append(_count(statistics.fmean(v for *_, v in of) > 0 for of in each if of))
        encoders = [_values(routing["requested_capacity"], "encoder") for routing in routings]
        layers = [list(means((layer, v) for _, layer, v in each).values()) for each in encoders]
        layers = [of for of in layers if len(of) > 1]
        first = _count(of[0] > statistics.fmean(of[1:]) for of in layers)
        rows.append([*row, first if layers else MISSING])
    header = ["method", "seeds", "target languages: rank correlation between seeds"]
    if dataset.keep:
        header += ["decoder: trained directions", "kept directions"]
    header += ["rare tokens request more (encoder), seeds", "(decoder), seeds"]
    notes = [
        "Of the decoder's requested capacity by target language: the mean rank correlation between two "
        "seeds, with the lowest and the highest. By token type: in how many seeds rarer tokens request more. "
        "Of the encoder's first MoE layer: in how many seeds it requests more than the later ones."
    ]
    return Grid([*header, "first layer requests most, seeds"], rows, notes)


def _values(routing: dict, side: str) -> list[tuple[str, int, float]]:
    """Direction, layer and value of all layers of a side."""
    values = ((d, *key.split("."), v) for d, layers in routing.items() for key, v in layers.items())
    return [(d, int(n), v) for d, s, n, v in values if s == side and not math.isnan(v)]


def _count(values: Iterable[bool]) -> str:
    values = list(values)
    return f"{sum(values)} of {len(values)}"


def runs_table(systems: Systems) -> Grid:
    """How each run was made."""
    rows = []
    for result in itertools.chain(*systems.values()):
        about, machine = result.about, result.about["machine"]
        if untimed := about.get("untimed"):  # also added to the file by hand
            machine += f" (times left out: {untimed})"
        versions = ", ".join(f"{name} {v}" for name, v in about["versions"].items())
        rows.append([result.name, about["commit"], versions, machine, about["command"]])
    header = ["run", "commit", "versions", "machine", "command"]
    return Grid(header, rows, texts=len(header))
