"""The way of the tokens through the strata of a block, as an alluvial diagram."""

import numpy as np
from matplotlib.figure import Figure

from smoe_fairseq.analysis.counts import Counts
from smoe_fairseq.analysis.figures.style import new, styled
from smoe_fairseq.analysis.results import Results

WIDTH = 0.09  # of a stratum's bar, in distances between strata
GAP = 0.03  # between a stratum's bar and the tokens that pass it by
SHADES = ("#1d3f72", "#4f7db5", "#9dbcdc", "#cfdeec", "#e6eef6")  # past no stratum, one, two, ...


def shares(counts: Counts) -> dict[tuple[int, int], float]:
    """Share of the block's tokens that go from stratum i to stratum k; k = L is out of the block."""
    flow = counts.flow()
    return {(i, j + 1): flow[i, j] / counts.tokens for i, j in np.argwhere(flow).tolist()}


def lanes(moves: dict[tuple[int, int], float], column: int) -> dict[tuple[int, int], float]:
    """Moves that pass a stratum by, in drawing order; with those at it, they are all tokens."""
    passing = [move for move in moves if move[0] < column < move[1]]
    return {move: moves[move] for move in sorted(passing, key=lambda move: (move[1], -move[0]))}


@styled
def draw(results: Results) -> Figure:
    """One panel per block, over all directions' text; bars are strata, their height the tokens in them."""
    columns = min(2, len(results.blocks))
    rows = -(-len(results.blocks) // columns)
    figure, axes = new(rows, columns, width=7.6, height=2.9 * rows)
    for ax, block in zip(axes.flat, results.blocks):
        panel(ax, results.over(results.directions, block))
        ax.set_title(block.title)
    for ax in axes.flat:
        ax.axis("off")
    return figure


def panel(ax, counts: Counts) -> None:
    """All moves of one block's tokens, each a ribbon from its bar past others to its bar."""
    moves = shares(counts)
    out = len(counts.block.strata)
    tops = ribbon_tops(moves, out)
    for (i, k), share in sorted(moves.items(), key=lambda item: item[0][0] - item[0][1]):
        x, top = ribbon(i, k, tops[i, k])
        colour = SHADES[min(k - i - 1, len(SHADES) - 1)]
        ax.fill_between(x, top - share, top, color=colour, lw=0.4, edgecolor="white")
    for column in range(out + 1):
        end = 0 if column < out else 1
        stands = sum(share for move, share in moves.items() if move[end] == column)
        ax.fill_between([column - WIDTH, column + WIDTH], 1 - stands, 1, color="black", lw=0)
        name = "out" if column == out else f"stratum {column}"
        ax.text(column, 1.02, f"{name}\n{stands:.0%}", ha="center", va="bottom", fontsize=8)
    ax.set_xlim(-0.45, out + 0.45)
    ax.set_ylim(-0.02 - GAP, 1.14)


def ribbon_tops(moves: dict[tuple[int, int], float], out: int) -> dict[tuple, list[float]]:
    """Where each move's ribbon has its upper edge, from the bar it leaves to the one it enters.

    In a column the bar is on top, then come the tokens that pass it, those with the shortest way first.
    """
    tops = {move: [] for move in moves}
    for column in range(out + 1):
        leaving = [move for move in sorted(moves) if move[0] == column]
        entering = [move for move in sorted(moves, reverse=True) if move[1] == column]
        for side in (leaving, entering):
            y = 1.0
            for move in side:
                tops[move].append(y)
                y -= moves[move]
        y = 1.0 - sum(moves[move] for move in leaving or entering) - GAP
        for move in lanes(moves, column):
            tops[move].append(y)
            y -= moves[move]
    return tops


def ribbon(start: int, end: int, tops: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Points of a ribbon's upper edge: level at the bars that it passes, smooth between them."""
    t = np.linspace(0, 1, 40)
    x, y = [], []
    for column in range(start, end):
        first, then = tops[column - start], tops[column - start + 1]
        x.append(column + WIDTH + t * (1 - 2 * WIDTH))
        y.append(first + (then - first) * (3 * t**2 - 2 * t**3))
    return np.concatenate(x), np.concatenate(y)
