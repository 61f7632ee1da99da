"""Requested capacity of each direction, encoder and decoder (the paper's figure 3)."""

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from smoe_fairseq.analysis.figures.style import DARK, HATCH, LIGHT, new, styled
from smoe_fairseq.analysis.results import Results


@styled
def draw(results: Results) -> Figure:
    """Bars from the direction with most training data down, into and out of the common language."""
    names = results.by_resource()
    pivot = results.pivot()
    sides = results.sides()
    figure, axes = new(1, len(sides), height=1.5 + 0.28 * len(names), sharex=True, sharey=True)
    for ax, side in zip(axes[0], sides):
        means = [results.mean(name, side) for name in names]
        for i, (name, mean) in enumerate(zip(names, means)):
            out_of = pivot is not None and name.startswith(f"{pivot}-")
            ax.barh(
                *(i, mean),
                color=LIGHT if out_of else DARK,
                hatch=HATCH if out_of else None,
                edgecolor="black" if out_of else DARK,
                linewidth=0.5,
            )
            ax.text(mean, i, f" {mean:.2f}", va="center", fontsize=9)
        ax.set_title(side)
        ax.set_xlabel("requested capacity, mean over tokens")
        ax.margins(x=0.16)
        ax.axvline(1, color="black", linewidth=0.6, linestyle=":")
    axes[0, 0].set_yticks(range(len(names)), names)
    axes[0, 0].invert_yaxis()
    if pivot is not None:
        into = Patch(facecolor=DARK, label=f"into {pivot}")
        out = Patch(facecolor=LIGHT, edgecolor="black", hatch=HATCH, label=f"out of {pivot}")
        figure.legend(handles=[into, out], loc="outside upper center", ncols=2)
    return figure
