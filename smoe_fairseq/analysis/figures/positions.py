"""First choices dropped under training's capacity, by position in the sentence."""

from matplotlib.figure import Figure

from smoe_fairseq.analysis.capacity_check import CapacityCheck
from smoe_fairseq.analysis.figures.style import DARK, HATCH, LIGHT, new, styled
from smoe_fairseq.modules.drops import FIFTHS


@styled
def draw(check: CapacityCheck) -> Figure:
    """A panel per side, a bar per fifth of the sentence; all MoE layers of a side taken together."""
    sides = check.sides()
    figure, axes = new(1, len(sides), height=2.8, sharey=True)
    for ax, side in zip(axes[0], sides):
        percent = check.percent_dropped(side)
        look = {"color": LIGHT} if side == "decoder" else {"color": DARK}
        look |= {"hatch": HATCH, "edgecolor": "black"} if side == "decoder" else {}
        ax.bar(range(FIFTHS), percent, width=0.7, linewidth=0.6, **look)
        for i, value in enumerate(percent):
            ax.annotate(f"{value:.1f}", (i, value), (0, 3), textcoords="offset points", ha="center")
        ax.set_title(side)
        ax.set_xticks(range(FIFTHS), ["first", *map(str, range(2, FIFTHS)), "last"])
        ax.set_xlabel("fifth of the sentence")
        ax.margins(y=0.15)
    axes[0, 0].set_ylabel("first choices dropped, %")
    return figure
