"""Our costs of the systems in the paper's tables, beside what it prints."""

from collections.abc import Mapping
from typing import Any

from smoe_fairseq.analysis.cost import CONTEXT, Cost, count
from smoe_fairseq.analysis.meta_model import build_meta_model, parse_model
from smoe_fairseq.settings.dataset import Dataset, load_dataset
from smoe_fairseq.settings.flags import arguments
from smoe_fairseq.settings.method import method_flags
from smoe_fairseq.settings.paper_tables import tables

WITH_COSTS = ("m4", "m15")
BASELINE = "moe"  # the row that differences between rows are taken from


def system_cost(
    dataset: Dataset,
    method: str,
    context: int = CONTEXT,
    requested_capacity: Mapping[str, float] | None = None,
    experts_per_token: float | None = None,
) -> Cost:
    """Of the model that a method's flags make of a data set's; an unknown method is a `UsageError`."""
    args = parse_model(arguments(dataset.train | method_flags(method, dataset)))
    model = build_meta_model(args, int(dataset.subwords["vocab-size"]))
    return count(model, context, requested_capacity, experts_per_token)


def costs(table: str, context: int = CONTEXT) -> dict[str, Cost]:
    """Our counts for each row of table "m4" or "m15"."""
    dataset = load_dataset(table)
    return {method: system_cost(dataset, method, context) for method in tables()[table]["rows"]}


def compare(table: str, context: int = CONTEXT) -> list[dict[str, Any]]:
    """One entry per row, in millions: ours, the paper's, and the differences.

    ``flops_over_moe`` are a row's FLOPs less those of the vanilla MoE's row; a printed difference of
    two whole numbers may be off by less than 1.
    """
    counted = costs(table, context)
    rows = tables()[table]["rows"]
    base, paper_base = counted[BASELINE].flops_per_token / 1e6, rows[BASELINE]["flops_per_token"]
    entries = []
    for method, cost in counted.items():
        parameters, flops = cost.parameters / 1e6, cost.flops_per_token / 1e6
        paper_parameters = rows[method]["parameters"]
        paper_flops = rows[method]["flops_per_token"]
        entries.append(
            {
                "method": method,
                "parameters": parameters,
                "paper_parameters": paper_parameters,
                "parameters_percent": 100 * (parameters / paper_parameters - 1),
                "flops": flops,
                "paper_flops": paper_flops,
                "flops_difference": flops - paper_flops,
                "flops_over_moe": flops - base,
                "paper_flops_over_moe": paper_flops - paper_base,
            }
        )
    return entries
