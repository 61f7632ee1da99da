"""The tables of a study's report, except those of its claims."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes.config import Dataset, method_flags
from smoe_fairseq.recipes.evaluation.comparison import chance, spearman
from smoe_fairseq.recipes.evaluation.grid import MISSING, Grid, number
from smoe_fairseq.recipes.evaluation.scores import CHRF, mean_of
from smoe_fairseq.recipes.evaluation.table import average, columns
from smoe_fairseq.recipes.folders import method_of, seed_in
from smoe_fairseq.recipes.study.claims import Measure
from smoe_fairseq.recipes.study.results import Result, Systems, by_seed

ALIKE = 0.52  # critical rank correlation of fifteen languages: two-sided, p = 0.05
UPDATES = "updates"
Groups = Sequence[Systems]  # as `results.groups` returns them


def systems_table(
    dataset: Dataset,
    systems: Systems,
    beside: Groups,
    costs: Mapping[str, Sequence[float | None]],
    baseline: str,
) -> Grid:
    """Size, cost, loss and BLEU of each system.

    Args:
        beside: the same systems in groups.
        costs: by method, parameters and FLOPs per token in millions.
    """
    timed = (r.machine for results in systems.values() for r in results if r.time)
    machines = list(dict.fromkeys(timed)) or [""]
    bleu, losses = Measure(systems, "BLEU"), Measure(systems, "loss")
    rows = []
    for group, method, results in _rows(beside):
        parameters, flops = costs[method]
        times = [[r.time for r in results if r.time and r.machine == m] for m in machines]
        updates = {result.about["updates"] for result in results}
        row = [method, number(parameters, 1), number(flops, 1)]
        row += [number(1e6 * statistics.fmean(t) if t else None, 0) for t in times]
        row += [_seeds(dataset, results), " ".join(f"{u:,}" for u in sorted(updates))]
        for measure in (losses, bleu):
            values = [measure.of(result) for result in results]
            mean = number(statistics.fmean(values), measure.digits)
            if len(values) > 1:
                mean += f" ± {number(float(np.std(values, ddof=1)), measure.digits)}"
            less = None if method == baseline else measure.less(method, baseline, group)
            row += [mean, measure.cell(less)]
        rows.append(row)
    time = "time/token (us)"
    of_machines = [f"{time}, {machine}" if len(machines) > 1 else time for machine in machines]
    header = ["method", "parameters (M)", "FLOPs/token (M)", *of_machines, "seeds", "updates"]
    header += ["validation loss", f"less {baseline}'s", "BLEU", f"less {baseline}'s"]
    notes = [
        "- **FLOPs** are those of a forward pass per target token. Models with strata are counted at the "
        "requested capacity of the test set's text, and gates that learn how many experts a token has at "
        "the experts per token of training. For the others, the copies that an expert had no room for "
        "count too, as in the paper.",
        "- **Time** is that of a whole update per target token (the median).",
        "- **Validation loss** is the lowest of a run, in bits per target token. **BLEU** is the mean over "
        "the directions. A row has the mean and the standard deviation over its seeds.",
        f"- **less {baseline}'s**: the difference over the seeds that both have, with its 95 percent "
        "interval (explained below the claims).",
        "- Below the study's own systems are others, and seeds that few systems have, beside the baseline "
        "of the same seeds.",
    ]
    return Grid(header, rows, notes)


def _rows(beside: Groups) -> Iterator[tuple[Systems, str, Sequence[Result]]]:
    for group in beside:
        for method, results in group.items():
            yield group, method, results


def _seeds(dataset: Dataset, results: Sequence[Result]) -> str:
    return " ".join(str(seed_in(result.name, dataset)) for result in results)


def directions_table(dataset: Dataset, beside: Groups) -> Grid:
    """BLEU by direction."""
    directions = list(next(iter(beside[0].values()))[0].scores)
    rows = [
        [method, _seeds(dataset, results)]
        + [number(statistics.fmean(r.scores[d].bleu for r in results)) for d in directions]
        for _, method, results in _rows(beside)
    ]
    signatures = {s.signature for _, _, rs in _rows(beside) for r in rs for s in r.scores.values()}
    notes = [f"sacreBLEU {signature}" for signature in sorted(signatures)]
    return Grid(["method", "seeds", *directions], rows, notes)


def equal_cost_table(systems: Systems, flops: Mapping[str, float], baseline: str) -> Grid:
    """Losses beside the baseline's at equal FLOPs and at equal time.

    Args:
        flops: by method, of a forward pass, per target token.
    """
    of_flops = _costs_and_losses(systems, baseline, lambda r: flops.get(method_of(r.name)))
    of_time = _costs_and_losses(systems, baseline, lambda r: r.time or None, same_machine=True)
    rows = [
        [method, *_equal_cost(of_flops, method), *_equal_cost(of_time, method)]
        for method in systems
        if method in of_flops | of_time
    ]
    header = ["method", "FLOPs/token", "loss at equal FLOPs", "time/token", "loss at equal time"]
    notes = [
        f"Compared with {baseline}, over the seeds that both have: how much more a token costs, and the "
        "difference between the lowest losses (bits per token; below zero is better) when both had cost as "
        "much as the one that ends first. Between validations, the loss is interpolated linearly in the "
        "logarithm of the cost. Times are compared only between runs of one machine."
    ]
    return Grid(header, rows, notes)


Cost = Callable[[Result], float | None]  # per target token


def _costs_and_losses(
    systems: Systems, baseline: str, cost: Cost, same_machine: bool = False
) -> dict[str, dict[int | None, tuple[float, float]]]:
    """By method and seed: cost per token over the baseline's, and loss less the baseline's."""
    of_baseline = {result.seed: result for result in systems.get(baseline, ()) if cost(result)}
    found: dict[str, dict] = {}
    for method, results in systems.items():
        for r in results if method != baseline else ():
            b = of_baseline.get(r.seed)
            if not b or not cost(r) or not r.logged or not b.logged:
                continue
            if same_machine and r.machine != b.machine:
                continue
            apart = _loss_difference(r, b, cost)
            if apart is not None:
                found.setdefault(method, {})[r.seed] = (cost(r) / cost(b), apart)
    return found


def _loss_difference(result: Result, other: Result, cost: Cost) -> float | None:
    """The difference in loss at the lower of both final costs; None if it is before a first validation."""
    curves = [
        (cost(r) * each["words"], np.fmin.accumulate(each["loss"]))
        for r, each in ((r, r.validated()) for r in (result, other))
    ]
    end = min(costs[-1] for costs, _ in curves)
    if any(end < costs[0] for costs, _ in curves):
        return None
    here, there = (np.interp(math.log(end), np.log(costs), losses) for costs, losses in curves)
    return float(here - there)


def _equal_cost(found: Mapping[str, Mapping], method: str) -> list[str]:
    """How much more a token costs, and the difference in loss with its interval.

    All differences of a seed contain the baseline's run, which `chance` counts as the seed's effect.
    """
    if method not in found:
        return [MISSING, MISSING]
    apart = {m: {seed: a for seed, (_, a) in seeds.items()} for m, seeds in found.items()}
    more = math.exp(statistics.fmean(math.log(ratio) for ratio, _ in found[method].values())) - 1
    return [f"{more:+.0%}", f"{chance(apart).around(list(apart[method].values())):+.3f}"]


def other_measures(systems: Systems, baseline: str) -> Grid:
    """A row for each system: chrF++, and BLEU without its penalty for short translations."""
    measures = {name: Measure(systems, name) for name in ("chrF++", "BLEU without penalty")}
    lengths = by_seed(systems, lambda r: mean_of(r.scores, lambda score: score.length_ratio))
    rows = []
    for method, results in systems.items():
        row = [method, str(len(results))]
        for measure in measures.values():
            less = None if method == baseline else measure.less(method, baseline)
            row += [_mean(measure.points[method]), measure.cell(less)]
        rows.append([*row, _mean(lengths[method])])
    header = ["method", "seeds"]
    for name in measures:
        header += [name, f"less {baseline}'s"]
    notes = [
        "Means are over directions and a system's seeds, differences over the seeds that both have. Rows "
        "have different seeds, so compare systems by the differences. BLEU has a penalty for translations "
        "that are shorter than the references; without it, a run that happens to end sentences early "
        "loses nothing. Length is that of the translations over that of the references."
    ]
    return Grid([*header, "length"], rows, notes)


def _mean(points: Mapping[int | None, float]) -> str:
    return f"{sum(points.values()) / len(points):.2f}"


def by_class(dataset: Dataset, systems: Systems) -> Grid:
    """chrF++ into and out of English, by classes of languages with much, some and little text."""
    found = columns(dataset)
    rows = []
    for method, results in systems.items():
        cells = []
        for column in found:
            values = [average(result.scores, column, CHRF) for result in results]
            cells.append(number(None if None in values else statistics.fmean(values)))
        rows.append([method, str(len(results)), *cells])
    classes = "; ".join(f"{name}: {', '.join(found)}" for name, found in dataset.classes.items())
    notes = [f"chrF++, means over the directions of a class and over seeds. {classes}."]
    return Grid(["method", "seeds", *(column.name for column in found)], rows, notes)


def by_target(dataset: Dataset, systems: Systems) -> Grid:
    """The decoder's requested capacity by target language, from the first language, for every run."""
    rows, notes = [], []
    source, *targets = dataset.languages
    for method, results in systems.items():
        requested = {r.name: found for r in results if (found := _requested(r, source))}
        for name, of_run in requested.items():
            seed = str(seed_in(name, dataset))
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
    found = {}
    for direction, layers in result.routing["requested_capacity"].items() if result.routing else ():
        first, target = direction.split("-")
        values = [value for name, value in layers.items() if name.startswith("decoder.")]
        if first == source and values:
            found[target] = statistics.fmean(values)
    return found


