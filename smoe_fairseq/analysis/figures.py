"""Figures of an analysis, one function each."""

import itertools
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from smoe_fairseq.errors import UsageError

try:
    import matplotlib
except ImportError:
    raise UsageError("matplotlib is missing, for pictures: pip install matplotlib") from None
except ValueError as error:
    raise UsageError(f"MPLBACKEND: {error}") from None
from matplotlib.figure import Figure  # without pyplot, whose backend is the user's
from matplotlib.font_manager import fontManager
from matplotlib.patches import Patch

from smoe_fairseq.analysis.capacity import FIFTHS, CapacityCheck
from smoe_fairseq.analysis.record import Block, Counts
from smoe_fairseq.analysis.results import Results
from smoe_fairseq.analysis.sentence import SentenceSide
from smoe_fairseq.files import whole_file

DARK, LIGHT, MIDDLE = "#1d3f72", "#f0b45f", "#7f8c9a"  # luminance 0.05, 0.53, 0.25
HATCH = "///"
PLAIN = {"color": DARK}
HATCHED = {"color": LIGHT, "hatch": HATCH, "edgecolor": "black"}
DPI = 130
SHADES = "Blues"  # light to dark, so it also works in greyscale

# Fonts for scripts that matplotlib's own font lacks, in order of preference.
_OTHER_SCRIPTS = ("Noto Sans CJK", "Noto Sans Thai", "Noto Sans Devanagari", "Noto Sans Arabic")
_OTHER_SCRIPTS += ("WenQuanYi", "Droid Sans Fallback", "Garuda", "Lohit Devanagari", "FreeSans")
_OTHER_SCRIPTS += ("GNU Unifont", "Unifont")


_MISSING = re.compile(r"Glyph (\d+) .*missing from font")  # a warning of matplotlib


def fonts(installed: Iterable[str] | None = None) -> list[str]:
    """Names of the fonts; the first one that has a character draws it."""
    names = sorted(installed or {font.name for font in fontManager.ttflist})
    others = [name for start in _OTHER_SCRIPTS for name in names if name.startswith(start)]
    return ["DejaVu Sans", *dict.fromkeys(others)]


STYLE = {
    "font.family": fonts(),
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "smoe",  # makes files reproducible
    "svg.fonttype": "none",
    "text.parse_math": False,  # for tokens such as $$
}


styled = matplotlib.rc_context(STYLE)  # decorates functions that draw


