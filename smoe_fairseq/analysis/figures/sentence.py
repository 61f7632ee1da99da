"""The requested capacity of one sentence's tokens, drawn under the sentence."""

import numpy as np
from matplotlib.figure import Figure

from smoe_fairseq.analysis.figures.style import SHADES, new, styled, text_on
from smoe_fairseq.analysis.sentence import SentenceSide

PER_ROW = 16  # tokens; a longer sentence takes several rows


@styled
def draw(sides: list[SentenceSide]) -> Figure:
    """One row of cells per block, a column per token."""
    parts = [(side, start) for side in sides for start in range(0, len(side.tokens), PER_ROW)]
    heights = [0.75 + 0.3 * len(side.blocks) for side, _ in parts]
    figure, axes = new(
        len(parts), 1, width=7.6, height=sum(heights), gridspec_kw={"height_ratios": heights}
    )
    for ax, (side, start) in zip(axes[:, 0], parts):
        panel(ax, side, start)
    return figure


def panel(ax, side: SentenceSide, start: int) -> None:
    """Up to ``PER_ROW`` tokens, from number ``start`` on."""
    tokens = side.tokens[start : start + PER_ROW]
    values = np.array([row[start : start + PER_ROW] for row in side.requested])
    most = max(len(block.strata) for block in side.blocks)
    ax.imshow(values, cmap=SHADES, vmin=0.5, vmax=most, aspect="auto")
    for (b, t), value in np.ndenumerate(values):
        colour = text_on((value - 0.5) / (most - 0.5))
        ax.text(t, b, str(value), ha="center", va="center", fontsize=9, color=colour)
    ax.set_xticks(range(len(tokens)), tokens, rotation=40, ha="left", rotation_mode="anchor")
    ax.xaxis.tick_top()
    ax.set_yticks(range(len(side.blocks)), [block.title for block in side.blocks])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_xlim(-0.5, PER_ROW - 0.5)
