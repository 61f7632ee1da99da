"""What a system brings for what it costs: its loss beside the baseline's after as many FLOPs, or as long."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from smoe_fairseq.recipes.seeds import method_of
from smoe_fairseq.recipes.study.blocks import chance
from smoe_fairseq.recipes.study.kept import Result
from smoe_fairseq.recipes.tables.render import MISSING, Grid

Costs = Callable[[Result], float | None]  # per target token


def equal_cost_table(
    systems: Mapping[str, Sequence[Result]], flops: Mapping[str, float], baseline: str
) -> Grid:
    """``flops``: by method, of a forward pass, per target token."""
    of_flops = _beside(systems, baseline, lambda r: flops.get(method_of(r.name)))
    of_time = _beside(systems, baseline, lambda r: r.time or None, same_machine=True)
    rows = [
        [method, *_cells(of_flops, method), *_cells(of_time, method)]
        for method in systems
        if method in of_flops | of_time
    ]
    header = ["method", "FLOPs/token", "loss at equal FLOPs", "time/token", "loss at equal time"]
    notes = [
        f"Beside {baseline}, over the seeds that both have: how much more a token costs, and what lies "
        "between the lowest losses (bits per token; below zero is better), with its 95 percent interval, "
        "when both had cost as much as the one that ends first. Between validations the loss is taken to "
        "fall in line with the logarithm of the cost. Time is of seeds that one machine made."
    ]
    return Grid(header, rows, notes)


def _beside(
    systems: Mapping[str, Sequence[Result]], baseline: str, cost: Costs, same_machine: bool = False
) -> dict[str, dict[int | None, tuple[float, float]]]:
    """By method and seed: a token's cost as a multiple of the baseline's, and what lies between losses."""
    of_baseline = {result.seed: result for result in systems.get(baseline, ()) if cost(result)}
    found: dict[str, dict] = {}
    for method, results in systems.items():
        for r in results if method != baseline else ():
            b = of_baseline.get(r.seed)
            if not b or not cost(r) or not r.logged or not b.logged:
                continue
            if same_machine and r.machine != b.machine:
                continue
            apart = _apart(r, b, cost)
            if apart is not None:
                found.setdefault(method, {})[r.seed] = (cost(r) / cost(b), apart)
    return found


def _cells(found: Mapping[str, Mapping], method: str) -> list[str]:
    """How much more a token costs, and what lies between the losses.

    What the baseline's run owes to chance is in all differences of a seed, as what the seed does.
    """
    if method not in found:
        return [MISSING, MISSING]
    apart = {m: {seed: a for seed, (_, a) in seeds.items()} for m, seeds in found.items()}
    more = math.exp(statistics.fmean(math.log(ratio) for ratio, _ in found[method].values())) - 1
    return [f"{more:+.0%}", f"{chance(apart).around(list(apart[method].values())):+.3f}"]


def _apart(result: Result, other: Result, cost: Costs) -> float | None:
    """None where the one that ends first does so before the other's first validation."""
    curves = [
        (cost(r) * each["words"], np.fmin.accumulate(each["loss"]))
        for r, each in ((r, r.validated()) for r in (result, other))
    ]
    end = min(costs[-1] for costs, _ in curves)
    if any(end < costs[0] for costs, _ in curves):
        return None
    here, there = (np.interp(math.log(end), np.log(costs), losses) for costs, losses in curves)
    return float(here - there)