def runs_table(dataset: Dataset, systems: Systems) -> Grid:
    """How each run was made, with notes on missing runs and on runs that were trained differently."""
    rows = []
    results = [result for of_method in systems.values() for result in of_method]
    for result in results:
        about, machine = result.about, result.machine
        if result.untimed:
            machine += f" (times left out: {result.untimed})"
        versions = ", ".join(f"{name} {v}" for name, v in about["versions"].items())
        rows.append([result.name, about["commit"], versions, machine, about["command"]])
    notes = _missing_runs(dataset, [result.name for result in results]) + unlike(dataset, results)
    header = ["run", "commit", "versions", "machine", "command"]
    return Grid(header, rows, notes, texts=len(header))


def _missing_runs(dataset: Dataset, names: Sequence[str]) -> list[str]:
    """Notes on the study's systems that lack a seed that others have."""
    notes, absent = [], []
    for suffix in sorted({name.removeprefix(method_of(name)) for name in names}):
        of_seed = [method + suffix for method in dataset.study]
        there = [name for name in of_seed if name in names]
        if 2 * len(there) >= len(of_seed):
            absent += [name for name in of_seed if name not in names]
        elif there:
            notes.append(f"The study's other systems do not have the seed of {', '.join(there)}.")
    if absent:
        notes.append(f"Not there, since they failed or are to be made: {', '.join(absent)}.")
    return notes


