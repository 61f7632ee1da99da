"""Pictures of a study: what training costs and brings, and scores by direction."""

import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from smoe_fairseq.analysis.figures.style import new, styled
from smoe_fairseq.recipes.study.kept import Result

Systems = Mapping[str, Sequence[Result]]  # by method, a result for each seed
COLOURS = (
    *("black", "#3f6ea8", "#9dbcdc", "#777777", "#a2641b", "#d9a066"),
    *("#bbbbbb", "#8a8a5c", "#b0413e", "#e08a87", "#5b8c5a", "#a9cba4"),
)


@styled
def draw_costs(systems: Systems, flops: Mapping[str, float]) -> Figure:
    """Validation loss over FLOPs of training (``flops``: forward, per target token) and over hours.

    Of the second half of each run's updates, where systems can be told apart.
    """
    figure, axes = new(1, 2, height=4.2)
    colours = _colours(systems)
    for method, results in systems.items():
        colour = colours[method]
        for i, result in enumerate(results):
            rows = [row for row in result.curve if row["validation_nll"] is not None]
            rows = [row for row in rows if row["update"] >= rows[-1]["update"] / 2]
            losses = [row["validation_nll"] for row in rows]
            style = {"ms": 2.5, "lw": 1, "color": colour, "label": method if i == 0 else None}
            if method in flops:
                words = _at(rows, result, "words")
                axes[0][0].plot(3e-12 * flops[method] * words, losses, "o-", **style)
            axes[0][1].plot(_at(rows, result, "seconds") / 3600, losses, "o-", **style)
    axes[0][0].set_xlabel("training, TFLOP")
    axes[0][1].set_xlabel("hours of training")
    figure.suptitle("Validation loss (bits per token), second half of training", fontsize=11)
    _legend(figure, axes[0][1])
    return figure


def _at(rows: Sequence[dict], result: Result, column: str) -> np.ndarray:
    """Of words or seconds, what they were at ``rows``: epochs end between two lines of the log."""
    logged = [row for row in result.curve if row["training_nll"] is not None]
    return np.interp(
        [row["update"] for row in rows],
        [row["update"] for row in logged],
        [row[column] for row in logged],
    )


@styled
def draw_directions(systems: Systems, baseline: str) -> Figure:
    """BLEU above that of the baseline: of each direction and their mean a column, of each method a row.

    Bars are means over seeds, dots are the seeds. Columns share their scale.
    """
    others = [method for method in systems if method != baseline]
    every = [result for results in systems.values() for result in results]
    directions = [d for d in systems[baseline][0].scores if all(d in r.scores for r in every)]
    columns = [("mean", directions), *((d, [d]) for d in directions)]
    height = 1.2 + 0.21 * len(others)
    figure, axes = new(1, len(columns), width=11.0, height=height, sharey=True, sharex=True)
    colours = _colours(systems)
    rows = range(len(others))
    for ax, (name, of_column) in zip(axes[0], columns, strict=True):
        base = statistics.fmean(_bleu(result, of_column) for result in systems[baseline])
        for row, method in zip(rows, others, strict=True):
            above = [_bleu(result, of_column) - base for result in systems[method]]
            ax.barh(row, statistics.fmean(above), height=0.75, color=colours[method])
            ax.plot(above, [row] * len(above), "o", ms=3, color="black", mec="white", mew=0.5)
        ax.axvline(0, color="black", lw=0.8)
        ax.set_title(name)
    axes[0][0].set_yticks(rows, others, fontsize=8)
    axes[0][0].invert_yaxis()
    figure.supxlabel(f"BLEU above {baseline}", fontsize=10)
    return figure


def _bleu(result: Result, directions: Sequence[str]) -> float:
    return statistics.fmean(result.scores[d].bleu for d in directions)


def _legend(figure: Figure, ax) -> None:
    """Below all axes, where no curve is."""
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncol=6, fontsize=8)


def _colours(systems) -> dict[str, str]:
    """Of a method the same in all pictures."""
    return {method: COLOURS[i % len(COLOURS)] for i, method in enumerate(systems)}