def new(rows: int = 1, columns: int = 1, width: float = 7.0, height: float = 3.0, **options):
    """Figure and ``(rows, columns)`` array of axes, in inches."""
    figure = Figure((width, height))
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def panels(number: int, columns: int = 0, width=7.0, height=3.0, **options):
    """Figure and its axes: ``columns`` in a row, by default all.

    ``width`` is of the whole figure and ``height`` of a row, in inches.
    """
    columns = columns or number
    rows = -(-number // columns)
    figure, axes = new(rows, columns, width, rows * height, **options)
    for ax in axes.flat[number:]:
        ax.axis("off")
    return figure, list(axes.flat)


@styled
def save(figure: Figure, stem: Path) -> set[str]:
    """Write ``stem.png`` and ``stem.svg`` atomically.

    Returns:
        Characters that no installed font has.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for kind, options in (("png", {"dpi": DPI}), ("svg", {"metadata": {"Date": None}})):
            file = stem.with_name(f"{stem.name}.{kind}")
            with whole_file(file, called=file.name) as partial:
                figure.savefig(partial, format=kind, **options)
    matches = (_MISSING.match(str(warning.message)) for warning in caught)
    return {chr(int(match[1])) for match in matches if match}


def warn_of_missing(characters: set[str]) -> None:
    """Warn of characters that are drawn as boxes."""
    if characters:
        lacking = f"{len(characters)} characters, such as {''.join(sorted(characters)[:10])}"
        font = "a font that has them (such as fonts-noto-cjk and fonts-noto-core on Debian)"
        advice = f"install {font}, and delete matplotlib's cache"
        print(f"warning: the pictures lack {lacking}: {advice}", file=sys.stderr)


def heat_map(ax, values: np.ndarray, least: float, most: float, form: str, size: int):
    """Values as shades, with numbers in the format ``form``; returns the image."""
    image = ax.imshow(values, cmap=SHADES, vmin=least, vmax=most, aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        colour = "white" if value - least > 0.55 * (most - least) else "black"
        place = {"ha": "center", "va": "center"}
        ax.text(column, row, format(value, form), fontsize=size, color=colour, **place)
    return image


# Requested capacity by depth (the paper's figure 5).


@styled
def draw_by_depth(results: Results) -> Figure:
    """One thin line per direction, a thick one over all tokens; encoder layers, then decoder layers."""
    sides = results.sides()
    figure, axes = panels(len(sides), height=3.2, sharey=True)
    pivot = results.pivot()
    for ax, side in zip(axes, sides):
        blocks = results.blocks_of(side)
        x = range(len(blocks))
        for name in results.directions:
            out_of = pivot is not None and name.startswith(f"{pivot}-")
            means = [results.of(name, block).requested_capacity for block in blocks]
            label = None if pivot is None else f"{'out of' if out_of else 'into'} {pivot}"
            look = {"color": LIGHT if out_of else MIDDLE, "linestyle": "--" if out_of else "-"}
            ax.plot(x, means, marker="^" if out_of else "o", lw=1, label=label, **look)
        means = results.by_depth(side)
        ax.plot(x, means, color=DARK, marker="s", lw=2.5, markersize=7, label="all tokens")
        for i, mean in enumerate(means):
            ax.annotate(f"{mean:.2f}", (i, mean), (0, 7), textcoords="offset points", ha="center")
        ax.set_title(side)
        ax.set_xticks(x, [block.title.split()[-1] for block in blocks])
        ax.set_xlim(-0.5, len(blocks) - 0.3)
        ax.set_xlabel("layer")
    axes[0].set_ylabel("requested capacity")
    handles = {h.get_label(): h for h in axes[-1].lines if not h.get_label().startswith("_")}
    figure.legend(handles=handles.values(), loc="outside upper center", ncols=3)
    return figure


# Requested capacity of each direction, encoder and decoder (the paper's figure 3).


@styled
def draw_by_direction(results: Results) -> Figure:
    """Bars for directions into and out of the common language, those with most training data first."""
    names = results.by_resource()
    pivot = results.pivot()
    sides = results.sides()
    height = 1.5 + 0.28 * len(names)
    figure, axes = panels(len(sides), height=height, sharex=True, sharey=True)
    for ax, side in zip(axes, sides):
        for out_of, look in ((False, PLAIN), (True, HATCHED)):
            rows = [i for i, name in enumerate(names) if name.startswith(f"{pivot}-") == out_of]
            if rows:
                label = f"{'out of' if out_of else 'into'} {pivot}"
                means = [results.mean([names[row]], side) for row in rows]
                bars = ax.barh(rows, means, linewidth=0.5, label=label, **look)
                ax.bar_label(bars, fmt=" %.2f", fontsize=9)
        ax.set_title(side)
        ax.set_xlabel("requested capacity, mean over tokens")
        ax.margins(x=0.16)
        ax.axvline(1, color="black", linewidth=0.6, linestyle=":")
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    if pivot is not None:
        looks = axes[0].get_legend_handles_labels()
        figure.legend(*looks, loc="outside upper center", ncols=2)
    return figure


# The route of the tokens through the strata of a block, as an alluvial diagram.

WIDTH = 0.09  # of a stratum's bar, relative to the distance between strata
GAP = 0.03  # between a stratum's bar and the tokens that skip it
# Of tokens that skip no stratum, one, two, ...
FLOW_SHADES = ("#1d3f72", "#4f7db5", "#9dbcdc", "#cfdeec", "#e6eef6")


def shares(counts: Counts) -> dict[tuple[int, int], float]:
    """Share of the block's tokens that go from stratum i to stratum k; k = L means out of the block."""
    flow = counts.flow()
    return {(i, j + 1): flow[i, j] / counts.tokens for i, j in np.argwhere(flow).tolist()}


@styled
def draw_flow(results: Results) -> Figure:
    """One panel per block, over all directions; a bar is a stratum, its height the share of tokens."""
    number = len(results.blocks)
    figure, axes = panels(number, columns=min(2, number), width=7.6, height=2.9)
    for ax, block in zip(axes, results.blocks):
        flow_panel(ax, results.over(results.directions, block))
        ax.set_title(block.title)
        ax.axis("off")
    return figure


def flow_panel(ax, counts: Counts) -> None:
    """The moves of one block's tokens as ribbons between bars."""
    moves = shares(counts)
    out = len(counts.block.strata)
    tops = ribbon_tops(moves, out)
    for (i, k), share in sorted(moves.items(), key=lambda item: item[0][0] - item[0][1]):
        x, top = ribbon(i, k, tops[i, k])
        colour = FLOW_SHADES[min(k - i - 1, len(FLOW_SHADES) - 1)]
        ax.fill_between(x, top - share, top, color=colour, lw=0.4, edgecolor="white")
    for column in range(out + 1):
        end = 0 if column < out else 1
        total = sum(share for move, share in moves.items() if move[end] == column)
        ax.fill_between([column - WIDTH, column + WIDTH], 1 - total, 1, color="black", lw=0)
        name = "out" if column == out else f"stratum {column + 1}"
        ax.text(column, 1.02, f"{name}\n{total:.0%}", ha="center", va="bottom", fontsize=8)
    ax.set_xlim(-0.45, out + 0.45)
    ax.set_ylim(-0.02 - GAP, 1.14)


def ribbon_tops(moves: dict[tuple[int, int], float], out: int) -> dict[tuple, list[float]]:
    """The upper edges of each move's ribbon in the columns from its first bar to its last.

    In a column the bar is on top; below it are the tokens that skip it, those with the nearest end first.
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
        passing = [move for move in moves if move[0] < column < move[1]]
        for move in sorted(passing, key=lambda move: (move[1], -move[0])):
            tops[move].append(y)
            y -= moves[move]
    return tops


def ribbon(start: int, end: int, tops: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Points of a ribbon's upper edge: level at the bars, smooth between them."""
    t = np.linspace(0, 1, 40)
    x = [column + WIDTH + t * (1 - 2 * WIDTH) for column in range(start, end)]
    y = [a + (b - a) * (3 * t**2 - 2 * t**3) for a, b in itertools.pairwise(tops)]
    return np.concatenate(x), np.concatenate(y)


# Frequency of the tokens of lowest and highest requested capacity (the paper's figure 4).

TOKENS = 25


def groups(results: Results, block: Block, min_count: int) -> dict[str, np.ndarray]:
    """Training-frequency ranks of a block's tokens, each of which counts once for all directions.

    "lowest" and "highest" are the ``TOKENS`` tokens of each direction with lowest and highest requested
    capacity, "all" are all tokens with at least ``min_count`` occurrences.
    """
    selected = {"lowest": set(), "highest": set(), "all": set()}
    for direction in results.directions:
        summary = results.types[direction, block.name]
        types, occurrences, stops = summary[:, summary[1] >= min_count]
        mean = stops / occurrences
        for name, key in (("lowest", mean), ("highest", -mean), ("all", mean)):
            order = np.lexsort((types, -occurrences, key))  # among ties, the more frequent first
            selected[name].update(types[order[: None if name == "all" else TOKENS]].tolist())
    ranks = results.ranks[block.side]
    return {name: np.sort(ranks[sorted(types)]) for name, types in selected.items()}


@styled
def draw_frequency(results: Results, min_count: int) -> Figure:
    """Violins with their median, one panel per side; a rank of 1 is the most frequent token."""
    looks = {"lowest": (DARK, None), "highest": (LIGHT, HATCH), "all": (MIDDLE, None)}
    sides = results.sides()
    most = max(len(results.blocks_of(side)) for side in sides)
    width = max(7, 1.6 * most * len(sides))
    figure, axes = panels(len(sides), width=width, height=3.6, sharey=True)
    for ax, side in zip(axes, sides):
        blocks = results.blocks_of(side)
        for i, block in enumerate(blocks):
            ranks = groups(results, block, min_count)
            for j, (name, look) in enumerate(looks.items()):
                if len(ranks[name]):
                    violin(ax, i + 0.28 * (j - 1), ranks[name], *look)
        ax.set_xticks(range(len(blocks)), [block.title for block in blocks])
        ax.set_xlim(-0.6, len(blocks) - 0.4)
        ax.set_ylim(bottom=0)
    axes[0].set_ylabel("rank in training frequency\n(1: the most frequent)")
    named = zip(("lowest RC", "highest RC", "all tokens"), looks.values())
    handles = [Patch(fc=c, hatch=hatch, ec="black", label=label) for label, (c, hatch) in named]
    figure.legend(handles=handles, loc="outside upper center", ncols=3)
    return figure


def violin(ax, x: float, values: np.ndarray, colour: str, hatch: str | None) -> None:
    """One violin; only the median if all values are equal."""
    if len(set(values)) > 1:
        parts = ax.violinplot([values], [x], widths=0.26, showextrema=False)
        for body in parts["bodies"]:
            body.set(facecolor=colour, edgecolor="black", alpha=1, hatch=hatch, linewidth=0.6)
    median = np.median(values)
    ax.plot(x, median, "o", color="white", markeredgecolor="black", markersize=5)
    look = {"bbox": {"facecolor": "white", "alpha": 0.8, "pad": 0.6, "lw": 0}, "va": "center"}
    offset = {"xytext": (5, 0), "textcoords": "offset points"}
    ax.annotate(f"{median:.0f}", (x, median), fontsize=8, **offset, **look)


# Expert load of each language as a heat map.


def loads(results: Results, block: Block) -> dict[str, np.ndarray]:
    """``(E,)`` load by language: source languages in the encoder, target languages in the decoder.

    A language model has a single load.
    """
    end = 0 if block.side == "encoder" else -1
    languages = defaultdict(list)
    for name in results.directions:
        languages[results.languages.get(name, name.split("-"))[end]].append(name)
    return {lang: results.over(names, block).load() for lang, names in languages.items()}


@styled
def draw_load(results: Results) -> Figure:
    """One panel per block; 1 is the mean number of first choices per expert."""
    tables = [loads(results, block) for block in results.blocks]
    experts = max(block.strata.num_experts for block in results.blocks)
    columns = 1 if experts > 10 else min(2, len(tables))
    height = 1.3 + 0.32 * max(map(len, tables))
    figure, axes = panels(len(tables), columns, max(7, 0.45 * experts), height)
    top = max(max(load.max() for load in table.values()) for table in tables)
    for ax, block, table in zip(axes, results.blocks, tables):
        values = np.stack(list(table.values()))
        image = heat_map(ax, values, 0, top, ".1f", size=8)
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
    figure.colorbar(image, ax=axes, shrink=0.8, label="load, 1: even", pad=0.02)
    return figure


# First choices dropped under training's capacity, by position in the sentence.


@styled
def draw_positions(check: CapacityCheck) -> Figure:
    """A panel per side, a bar per fifth of the sentence, over all MoE layers of the side."""
    sides = check.sides()
    figure, axes = panels(len(sides), height=2.8, sharey=True)
    for ax, side in zip(axes, sides):
        percent = check.percent_dropped(side)
        look = HATCHED if side == "decoder" else PLAIN
        bars = ax.bar(range(FIFTHS), percent, width=0.7, linewidth=0.6, **look)
        ax.bar_label(bars, fmt="%.1f", padding=3)
        ax.set_title(side)
        ax.set_xticks(range(FIFTHS), ["first", *map(str, range(2, FIFTHS)), "last"])
        ax.set_xlabel("fifth of the sentence")
        ax.margins(y=0.15)
    axes[0].set_ylabel("first choices dropped, %")
    return figure


# The requested capacity of one sentence's tokens.

PER_ROW = 16  # tokens; a longer sentence has several rows


@styled
def draw_sentence(sides: list[SentenceSide]) -> Figure:
    """One row of cells per block, a column per token; a number has the same shade everywhere."""
    most = max(len(block.strata) for side in sides for block in side.blocks)
    parts = [(side, start) for side in sides for start in range(0, len(side.tokens), PER_ROW)]
    heights = [0.75 + 0.3 * len(side.blocks) for side, _ in parts]
    ratios = {"height_ratios": heights}
    figure, axes = new(len(parts), 1, width=7.6, height=sum(heights), gridspec_kw=ratios)
    for ax, (side, start) in zip(axes[:, 0], parts):
        panel(ax, side, start, most)
    return figure


def panel(ax, side: SentenceSide, start: int, most: int) -> None:
    """Up to `PER_ROW` tokens, from index ``start`` on."""
    tokens = side.tokens[start : start + PER_ROW]
    values = np.array([row[start : start + PER_ROW] for row in side.requested])
    heat_map(ax, values, 0.5, most, "d", size=9)
    ax.set_xticks(range(len(tokens)), tokens, rotation=40, ha="left", rotation_mode="anchor")
    ax.xaxis.tick_top()
    ax.set_yticks(range(len(side.blocks)), [block.title for block in side.blocks])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_xlim(-0.5, PER_ROW - 0.5)


# Requested capacity and expert load over the course of training.

Series = dict[str, dict[int, float]]

DROPPED = {
    "overflow_expert1": ("first choices", DARK, "-"),
    "overflow_expert2": ("second choices", LIGHT, "--"),
}
COLOURS = (MIDDLE, "#3f6ea8", LIGHT, "#a2641b", "black", "#9dbcdc")


@styled
def draw_training(series: Series) -> Figure:
    """Requested capacity and load, of each block if the log has blocks (JSON).

    For a log without blocks, the second panel shows dropped copies, if there are any.
    """
    blocks = {name.split("/")[0] for name in series if "/" in name}
    blocks = sorted(blocks, key=lambda b: (b.startswith("decoder"), int(b.split(".")[-1])))
    dropped = [name for name in DROPPED if any(series.get(name, {}).values())]
    figure, axes = panels(2 if blocks or dropped else 1, height=3.4)
    looks = {b: (COLOURS[i % len(COLOURS)], "--" if i % 2 else "-") for i, b in enumerate(blocks)}
    if "requested_capacity" in series:
        line(axes[0], series["requested_capacity"], "all blocks", DARK, "-", width=2.5)
    for block in blocks:
        line(axes[0], series.get(f"{block}/requested_capacity", {}), block, *looks[block])
        line(axes[1], busiest(series, block), block, *looks[block])
    for name in [] if blocks else dropped:
        label, colour, style = DROPPED[name]
        line(axes[1], series[name], label, colour, style)
    second = "load of the busiest expert (1: even)" if blocks else "dropped for lack of capacity, %"
    for ax, title in zip(axes, ("requested capacity", second)):
        ax.set_title(title)
        ax.set_xlabel("update")
        ax.legend(fontsize=8)
        ax.margins(y=0.15)
    return figure


def busiest(series: Series, block: str) -> dict[int, float]:
    """Load of a block's busiest expert by update, at the gate where it is highest."""
    highest: dict[int, float] = {}
    for name, values in series.items():
        if name.startswith(f"{block}/") and name.endswith("/load_max"):
            highest |= {u: max(value, highest.get(u, value)) for u, value in values.items()}
    return highest


def line(ax, values: dict[int, float], label: str, colour: str, style: str, width=1.3) -> None:
    updates = sorted(values)
    ax.plot(updates, [values[u] for u in updates], style, color=colour, lw=width, label=label)