def unlike(dataset: Dataset, results: Sequence[Result]) -> list[str]:
    """A sentence for each difference of a run from most others: in updates, or in a flag no method sets."""
    of_methods = {flag for result in results for flag in _set_flags(dataset, result)} | {"--seed"}
    runs = {
        r.name: {**r.about["flags"], UPDATES: f"{r.about['updates']:,}"}
        for r in results
        if "flags" in r.about
    }
    flags = dict.fromkeys(flag for settings in runs.values() for flag in settings)
    usual = {
        flag: Counter(settings.get(flag) for settings in runs.values()).most_common(1)[0][0]
        for flag in flags
        if flag not in of_methods
    }
    return [
        f"Not trained as most were: {name}, {_setting(flag, settings.get(flag))}, not {_setting(flag, most)}."
        for name, settings in runs.items()
        for flag, most in usual.items()
        if settings.get(flag) != most
    ]


def _set_flags(dataset: Dataset, result: Result) -> set[str]:
    try:
        return {f"--{flag}" for flag in method_flags(method_of(result.name), dataset)}
    except UsageError:  # a folder that is not named after a method, such as a copy
        return set()


def _setting(flag: str, value: str | None) -> str:
    if flag == UPDATES:
        return f"{value} updates"
    return f"without {flag}" if value is None else f"with {flag} {value}".strip()
