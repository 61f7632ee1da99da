"""The plot of a run, drawn when training ends: losses, translation scores and learning rate by update."""

from pathlib import Path

from smoe_fairseq.analysis.training_log import UPDATES, read_lines, read_validations
from smoe_fairseq.errors import UsageError, quietly

STEM = "training"  # of the files in the run's folder
MIN_POINTS = 2  # of the longest curve; shorter ones are not drawn
FEW = 20  # points of a curve that are marked, as a single one could not be seen otherwise
LOSS, SCORES, RATE = "nll_loss, bits per token", "score of translations", "learning rate"
# Panel and curve, by name in the log, of training and of validation.
CURVES = {
    "nll_loss": (LOSS, "training"),
    "lr": (RATE, "learning rate"),
    "valid nll_loss": (LOSS, "validation"),
    "valid chrf": (SCORES, "chrF++"),
    "valid bleu": (SCORES, "BLEU"),
}

Curves = dict[str, dict[str, dict[int, float]]]  # value by update, by panel and curve


def read_curves(log: Path) -> Curves:
    """The `CURVES` in a run's log; a repeated update has its last value."""
    curves: Curves = {}
    training = (values for values in read_lines(log) if "wpb" in values)  # not an epoch's summary
    for kind, lines in (("", training), ("valid ", read_validations(log))):
        for values in lines:
            for name in values:
                if kind + name in CURVES:
                    panel, curve = CURVES[kind + name]
                    at = curves.setdefault(panel, {}).setdefault(curve, {})
                    at[int(values[UPDATES])] = values[name]
    return curves


def draw(folder: Path, log: Path) -> Path:
    """Draw ``training.png`` (returned) and ``.svg``; raises UsageError without matplotlib, log or points."""
    by_panel = read_curves(log)
    lengths = (len(points) for curves in by_panel.values() for points in curves.values())
    if max(lengths, default=0) < MIN_POINTS:
        raise UsageError(f"{log} has fewer than two lines with a loss (--log-interval)")
    with quietly():
        from smoe_fairseq.analysis import figures  # imports matplotlib, perhaps missing
    panels = [panel for panel in (LOSS, SCORES, RATE) if panel in by_panel]

    @figures.styled
    def picture():
        figure, axes = figures.panels(len(panels), width=3.6 * len(panels))
        for ax, panel in zip(axes, panels, strict=True):
            named = sorted(by_panel[panel].items(), reverse=True)
            for (curve, points), shade in zip(named, (figures.DARK, figures.MIDDLE)):
                dots = "." if len(points) < FEW else ""
                ax.plot(*zip(*sorted(points.items())), color=shade, label=curve, marker=dots)
            ax.set_title(panel)
            ax.set_xlabel("update")
            if len(by_panel[panel]) > 1:
                ax.legend()
        return figure

    figures.save(picture(), folder / STEM)
    return folder / f"{STEM}.png"
