"""The paper's tables (arXiv 2305.02176), and the model flags of the systems in them."""

import re
from functools import cache
from importlib import resources
from typing import Any

import yaml


@cache
def tables() -> dict[str, Any]:
    """All numbers of ``paper_tables.yaml``; parameters and FLOPs are in millions."""
    file = resources.files(__package__).joinpath("paper_tables.yaml")
    return yaml.safe_load(file.read_text("utf-8"))


def flags(method: str, experts: int) -> list[str]:
    """Model flags of a row of the paper, in a table whose vanilla models have ``experts`` experts."""
    if method == "dense":
        return ["--moe-freq", "0"]
    if strata := re.fullmatch(r"(stacked|smoe)-([\d-]+)", method):
        stacked = ["--moe-stacked"] if strata[1] == "stacked" else []
        return ["--smoe-strata", strata[2], *stacked]
    extra = {"switch": ["--moe-top-k", "1"], "moe-cmr": ["--moe-cmr"]}.get(method, [])
    return ["--smoe-strata", str(experts), *extra]
