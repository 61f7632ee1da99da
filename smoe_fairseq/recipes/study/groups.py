"""Which systems of a study stand beside one another: those that can be compared over the same seeds."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from smoe_fairseq.recipes.study.kept import Result

Systems = Mapping[str, Sequence[Result]]  # by method, a result for each seed


def groups(
    study: Collection[str], systems: Systems, baseline: str, largest: float = math.inf
) -> list[dict[str, list[Result]]]:
    """The systems of the study with the seeds that half of them have, then all else by its seeds.

    Runs of two seeds say nothing of two systems, so a system in one seed stands beside the baseline's run of
    that seed and not beside its mean. A group after the first has ``largest`` systems, beside the baseline.
    """
    count = Counter(r.seed for method in study for r in systems.get(method, ()))
    usual = {seed for seed, n in count.items() if 2 * n >= len(systems.keys() & study)}
    first, others = {}, {}
    for method, results in systems.items():
        of_study = [r for r in results if method in study and r.seed in usual]
        if of_study:
            first[method] = of_study
        if rest := [r for r in results if r not in of_study]:
            others.setdefault(frozenset(r.seed for r in rest), {})[method] = rest
    found = [first] if first else []
    for seeds, members in others.items():
        beside = [r for r in systems.get(baseline, ()) if r.seed in seeds]
        beside = {baseline: beside} if beside else {}
        members = {method: rest for method, rest in members.items() if method != baseline}
        parts = max(1, math.ceil(len(members) / largest))
        size = math.ceil(len(members) / parts)
        names = list(members)
        for i in range(parts):
            of_part = names[i * size : (i + 1) * size]
            found.append(beside | {name: members[name] for name in of_part})
    return found
