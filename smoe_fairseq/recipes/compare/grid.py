"""A table of strings, as Markdown, CSV and LaTeX."""

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tabulate import tabulate

MISSING = "-"


@dataclass(frozen=True)
class Grid:
    """A table of strings; the first ``texts`` columns are text, the others numbers or `MISSING`."""

    header: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    texts: int = 1


def number(value: float | None, digits: int = 2, sign: bool = False) -> str:
    """A formatted number; `MISSING` for None."""
    if value is None:
        return MISSING
    return f"{value:{'+' if sign else ''}.{digits}f}"


def not_trained(direction: str) -> str:
    """What tables call a direction that is only scored."""
    return f"{direction} (not trained)"


def markdown(grid: Grid) -> str:
    """The table and the notes below it."""
    return "\n".join([plain(grid), "", *grid.notes])


def as_csv(grid: Grid) -> str:
    """Header and rows, without the notes."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([grid.header, *grid.rows])
    return text.getvalue().rstrip("\n")


def latex(grid: Grid) -> str:
    """A tabular without packages, with the notes as comments before it."""
    rows = [["--" if word == MISSING else word for word in row] for row in grid.rows]
    comments = [f"% {note}" for note in grid.notes]
    return "\n".join([*comments, plain(replace(grid, rows=rows), "latex")])


def plain(grid: Grid, kind: str = "pipe") -> str:
    """The table without the notes, in one of tabulate's formats."""
    numbers = len(grid.header) - grid.texts
    alignment = ["left"] * grid.texts + ["right"] * numbers
    options = {"tablefmt": kind, "colalign": alignment, "disable_numparse": True}
    rows = [grid.header, *grid.rows]
    if kind == "pipe":
        rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return tabulate(rows[1:], rows[0], **options)


FORMATS: dict[str, Callable[[Grid], str]] = {"markdown": markdown, "csv": as_csv, "latex": latex}
