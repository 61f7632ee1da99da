"""Comparison of two systems (``--compare``): bootstrap over sentences, tests and intervals over seeds."""

import hashlib
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from smoe_fairseq.errors import UsageError, quietly
from smoe_fairseq.files import read_plain
from smoe_fairseq.recipes.compare.grid import Grid, not_trained, number
from smoe_fairseq.recipes.compare.statistics import (
    PERMUTATIONS,
    SAMPLES,
    in_words,
    mean_p_value,
    p_value,
    permutation_p,
)
from smoe_fairseq.recipes.datasets import Dataset
from smoe_fairseq.recipes.evaluation import scores
from smoe_fairseq.recipes.evaluation.evaluate import again, outdated_notes
from smoe_fairseq.recipes.evaluation.external import numbers_of_lines
from smoe_fairseq.recipes.evaluation.metrics import flags_for, metrics_of, parsed
from smoe_fairseq.recipes.folders import Folders, run_method, run_seed, runs_of, test_file
from smoe_fairseq.recipes.methods import method_flags
from smoe_fairseq.recipes.training import identity

FEW = 100  # test sentences, of which p-values are unreliable


def comparison(dataset: Dataset, first: str, second: str, metric: str = scores.BLEU) -> Grid:
    """By direction, the means over seeds, their difference, and p-values.

    ``first`` and ``second`` are methods, with all seeds that are scored, or runs (``moe.seed-2``).
    "p (sentences)" is from sacreBLEU's paired bootstrap, which draws a sentence with its translations of all
    seeds; "p (seeds)" is from an exact permutation test over the runs.

    Raises:
        UsageError: one is not scored, they have no common direction, or signatures or test sets differ.
    """
    if first == second:
        raise UsageError(f"--compare {first} {second}: expected two different methods")
    systems = {name: _System(dataset, name, metric) for name in (first, second)}
    one, other = systems.values()
    common = _common_directions(dataset, systems)
    several = len(one.runs) + len(other.runs) > 2
    by_direction = scores.signatures(*one.runs.values(), *other.runs.values(), metric=metric)
    rows, signatures = [], set()
    for direction in dataset.all_directions:
        name = direction if direction in dataset.directions else not_trained(direction)
        if direction not in common:
            rows.append([name, *(number(None) for _ in range(4 + several))])
            continue
        if len(kinds := by_direction[direction]) > 1:
            both = f"{first} and {second} were scored differently on {direction}"
            raise UsageError(f"{both} ({' and '.join(sorted(kinds))}): evaluate both again")
        signatures |= kinds
        points = [system.points([direction]) for system in systems.values()]
        p = _bootstrap(dataset, direction, one, other, metric, points)
        rows.append([name, *_row(points, p)])
        if several:
            rows[-1].append(number(permutation_p(*points), digits=4))
    names = [f"{name}, mean of {len(s.runs)}" if several else name for name, s in systems.items()]
    header = ["direction", *names, "difference", "p (sentences)" if several else "p"]
    notes = []
    for run, scored in (one.runs | other.runs).items():
        if odd := [d for d in common if scored[d].has_odd_length]:
            how = "endless or cut short, so that the difference says little"
            notes.append(f"{run}: the translations of {', '.join(odd)} seem {how}")
    notes.append(
        f"paired bootstrap, {SAMPLES} samples: the difference is significant where p < 0.05; "
        "it has no p where it is 0.00"
    )
    if several:
        header.append("p (seeds)")
        trained = [direction for direction in common if direction in dataset.directions]
        points = [system.points(trained) for system in systems.values()]
        average = ["average", *_row(points, None), number(permutation_p(*points), digits=4)]
        rows.insert(len(dataset.directions), average)
        notes += [f"{name}: {', '.join(system.runs)}" for name, system in systems.items()]
        notes.append(_smallest_p_note(*points))
        notes += _paired_note(systems.values(), points)
    notes += [f"{scores.label(metric)} {signature}" for signature in sorted(signatures)]
    notes += _settings_notes(dataset, [*one.runs, *other.runs])
    counts = {d: len(scores.lines_of(test_file(dataset, d, d.split("-")[1]))) for d in common}
    if few := [f"{count} of {d}" for d, count in counts.items() if count < FEW]:
        notes.append(f"p is unreliable for so few test sentences ({', '.join(few)})")
    for run in (*one.runs, *other.runs):
        notes += [*outdated_notes(dataset, run), *scores.search_notes(dataset, run)]
    return Grid(header, rows, notes)


