"""The paper's claims about requested capacity, (f) to (h), each with what this study says of it."""

import statistics
from collections.abc import Sequence

from smoe_fairseq.recipes.study.student import interval
from smoe_fairseq.recipes.study.verdicts import Verdict, decide

Routing = dict  # as `capacity_summary.summary` gives it


def about_capacity(runs: Sequence[Routing]) -> list[Verdict]:
    """Of the claims that can be told from ``runs``, each an SMoE's; a run counts once."""
    return [v for claim in (_languages, _frequency, _first_block) for v in claim(runs)]


def _languages(runs: Sequence[Routing]) -> list[Verdict]:
    values, names = [], set()
    for run in runs:
        requested = run["requested_capacity"]
        pivot = _pivot(list(requested))
        means = {name: _mean(layers, "decoder") for name, layers in requested.items()}
        into = [mean for name, mean in means.items() if name.endswith(f"-{pivot}")]
        others = [mean for name, mean in means.items() if not name.endswith(f"-{pivot}")]
        if pivot is None or len(into) < 2 or len(others) < 2 or None in means.values():
            continue
        values.append(_range(others) - _range(into))
        names.add(pivot)
    if not values:
        return []
    claim = (
        f"(f) requested capacity of targets in {'/'.join(sorted(names))} does not depend on the source "
        "language, other targets differ: range over directions, others less these"
    )
    return [decide(claim, interval(values))]


def _frequency(runs: Sequence[Routing]) -> list[Verdict]:
    found = []
    for side in ("encoder", "decoder"):
        means = [_mean(run["rank_correlation"], side) for run in runs]
        values = [mean for mean in means if mean is not None and mean == mean]
        if values:
            claim = (
                f"(g) frequent tokens ask for less in the {side}: rank correlation of rareness and "
                "requested capacity"
            )
            found.append(decide(claim, interval(values)))
    return found


def _first_block(runs: Sequence[Routing]) -> list[Verdict]:
    """Of the runs that have several encoder blocks; the interval is over directions where that is one."""
    each = []
    for run in runs:
        differences = []
        for layers in run["requested_capacity"].values():
            blocks = sorted(
                (int(name.split(".")[1]), value)
                for name, value in layers.items()
                if name.startswith("encoder.")
            )
            if len(blocks) > 1:
                first, *later = (value for _, value in blocks)
                differences.append(first - statistics.fmean(later))
        if differences:
            each.append(differences)
    if not each:
        return []
    alone = len(each) == 1
    values = each[0] if alone else [statistics.fmean(differences) for differences in each]
    over = ", interval over the directions of one run" if alone else ""
    claim = f"(h) the first encoder block asks for more than the later ones{over}"
    return [decide(claim, interval(values))]


def _pivot(directions: list[str]) -> str | None:
    common = set.intersection(*(set(name.split("-")) for name in directions))
    return common.pop() if len(common) == 1 and len(directions) > 1 else None


def _mean(layers: dict[str, float], side: str) -> float | None:
    values = [value for name, value in layers.items() if name.startswith(f"{side}.")]
    return statistics.fmean(values) if values else None


def _range(values: Sequence[float]) -> float:
    return max(values) - min(values)
