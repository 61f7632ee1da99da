"""``scripts/recipe gpu-hours DATASET``: an estimate of what a table costs to train."""

from argparse import ArgumentParser, Namespace

from smoe_fairseq.errors import UsageError, quietly
from smoe_fairseq.recipes.config import Dataset, load_dataset, tables
from smoe_fairseq.recipes.identity import plan
from smoe_fairseq.recipes.table import Grid, markdown

TFLOPS = 94.0  # per second: 30 percent of the 312 that an A100 has in bf16
BACKWARD = 2  # times the FLOPs of the forward pass


def add_arguments(parser: ArgumentParser) -> None:
    """As ``python -m smoe_fairseq.recipes`` has it."""
    parser.add_argument(
        "--tflops",
        type=float,
        default=TFLOPS,
        metavar="N",
        help="10^12 floating-point operations that training makes in a second on one GPU; default: "
        f"{TFLOPS:g}, 30 percent of the peak of an A100 in bf16",
    )
    parser.add_argument("--names", action="store_true", help="print the methods of the table alone")


def run_gpu_hours(args: Namespace) -> None:
    """Prints a row for each method of the data set's table."""
    if not 0 < args.tflops < float("inf"):
        raise UsageError(f"--tflops {args.tflops:g}: expected a number above 0")
    dataset = load_dataset(args.dataset)
    if args.names:
        print("\n".join(methods(dataset)))
        return
    print(markdown(table(dataset, args.tflops)))


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
    tokens = plan(dataset, 1, []).wanted if dataset.batch else int(dataset.train["max-tokens"])
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
