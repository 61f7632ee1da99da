"""HTML report of an analysis: its pictures, and a page that explains them (``report.html.jinja``)."""

import base64
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jinja2
import numpy as np
from matplotlib.figure import Figure

from smoe_fairseq.analysis import figures
from smoe_fairseq.analysis.figures import Series
from smoe_fairseq.analysis.results import Results
from smoe_fairseq.analysis.sentence import SentenceSide
from smoe_fairseq.files import write_whole


def pictures(
    results: Results, sides: list[SentenceSide], series: Series, min_count: int
) -> dict[str, Callable[[], Figure]]:
    """Functions that draw the pictures, by name; without those that have nothing to show."""
    blocks = results.blocks if results.ranks else []
    counted = any(len(figures.groups(results, block, min_count)["all"]) for block in blocks)
    check = results.capacity
    dropped = check and any(check.percent_dropped(side).any() for side in check.sides())
    deep = any(len(results.blocks_of(side)) > 1 for side in results.sides())
    draw = {
        "by_direction": results.has_languages and partial(figures.draw_by_direction, results),
        "frequency": counted and partial(figures.draw_frequency, results, min_count),
        "by_depth": deep and partial(figures.draw_by_depth, results),
        "load": partial(figures.draw_load, results),
        "flow": partial(figures.draw_flow, results),
        "positions": dropped and partial(figures.draw_positions, check),
        "sentence": sides and partial(figures.draw_sentence, sides),
        "training": series and partial(figures.draw_training, series),
    }
    return {name: function for name, function in draw.items() if function}


def draw(folder: Path, functions: dict[str, Callable[[], Figure]]) -> dict[str, str]:
    """Writes ``NAME.png`` and ``NAME.svg`` of each picture; returns the PNG in base 64, by name."""
    drawn, missing = {}, set()
    for name, picture in functions.items():
        missing |= figures.save(picture(), folder / name)
        drawn[name] = base64.b64encode((folder / f"{name}.png").read_bytes()).decode()
    figures.warn_of_missing(missing)
    return drawn


def page(results: Results, checkpoint: Path, drawn: dict[str, str], **content) -> str:
    """A self-contained HTML page.

    Args:
        drawn: see `draw`.
        content: further variables of the template: ``direction`` of the example, ``series`` of the log, and
            ``min_count``.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals["figures"] = figures
    environment.filters["median"] = np.median
    environment.filters["fixed"] = lambda values, digits: ", ".join(
        f"{value:.{digits}f}" for value in values
    )
    content |= {"results": results, "checkpoint": checkpoint, "drawn": drawn}
    return environment.get_template("report.html.jinja").render(content)


def write(
    folder: Path,
    results: Results,
    checkpoint: Path,
    example: tuple[str, list[SentenceSide]],
    series: Series,
    min_count: int,
) -> None:
    """Draw the pictures and write ``report.html``; ``example`` is a direction and a sentence of it."""
    direction, sides = example
    drawn = draw(folder, pictures(results, sides, series, min_count))
    content = {"direction": direction, "series": series, "min_count": min_count}
    text = page(results, checkpoint, drawn, **content)
    write_whole(folder / "report.html", text, called="report.html")
