"""Requested capacity and expert load over the course of training."""

from matplotlib.figure import Figure

from smoe_fairseq.analysis.figures.style import DARK, LIGHT, MIDDLE, new, styled

Series = dict[str, dict[int, float]]

DROPPED = {
    "overflow_expert1": ("first choices", DARK, "-"),
    "overflow_expert2": ("second choices", LIGHT, "--"),
}
COLOURS = (MIDDLE, "#3f6ea8", LIGHT, "#a2641b", "black", "#9dbcdc")


@styled
def draw(series: Series) -> Figure:
    """Requested capacity, beside it the load; each block by itself where the log has it (JSON)."""
    figure, axes = new(1, 2, height=3.4)
    requested, load = axes[0]
    if "requested_capacity" in series:
        line(requested, series["requested_capacity"], "all blocks", DARK, "-", width=2.5)
    blocks = sorted({name.split("/")[0] for name in series if "/" in name}, key=_depth)
    looks = {b: (COLOURS[i % len(COLOURS)], "--" if i % 2 else "-") for i, b in enumerate(blocks)}
    for block in blocks:
        line(requested, series.get(f"{block}/requested_capacity", {}), block, *looks[block])
    requested.set_title("requested capacity")
    if blocks:
        for block in blocks:
            line(load, busiest(series, block), block, *looks[block])
        load.set_title("load of the busiest expert (1: even)")
    else:
        for name, (label, colour, style) in DROPPED.items():
            if name in series:
                line(load, series[name], label, colour, style)
        load.set_title("dropped for lack of capacity, %")
    for ax in axes[0]:
        ax.set_xlabel("update")
        ax.legend(fontsize=8)
        ax.margins(y=0.15)
    return figure


def busiest(series: Series, block: str) -> dict[int, float]:
    """Load of a block's busiest expert by update, at the gate where it is highest."""
    gates = [
        values
        for name, values in series.items()
        if name.startswith(f"{block}/") and name.endswith("/load_max")
    ]
    updates = sorted({update for gate in gates for update in gate})
    return {update: max(gate[update] for gate in gates if update in gate) for update in updates}


def _depth(block: str) -> tuple[bool, int]:
    side, _, layer = block.split(".")
    return side == "decoder", int(layer)


def line(ax, values: dict[int, float], label: str, colour: str, style: str, width=1.3) -> None:
    updates = sorted(values)
    ax.plot(updates, [values[u] for u in updates], style, color=colour, lw=width, label=label)
