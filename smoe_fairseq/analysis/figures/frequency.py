"""How frequent the tokens of lowest and highest requested capacity are (the paper's figure 4)."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from smoe_fairseq.analysis.counts import Block
from smoe_fairseq.analysis.figures.style import DARK, HATCH, LIGHT, MIDDLE, new, styled
from smoe_fairseq.analysis.results import Results

TOKENS = 25


def groups(results: Results, block: Block, min_count: int) -> dict[str, np.ndarray]:
    """Training-frequency ranks of a block's tokens; each token counts once, however many directions.

    "lowest" and "highest" are of the ``TOKENS`` tokens of each direction with lowest and highest
    requested capacity, "all" of every token that could have been among them.
    """
    lowest, highest, everything = set(), set(), set()
    for direction in results.directions:
        summary = results.types[direction, block.name]
        low, high = summary.extremes(TOKENS, min_count)
        lowest.update(low)
        highest.update(high)
        everything.update(summary.types[summary.occurrences >= min_count])
    ranks = results.ranks[block.side]
    named = {"lowest": lowest, "highest": highest, "all": everything}
    return {name: np.sort(ranks[sorted(types)]) for name, types in named.items()}


@styled
def draw(results: Results, min_count: int) -> Figure:
    """Violins with their median, one panel per side; a rank of 1 is the most frequent token."""
    looks = {"lowest": (DARK, None), "highest": (LIGHT, HATCH), "all": (MIDDLE, None)}
    sides = results.sides()
    most = max(sum(b.side == side for b in results.blocks) for side in sides)
    figure, axes = new(
        1, len(sides), width=max(7, 1.6 * most * len(sides)), height=3.6, sharey=True
    )
    for ax, side in zip(axes[0], sides):
        blocks = [block for block in results.blocks if block.side == side]
        for i, block in enumerate(blocks):
            ranks = groups(results, block, min_count)
            for j, (name, (colour, hatch)) in enumerate(looks.items()):
                if not len(ranks[name]):
                    continue
                violin(ax, i + 0.28 * (j - 1), ranks[name], colour, hatch)
        ax.set_xticks(range(len(blocks)), [block.title for block in blocks])
        ax.set_xlim(-0.6, len(blocks) - 0.4)
        ax.set_ylim(bottom=0)
    axes[0, 0].set_ylabel("rank in training frequency\n(1: the most frequent)")
    handles = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="black", label=text)
        for (colour, hatch), text in zip(looks.values(), ("lowest RC", "highest RC", "all tokens"))
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=3)
    return figure


def violin(ax, x: float, values: np.ndarray, colour: str, hatch: str | None) -> None:
    """One violin; where all values are the same, just its median."""
    if len(set(values)) > 1:
        parts = ax.violinplot([values], [x], widths=0.26, showextrema=False)
        for body in parts["bodies"]:
            body.set(facecolor=colour, edgecolor="black", alpha=1, hatch=hatch, linewidth=0.6)
    median = np.median(values)
    ax.plot(x, median, "o", color="white", markeredgecolor="black", markersize=5)
    ax.annotate(
        f"{median:.0f}",
        (x, median),
        (5, 0),
        textcoords="offset points",
        fontsize=8,
        va="center",
        bbox={"facecolor": "white", "alpha": 0.8, "pad": 0.6, "lw": 0},
    )
