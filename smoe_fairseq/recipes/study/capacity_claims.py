"""The paper's claims about requested capacity, (f) to (h), each with what this study says of it."""

import statistics
from collections.abc import Mapping, Sequence

from smoe_fairseq.analysis.pivot import pivot
from smoe_fairseq.recipes.study.verdicts import Verdict, decide
from smoe_fairseq.recipes.tables.student import interval

SHARE = 0.2  # of what other targets differ by, which those of one language may, where they "do not"
Routing = dict  # as `capacity_summary.summary` gives it


def about_capacity(runs: Mapping[str, Sequence[Routing]]) -> list[Verdict]:
    """Of the claims that can be told from ``runs``: by method, of each seed; methods are not pooled."""
    claims = (_languages, _frequency, _first_block)
    return [v for claim in claims for method, seeds in runs.items() for v in claim(method, seeds)]


def _languages(method: str, runs: Sequence[Routing]) -> list[Verdict]:
    shares, names = [], set()
    for run in runs:
        requested = run["requested_capacity"]
        language = pivot(requested)
        means = {name: _mean(layers, "decoder") for name, layers in requested.items()}
        into = [mean for name, mean in means.items() if name.endswith(f"-{language}")]
        others = [mean for name, mean in means.items() if not name.endswith(f"-{language}")]
        if language is None or len(into) < 2 or len(others) < 2 or None in means.values():
            continue
        if _range(others):
            shares.append(_range(into) / _range(others))
            names.add(language)
    if not shares:
        return []
    claim = (
        f"(f) {method}: requested capacity of targets in {'/'.join(sorted(names))} does not depend on the "
        f"source language, other targets differ: range of these over that of others, below {SHARE}"
    )
    return [decide(claim, interval(shares), most=SHARE, spec=".3f")]


def _frequency(method: str, runs: Sequence[Routing]) -> list[Verdict]:
    found = []
    for side in ("encoder", "decoder"):
        seeds = [_each(run["rank_correlation"], side) for run in runs]
        seeds = [by_direction for by_direction in seeds if by_direction]
        if seeds:
            claim = (
                f"(g) {method}: frequent tokens ask for less in the {side}: rank correlation of rareness "
                "and requested capacity"
            )
            found.append(_over_directions(claim, seeds))
    return found


def _first_block(method: str, runs: Sequence[Routing]) -> list[Verdict]:
    """Of the runs that have several encoder blocks."""
    seeds = []
    for run in runs:
        differences = {}
        for direction, layers in run["requested_capacity"].items():
            blocks = sorted(
                (int(name.split(".")[1]), value)
                for name, value in layers.items()
                if name.startswith("encoder.")
            )
            if len(blocks) > 1:
                first, *later = (value for _, value in blocks)
                differences[direction] = first - statistics.fmean(later)
        if differences:
            seeds.append(differences)
    claim = f"(h) {method}: the first encoder block asks for more than the later ones"
    return [_over_directions(claim, seeds)] if seeds else []


def _over_directions(claim: str, seeds: Sequence[Mapping[str, float]]) -> Verdict:
    """The claim is that the mean over directions is above zero; it is said of how many directions."""
    names = dict.fromkeys(name for by_direction in seeds for name in by_direction)
    means = [statistics.fmean(each[name] for each in seeds if name in each) for name in names]
    above = sum(mean > 0 for mean in means)
    found = interval([statistics.fmean(by_direction.values()) for by_direction in seeds])
    words = f"sign + in {above}, - in {len(means) - above}"
    return decide(claim, found, least=0, directions=words)


def _each(by_direction: Mapping[str, Mapping[str, float]], side: str) -> dict[str, float]:
    """Of each direction the mean over the blocks of a side, where that is a number."""
    means = {name: _mean(layers, side) for name, layers in by_direction.items()}
    return {name: mean for name, mean in means.items() if mean is not None and mean == mean}


def _mean(layers: Mapping[str, float], side: str) -> float | None:
    values = [value for name, value in layers.items() if name.startswith(f"{side}.")]
    return statistics.fmean(values) if values else None


def _range(values: Sequence[float]) -> float:
    return max(values) - min(values)
