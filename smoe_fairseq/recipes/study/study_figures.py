"""Pictures of a study: what training costs and brings, and scores by direction."""

import statistics
from collections.abc import Mapping, Sequence

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
    """Validation loss over FLOPs of training (``flops``: forward, per target token) and over seconds."""
    figure, axes = new(1, 2, height=4.2)
    colours = _colours(systems)
    for method, results in systems.items():
        colour = colours[method]
        for i, result in enumerate(results):
            rows = [row for row in result.curve if row["validation_nll"] is not None]
            losses = [row["validation_nll"] for row in rows]
            label = method if i == 0 else None
            if method in flops:
                spent = [3 * flops[method] * row["words"] / 1e12 for row in rows]
                axes[0][0].plot(spent, losses, "o-", ms=2.5, lw=1, color=colour, label=label)
            hours = [row["seconds"] / 3600 for row in rows]
            axes[0][1].plot(hours, losses, "o-", ms=2.5, lw=1, color=colour, label=label)
    axes[0][0].set_xlabel("training, TFLOP")
    axes[0][1].set_xlabel("hours of training")
    for ax in axes[0]:
        ax.set_title("validation loss (bits per token)")
    _legend(figure, axes[0][1])
    return figure


@styled
def draw_directions(systems: Systems, baseline: str) -> Figure:
    """BLEU by direction above that of the baseline: means over seeds, and each seed as a small dot."""
    figure, axes = new(1, 1, width=9.0, height=4.2)
    colours = _colours(systems)
    ax = axes[0][0]
    directions = list(systems[baseline][0].scores)
    base = {d: _mean(systems[baseline], d) for d in directions}
    others = [method for method in systems if method != baseline]
    for i, method in enumerate(others):
        shift = (i + 0.5) / len(others) * 0.8 - 0.4
        at = [k + shift for k in range(len(directions))]
        ax.bar(
            at,
            [_mean(systems[method], d) - base[d] for d in directions],
            width=0.8 / len(others),
            color=colours[method],
            label=method,
        )
        for result in systems[method]:
            points = [result.scores[d].bleu - base[d] for d in directions]
            ax.plot(at, points, "o", ms=3, color="black", mec="white", mew=0.5)
    ax.axhline(0, color="black", lw=0.8)
    ax.set_xticks(range(len(directions)), directions)
    ax.set_title(f"BLEU above {baseline}, by direction")
    _legend(figure, ax)
    return figure


def _legend(figure: Figure, ax) -> None:
    """Below all axes, where no curve is."""
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncol=6, fontsize=8)


def _mean(results: Sequence[Result], direction: str) -> float:
    return statistics.fmean(result.scores[direction].bleu for result in results)


def _colours(systems) -> dict[str, str]:
    """Of a method the same in all pictures."""
    return {method: COLOURS[i % len(COLOURS)] for i, method in enumerate(systems)}
