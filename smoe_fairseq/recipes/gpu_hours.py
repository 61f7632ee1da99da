"""``scripts/recipe gpu-hours DATASET``: an estimate of what a table costs to train."""

from smoe_fairseq.errors import UsageError, quietly
from smoe_fairseq.recipes.batch import plan_batch
from smoe_fairseq.recipes.config import Dataset, tables
from smoe_fairseq.recipes.grid import Grid, markdown

BACKWARD = 2  # times the FLOPs of the forward pass


def print_gpu_hours(dataset: Dataset, tflops: float, names: bool) -> None:
    """Print a row for each method of the data set's table, or only the methods' names.

    Args:
        tflops: 10^12 floating-point operations that training makes in a second on one GPU.
    """
    if not 0 < tflops < float("inf"):
        raise UsageError(f"--tflops {tflops:g}: expected a number above 0")
    print("\n".join(methods(dataset)) if names else markdown(table(dataset, tflops)))


def methods(dataset: Dataset) -> list[str]:
    """The systems of the paper's table, else those that the data set's study compares."""
    found = list(tables().get(dataset.name, {}).get("rows", {})) or dataset.study
    if not found:
        raise UsageError(f"{dataset.name} has no table: name the methods behind it")
    return found


def table(dataset: Dataset, tflops: float) -> Grid:
    """FLOPs are those of ``smoe cost``, the number of tokens is what ``BATCH`` asks for."""
    with quietly():
        from smoe_fairseq.analysis.cost_command import CONTEXT, system_cost

        costs = {method: system_cost(dataset, method) for method in methods(dataset)}
    updates = int(dataset.train["max-update"])
    tokens = (
        plan_batch(dataset, 1, []).wanted if dataset.batch else int(dataset.train["max-tokens"])
    )
    rows, total = [], 0.0
    for method, cost in costs.items():
        hours = (1 + BACKWARD) * cost.flops_per_token * tokens * updates / (tflops * 1e12) / 3600
        rows.append([method, f"{cost.flops_per_token / 1e6:,.0f}", f"{hours:,.1f}"])
        total += hours
    rows.append(["all", "", f"{total:,.1f}"])
    notes = [
        f"{updates:,} updates of {tokens:,} tokens, {1 + BACKWARD} times the FLOPs of a forward pass "
        f"(context {CONTEXT}, uniform routing), at {tflops:g} TFLOP/s per GPU"
    ]
    return Grid(["method", "FLOPs/token (M)", "GPU hours"], rows, notes)
