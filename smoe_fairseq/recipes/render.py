"""One grid of words as Markdown, CSV or LaTeX."""

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass, field

MISSING = "-"
_LATEX = {"\\": r"\textbackslash{}", **{c: f"\\{c}" for c in "&%$#_{}"}}


@dataclass(frozen=True)
class Grid:
    """Words to print: the first ``texts`` columns are text, the others numbers or `MISSING`."""

    header: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    texts: int = 1


def number(value: float | None, digits: int = 2, sign: bool = False) -> str:
    """What is not known is `MISSING`, never zero."""
    if value is None:
        return MISSING
    return f"{value:{'+' if sign else ''}.{digits}f}"


def markdown(grid: Grid) -> str:
    """A table and, below it, the notes."""
    rule = ["---"] * grid.texts + ["---:"] * (len(grid.header) - grid.texts)
    table = "\n".join(f"| {' | '.join(line)} |" for line in (grid.header, rule, *grid.rows))
    return "\n".join([table, "", *grid.notes])


def as_csv(grid: Grid) -> str:
    """Header and rows alone: the notes are for standard error."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([grid.header, *grid.rows])
    return text.getvalue().rstrip("\n")


def latex(grid: Grid) -> str:
    """A tabular that needs no package, with the notes as comments before it."""

    def line(words: list[str]) -> str:
        escaped = ("".join(_LATEX.get(c, c) for c in word) for word in words)
        return " & ".join("--" if word == MISSING else word for word in escaped) + r" \\"

    columns = "l" * grid.texts + "r" * (len(grid.header) - grid.texts)
    return "\n".join(
        [
            *(f"% {note}" for note in grid.notes),
            rf"\begin{{tabular}}{{{columns}}}",
            r"\hline",
            line(grid.header),
            r"\hline",
            *map(line, grid.rows),
            r"\hline",
            r"\end{tabular}",
        ]
    )


FORMATS: dict[str, Callable[[Grid], str]] = {"markdown": markdown, "csv": as_csv, "latex": latex}
