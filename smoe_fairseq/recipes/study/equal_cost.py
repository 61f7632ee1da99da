"""What a system brings for what it costs: its loss beside the baseline's after as many FLOPs, or as long."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from smoe_fairseq.recipes.study.blocks import chance
from smoe_fairseq.recipes.study.kept import Result
from smoe_fairseq.recipes.tables.render import MISSING, Grid
from smoe_fairseq.recipes.tables.student import Difference, interval

Pair = tuple[float, float]  # of a system and of the baseline


def equal_cost_table(
    systems: Mapping[str, Sequence[Result]], flops: Mapping[str, float], baseline: str
) -> Grid:
    """``flops``: by method, of a forward pass, per target token."""
    by_chance = chance({m: {r.seed: r.validation for r in systems[m]} for m in systems})
    by_seed = {result.seed: result for result in systems.get(baseline, ())}
    rows = []
    for method, results in systems.items():
        both = [(r, by_seed[r.seed]) for r in results if r.seed in by_seed and method != baseline]
        both = [(r, b) for r, b in both if r.time and b.time]  # longer than an interval of the log
        timed = [(r, b) for r, b in both if r.machine == b.machine]
        counted = both if method in flops and baseline in flops else []
        if counted or timed:
            by_flops = [(r, b, (flops[method], flops[baseline])) for r, b in counted]
            by_time = [(r, b, (r.time, b.time)) for r, b in timed]
            rows.append([method, *_cells(by_flops, by_chance.around), *_cells(by_time, interval)])
    header = ["method", "FLOPs/token", "loss at equal FLOPs", "time/token", "loss at equal time"]
    notes = [
        f"Beside {baseline}, over the seeds that both have: how much more a token costs, and what lies "
        "between the losses (bits per token; below zero is better), with its 95 percent interval, when both "
        "had cost as much as the one that ends first. Between validations the loss is taken to fall in line "
        "with the logarithm of the cost. Time, which has chance of its own (paired t), is of seeds that one "
        "machine made."
    ]
    return Grid(header, rows, notes)


def _cells(
    compared: Sequence[tuple[Result, Result, Pair]],
    interval: Callable[[Sequence[float]], Difference],
) -> list[str]:
    """How much more a token costs, and what lies between the losses at equal cost."""
    if not compared:
        return [MISSING, MISSING]
    more = math.exp(statistics.fmean(math.log(a / b) for _, _, (a, b) in compared)) - 1
    return [f"{more:+.0%}", f"{interval([_apart(*each) for each in compared]):+.3f}"]


def _apart(result: Result, other: Result, per_token: Pair) -> float:
    curves = [r.validated() for r in (result, other)]
    costs = [cost * curve["words"] for cost, curve in zip(per_token, curves, strict=True)]
    end = min(cost[-1] for cost in costs)
    here, there = (
        np.interp(math.log(end), np.log(cost), curve["loss"])
        for cost, curve in zip(costs, curves, strict=True)
    )
    return float(here - there)
