"""Expert load of each language as a heat map."""

import numpy as np
from matplotlib.figure import Figure

from smoe_fairseq.analysis.counts import Block
from smoe_fairseq.analysis.figures.style import SHADES, new, styled, text_on
from smoe_fairseq.analysis.results import Results


def loads(results: Results, block: Block) -> dict[str, np.ndarray]:
    """``(E,)`` load by language: source languages in the encoder, target languages in the decoder.

    Of a language model one load, of its text.
    """
    end = 0 if block.side == "encoder" else -1
    languages = {name.split("-")[end]: [] for name in results.directions}
    for name in results.directions:
        languages[name.split("-")[end]].append(name)
    return {lang: results.over(names, block).load() for lang, names in languages.items()}


@styled
def draw(results: Results) -> Figure:
    """One panel per block; 1 is an expert that gets as many first choices as the mean of all."""
    tables = [loads(results, block) for block in results.blocks]
    experts = max(block.strata.num_experts for block in results.blocks)
    wide = experts > 10
    columns = 1 if wide else min(2, len(tables))
    rows = -(-len(tables) // columns)
    height = rows * (1.3 + 0.32 * max(map(len, tables)))
    figure, axes = new(rows, columns, width=max(7, 0.45 * experts), height=height)
    top = max(max(load.max() for load in table.values()) for table in tables)
    for ax, block, table in zip(axes.flat, results.blocks, tables):
        values = np.stack(list(table.values()))
        image = ax.imshow(values, cmap=SHADES, vmin=0, vmax=top, aspect="auto")
        for (i, e), value in np.ndenumerate(values):
            colour = text_on(value / top)
            ax.text(e, i, f"{value:.1f}", ha="center", va="center", fontsize=8, color=colour)
        for first in {*block.strata.first_experts} - {0}:
            ax.axvline(first - 0.5, color="black", linewidth=1.5)
        ax.set_yticks(range(len(table)), table)
        ax.set_xticks(range(values.shape[1]), range(values.shape[1]))
        ax.spines[:].set_visible(False)
        of = "source" if block.side == "encoder" else "target"
        ax.set_title(block.title)
        if results.has_languages:
            ax.set_ylabel(f"{of} language")
        ax.set_xlabel("expert (lines: between strata)")
    for ax in axes.flat[len(tables) :]:
        ax.axis("off")
    figure.colorbar(image, ax=axes, shrink=0.8, label="load, 1: even", pad=0.02)
    return figure
