"""One picture of a run: time over the floor, by tokens, by experts and by strata."""

from pathlib import Path

from benchmarks.cases import DEPTHS, EXPERTS, STRATA


def draw(results: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    train = [result for result in results if result["mode"] == "train"]
    timed = [size for size in ("base", "big") if any(r["size"] == size for r in train)]
    panels = len(timed) + 2
    figure, axes = pyplot.subplots(1, panels, figsize=(4 * panels, 4), sharey=True)
    for axis, size in zip(axes, timed):
        for strata in STRATA:
            line(
                axis,
                [r for r in train if r["size"] == size and r["strata"] == strata],
                "tokens",
                strata,
            )
        axis.set_title(f"{size}, training, by tokens")
    at_4096 = [r for r in train if r["size"] == "base" and r["tokens"] == 4096]
    for axis, names, title in ((axes[-2], EXPERTS, "experts"), (axes[-1], DEPTHS, "strata")):
        swept = [r for r in at_4096 if r["strata"] in names]
        points = [{**r, "experts": sum(sizes(r)), "strata": len(sizes(r))} for r in swept]
        line(axis, points, title, "ours")
        axis.set_title(f"base, training, by {title}")
    peers = dict.fromkeys(name for result in train for name in result["agreement"])
    for name in peers:
        line(
            axes[0],
            [r for r in train if r["size"] == "base" and r["strata"] == "8"],
            "tokens",
            name,
            name,
        )
    for axis in axes:
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
    axes[0].set_ylabel("time / bare matrix products")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def sizes(result: dict) -> list[int]:
    return [int(size) for size in result["strata"].split("-")]


def line(axis, results: list[dict], x: str, label: str, name: str = "ours") -> None:
    """Medians with quartiles; peers dashed."""
    results = sorted((r for r in results if name in r["over_floor"]), key=lambda r: r[x])
    if not results:
        return
    ratios = [result["over_floor"][name] for result in results]
    medians = [ratio["median"] for ratio in ratios]
    below = [ratio["median"] - ratio["low"] for ratio in ratios]
    above = [ratio["high"] - ratio["median"] for ratio in ratios]
    style = "-o" if name == "ours" else "--x"
    at = [result[x] for result in results]
    axis.errorbar(
        at, medians, yerr=[below, above], fmt=style, label=label, markersize=4, linewidth=1
    )