def _common_directions(dataset: Dataset, systems: Mapping[str, "_System"]) -> list[str]:
    """The directions that both systems have; raises UsageError if they cannot be compared."""
    (first, one), (second, other) = systems.items()
    if shared := sorted({*one.runs} & {*other.runs}):
        raise UsageError(f"--compare {first} {second}: both have {', '.join(shared)}")
    if (binary := Folders(dataset).binary).exists():
        for run in (*one.runs, *other.runs):
            folder = Folders(dataset).runs / run
            identity.check(folder, run_method(run), run_seed(run, dataset), binary)
    common = [d for d in dataset.all_directions if one.has(d) and other.has(d)]
    if not {*common} & {*dataset.directions}:
        runs = ", ".join([*one.runs, *other.runs])
        advice = f"run scripts/evaluate.sh {dataset.name} for each of them"
        raise UsageError(f"no direction is scored in all of {runs}: {advice}")
    now = scores.test_checksums(dataset, common)
    if different := scores.different_tests(*one.runs.values(), *other.runs.values(), now=now):
        texts = f"another test set than that in {Folders(dataset).raw}"
        scored = f"{first} or {second} was scored on {texts} ({', '.join(different)})"
        raise UsageError(f"{scored}: run scripts/evaluate.sh {dataset.name} for both again")
    return common


def _settings_notes(dataset: Dataset, runs: Sequence[str]) -> list[str]:
    """A note on settings of training and search in which runs differ, but for those of their methods."""
    own, folder = set(), Folders(dataset).runs
    records, found = {run: identity.record(folder / run) for run in runs}, []
    for method in dict.fromkeys(map(run_method, runs)):
        alike = {run: each for run, each in records.items() if run_method(run) == method}
        found += identity.differing(alike) if len(alike) > 1 else []
        with suppress(UsageError):  # another folder, such as a copy
            own |= {f"--{flag}" for flag in method_flags(method, dataset)}
    found = [*dict.fromkeys([*found, *identity.differing(records, left_out=own)])]
    searches = {scores.other_search(dataset, folder / run) for run in runs}
    found += ["flags of the search"] * (len(searches) > 1)
    return [f"not only the methods differ: {'; '.join(found)}"] if found else []


class _System:
    """The scored runs of a method, or one run."""

    def __init__(self, dataset: Dataset, name: str, metric: str):
        self.metric, self.folder = metric, Folders(dataset).runs
        runs = [run for run in runs_of(dataset) if name in (run, run_method(run))]
        self.runs = {run: result for run in runs if (result := scores.read(self.folder / run))}
        if not self.runs:
            method_flags(run_method(name), dataset)  # raises for an unknown method
            file = self.folder / name / scores.FILE
            raise UsageError(f"{file} is missing: {again(dataset, name)} first")
        searches = {scores.other_search(dataset, self.folder / run) for run in self.runs}
        if len(searches) > 1:
            ways = " and ".join(sorted(f"with {search or 'usual flags'}" for search in searches))
            raise UsageError(f"{name}: seeds were evaluated {ways}: evaluate them alike")

    def has(self, direction: str) -> bool:
        return all(direction in r and r[direction].of(self.metric) for r in self.runs.values())

    def points(self, directions: Sequence[str]) -> list[float]:
        """The mean of each run."""
        points = ([r[d].of(self.metric)[0] for d in directions] for r in self.runs.values())
        return [*map(statistics.fmean, points)]

    def translations(self, direction: str) -> list[Path]:
        """The files; raises UsageError if one is not what was scored."""
        files = {run: scores.translations_of(self.folder / run, direction) for run in self.runs}
        for run, file in files.items():
            known = self.runs[run][direction].checksum
            if known and known != hashlib.sha256(read_plain(file)).hexdigest():
                raise UsageError(f"{file} was changed after it was scored: evaluate {run} again")
        return [*files.values()]


