"""Requested capacity by depth (the paper's figure 5)."""

from matplotlib.figure import Figure

from smoe_fairseq.analysis.figures.style import DARK, LIGHT, MIDDLE, new, styled
from smoe_fairseq.analysis.results import Results


@styled
def draw(results: Results) -> Figure:
    """One thin line per direction, a thick one over all tokens; encoder layers, then decoder layers."""
    sides = results.sides()
    figure, axes = new(1, len(sides), height=3.2, sharey=True)
    pivot = results.pivot()
    for ax, side in zip(axes[0], sides):
        blocks = [block for block in results.blocks if block.side == side]
        x = range(len(blocks))
        for name in results.directions:
            out_of = pivot is not None and name.startswith(f"{pivot}-")
            means = [results.of(name, block).requested_capacity for block in blocks]
            label = None if pivot is None else f"{'out of' if out_of else 'into'} {pivot}"
            look = {"color": LIGHT if out_of else MIDDLE, "linestyle": "--" if out_of else "-"}
            ax.plot(x, means, marker="^" if out_of else "o", lw=1, label=label, **look)
        means = [results.over(results.directions, b).requested_capacity for b in blocks]
        ax.plot(x, means, color=DARK, marker="s", lw=2.5, markersize=7, label="all tokens")
        for i, mean in enumerate(means):
            ax.annotate(f"{mean:.2f}", (i, mean), (0, 7), textcoords="offset points", ha="center")
        ax.set_title(side)
        ax.set_xticks(x, [block.title.split()[-1] for block in blocks])
        ax.set_xlim(-0.5, len(blocks) - 0.3)
        ax.set_xlabel("layer")
    axes[0, 0].set_ylabel("requested capacity")
    handles = {h.get_label(): h for h in axes[0, -1].lines if not h.get_label().startswith("_")}
    figure.legend(handles=handles.values(), loc="outside upper center", ncols=3)
    return figure
