"""Requested capacity, quality and time over the exit bias."""

from matplotlib.figure import Figure

from smoe_fairseq.analysis.exit_curve import Curve
from smoe_fairseq.analysis.figures.style import DARK, new, styled


@styled
def draw(curve: Curve) -> Figure:
    """A panel for each, over the biases."""
    figure, axes = new(1, 3, width=9.0, height=3.0)
    panels = {
        "requested capacity": (curve.mean("requested_capacity"), "{:.2f}"),
        "BLEU": (curve.mean("bleu"), "{:.1f}"),
        "ms per sentence": (curve.milliseconds(), "{:.1f}"),
    }
    for ax, (title, (values, shown)) in zip(axes[0], panels.items()):
        ax.plot(curve.biases, values, color=DARK, marker="o", lw=2)
        for n, point in enumerate(zip(curve.biases, values)):
            above = n % 2 == 0  # in turns, since biases may lie close together
            ax.annotate(
                shown.format(point[1]),
                point,
                (0, 6 if above else -6),
                textcoords="offset points",
                ha="center",
                va="bottom" if above else "top",
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5},
            )
        ax.set_title(title)
        ax.set_xlabel("exit bias")
        ax.margins(x=0.12, y=0.2)
        if title == "ms per sentence":
            ax.set_ylim(0, 1.3 * max(values) or 1)
    return figure