def _settings_of(signature: str) -> dict[str, str]:
    """The settings in a signature of sacreBLEU, without its version."""
    settings = dict(each.split(":", 1) for each in signature.split("|") if ":" in each)
    return {name: value for name, value in settings.items() if name != "version"}


def _smallest_p_note(first: Sequence[float], second: Sequence[float]) -> str:
    """A note on the smallest possible p-value of the permutation test for this number of runs."""
    if min(len(first), len(second)) < 2:
        return "p (seeds) needs two runs of each system"
    permutations = math.comb(len(first) + len(second), len(first))
    least = max((1 + (len(first) == len(second))) / permutations, 1 / (PERMUTATIONS + 1))
    return f"p (seeds): permutation test over the runs; for this many it is at least {least:.4f}"


def _paired_note(systems: Collection["_System"], points: Sequence[Sequence[float]]) -> list[str]:
    pairs = zip(systems, points, strict=True)
    first, second = (dict(zip(map(run_seed, system.runs), of)) for system, of in pairs)
    apart = [second[seed] - first[seed] for seed in first if seed in second]
    if len(apart) < 2:
        return []
    difference = f"{in_words(apart)}, 95 percent interval (paired t)"
    return [f"within the {len(apart)} seeds of both: {difference}"]


def _row(points: Sequence[Sequence[float]], p: float | None) -> list[str]:
    means = [statistics.fmean(values) for values in points]
    difference = number(means[1] - means[0], sign=True)
    return [*(number(mean) for mean in means), difference, number(p, digits=4)]


def _bootstrap(
    dataset: Dataset,
    direction: str,
    first: _System,
    second: _System,
    metric: str,
    points: Sequence[Sequence[float]],
) -> float | None:
    """The p-value; None for scores (``points``, of all runs) whose means are equal to two decimals."""
    files = [system.translations(direction) for system in (first, second)]
    if scores.METRICS.get(metric) is None:
        lines = ([numbers_of_lines(file, metric) for file in of_runs] for of_runs in files)
        one, other = (np.mean(of_runs, axis=0) for of_runs in lines)
        return None if one.mean() == other.mean() else mean_p_value(one, other)
    if abs(statistics.fmean(points[0]) - statistics.fmean(points[1])) < 0.005:
        return None
    language = direction.split("-")[1]
    reference = test_file(dataset, direction, language)
    references = scores.lines_of(reference)
    flags = flags_for(dataset.sacrebleu, language, metric)
    (counter,) = metrics_of(parsed(flags), references)
    _, saved = next(iter(first.runs.values()))[direction].of(metric)
    was, now = map(_settings_of, (saved, counter.get_signature().format(False)))
    if other := [name for name in now if was.get(name, now[name]) != now[name]]:
        differ = " and ".join(f"{name}:{was[name]}, not {name}:{now[name]}" for name in other)
        advice = "evaluate both again, or restore `sacrebleu` of the data set"
        raise UsageError(f"{direction} was scored with {differ}: {advice}")

    def count(translations: Path) -> np.ndarray:
        lines = scores.lines_of(translations)
        if len(lines) != len(references):
            both = f"{translations} has {len(lines)} lines and {reference} {len(references)}"
            raise UsageError(f"{both}: evaluate again")
        with quietly():
            return np.array(counter._extract_corpus_statistics(lines, None))

    return p_value(counter, *(sum(map(count, of_runs)) for of_runs in files))
