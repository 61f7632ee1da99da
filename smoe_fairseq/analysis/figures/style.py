"""What all pictures share: colours that stay apart in grey, sizes, and how they are saved."""

import functools
from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from smoe_fairseq.system.files import whole_file  # noqa: E402

DARK, LIGHT, MIDDLE = "#1d3f72", "#f0b45f", "#7f8c9a"  # luminance 0.05, 0.53, 0.25
HATCH = "///"
SHADES = "Blues"  # light to dark, so it is read in grey as well

STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "smoe",  # the same picture, the same file
    "svg.fonttype": "none",
    "text.parse_math": False,  # a token such as $$ is a token
}


def styled(draw):
    """Decorates a function that draws, so that all pictures look the same."""

    @functools.wraps(draw)
    def draw_styled(*arguments, **options):
        with plt.rc_context(STYLE):
            return draw(*arguments, **options)

    return draw_styled


def new(rows: int = 1, columns: int = 1, width: float = 7.0, height: float = 3.0, **options):
    """Figure and ``(rows, columns)`` array of axes, in inches."""
    return plt.subplots(rows, columns, figsize=(width, height), squeeze=False, **options)


def save(figure: Figure, stem: Path) -> None:
    """``stem.png`` and ``stem.svg``, each whole or not at all; closes the figure."""
    try:
        with plt.rc_context(STYLE):
            for kind, options in (("png", {"dpi": 130}), ("svg", {"metadata": {"Date": None}})):
                file = stem.with_name(f"{stem.name}.{kind}")
                with whole_file(file, called=file.name) as partial:
                    figure.savefig(partial, format=kind, **options)
    finally:
        plt.close(figure)


def text_on(share: float) -> str:
    """Colour of text on a shade: ``share`` 0 is the lightest, 1 the darkest."""
    return "white" if share > 0.55 else "black"
