"""The paper's tables (arXiv 2305.02176): its numbers, and the classes of languages that they average over."""

import math
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from omegaconf import OmegaConf


@cache
def tables() -> dict[str, Any]:
    """All of ``paper_tables.yaml`` by table; parameters and FLOPs are in millions."""
    with resources.as_file(resources.files(__package__).joinpath("paper_tables.yaml")) as file:
        return OmegaConf.to_container(OmegaConf.load(file))


def resource_classes(
    table: str, counted: Mapping[str, int] | None = None
) -> dict[str, list[str] | None]:
    """Languages by the size of their training text; empty where a table has no classes.

    Args:
        counted: sentence pairs of each language, for a table that prints no sizes.

    Returns:
        Classes in the paper's order, with None for their languages where no sizes are known.
    """
    content = tables().get(table, {})
    sizes = content.get("sizes", counted)

    def languages(bounds: dict[str, int]) -> list[str] | None:
        if sizes is None:
            return None
        least, most = bounds.get("least", 0), bounds.get("most", math.inf)
        return [language for language, size in sizes.items() if least <= size <= most]

    return {name: languages(bounds) for name, bounds in content.get("classes", {}).items()}
