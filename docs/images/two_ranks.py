"""Draws two_ranks.png: a token's way through two ranks in one stratum pass.

Four experts in the strata "2-2" over two processes, three tokens on each; who goes where follows from
CHOICES. Run `python docs/images/two_ranks.py`.
"""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch, Patch

CHOICES = [  # of each rank: token -> first and second choice
    {"a": (0, 3), "b": (1, 2), "c": (2, 1)},
    {"d": (0, 2), "e": (2, 3), "f": (3, 0)},
]
SHOWN = "c"
LOCAL = [(0, 1), (2, 3)]  # the experts of each rank

STRONG, GREY, PANEL = "#d81b60", "#b4b4b4", "#f6f6f6"
REPLICATED, SHARDED = "#cfe3f5", "#fbd9a5"
LEFT, WIDTH, GUTTER, HIGH = 1.22, 2.82, 0.22, 9.1  # inches, as all lengths here; y goes down
SIDE = 0.26  # of a token's square
CLEAR = {"fc": PANEL, "ec": "none", "pad": 1}
Y = {"x": 0.85, "norm": 1.32, "gate": 1.72, "copies": 2.55, "counts": 3.3}
Y |= {"rows": 4.75, "experts": 5.22, "back": 6.55, "sum": 7.15, "y": 7.62, "next": 8.22}

fig = plt.figure(figsize=(LEFT + 2 * WIDTH + GUTTER + 0.08, HIGH), dpi=150)
ax = fig.add_axes((0, 0, 1, 1), xlim=(0, fig.get_figwidth()), ylim=(HIGH, 0))
ax.axis("off")


def middle(rank):
    return LEFT + rank * (WIDTH + GUTTER) + WIDTH / 2


def write(x, y, text, **kwargs):
    ax.text(x, y, text, **{"ha": "center", "va": "center", "fontsize": 9, "zorder": 6} | kwargs)


def box(x, y, width, height, text="", color="white", edge="#666666", **kwargs):
    frame = (x - width / 2, y - height / 2), width, height, "round,pad=0,rounding_size=0.05"
    ax.add_patch(FancyBboxPatch(*frame, fc=color, ec=edge, lw=0.8, zorder=3))
    write(x, y, text, **kwargs)


def square(x, y, token):
    strong = token == SHOWN
    style = {"fc": STRONG if strong else "white", "ec": "#666666", "lw": 0.8, "zorder": 5}
    ax.add_patch(plt.Rectangle((x - SIDE / 2, y - SIDE / 2), SIDE, SIDE, **style))
    look = {"color": "white", "weight": "bold"} if strong else {"color": "#444444"}
    write(x, y + 0.005, token, fontsize=10, **look)


def line(start, end, token, choice=0):
    strong = token == SHOWN
    look = {"color": STRONG, "lw": 2.4, "ls": "--" if choice else "-", "zorder": 2.5}
    ax.plot(*zip(start, end), **look if strong else {"color": GREY, "lw": 0.9, "zorder": 2})


def places(rank, groups):
    """x of each copy, those of an expert together; middle and width of each expert's."""
    step, gap = SIDE + 0.05, 0.2
    x = middle(rank) - (sum(map(len, groups)) * step + (len(groups) - 1) * gap) / 2
    of_copy, of_group = {}, []
    for group in groups:
        of_copy |= {copy: x + (i + 0.5) * step for i, copy in enumerate(group)}
        of_group.append((x + len(group) * step / 2, len(group) * step))
        x += len(group) * step + gap
    return of_copy, of_group


copies = [(r, t, k, e) for r in (0, 1) for t, es in CHOICES[r].items() for k, e in enumerate(es)]
sent = [[[c for c in copies if c[0] == r and c[3] == e] for e in range(4)] for r in (0, 1)]
arrived = [[[c for c in copies if c[3] == e] for e in LOCAL[r]] for r in (0, 1)]
before = {c: x for r in (0, 1) for c, x in places(r, sent[r])[0].items()}
at_expert = {c: x for r in (0, 1) for c, x in places(r, arrived[r])[0].items()}

for r in (0, 1):
    mid = middle(r)
    ax.add_patch(plt.Rectangle((mid - WIDTH / 2, 0.05), WIDTH, HIGH - 0.6, fc=PANEL))
    write(mid, 0.21, f"rank {r}", fontsize=11, weight="bold")
    write(mid, 0.45, f"holds experts {LOCAL[r][0]} and {LOCAL[r][1]}: stratum {r + 1}")

    # The residual goes around, on the outer side.
    side = mid + (WIDTH / 2 - 0.11) * (1 if r else -1)
    ax.plot([mid, side, side, mid], [Y["x"]] * 2 + [Y["sum"]] * 2, color=GREY, lw=0.9, zorder=2)
    write(side, 4.05, "residual", rotation=90, color="#666666", bbox=CLEAR)
    box(mid, Y["x"], 1.8, SIDE + 0.1, color=PANEL, edge=GREY)
    box(mid, Y["y"], 1.8, SIDE + 0.1, color=PANEL, edge=GREY)
    box(mid, Y["norm"], 2.2, 0.27, "layer norm", REPLICATED)
    box(mid, Y["gate"], 2.2, 0.27, "gate 1 picks 2 of 4 experts", REPLICATED)
    ways = (r, r), (r, 1 - r), (1 - r, r)
    n = [" + ".join(str(len(sent[a][e])) for e in LOCAL[b]) for a, b in ways]
    text = f"keeps {n[0]} rows\nsends {n[1]}, gets {n[2]}"
    box(mid, Y["counts"], 2.2, 0.44, text, linespacing=1.3)
    box(mid, Y["sum"], 2.2, 0.27, "x + Σ weight · output")
    box(mid - 0.62, Y["next"], 0.98, 0.27, "gate 2", REPLICATED)
    box(mid + 0.55, Y["next"], 1.2, 0.27, "leaves the block")
    for e, (x, _) in enumerate(places(r, sent[r])[1]):
        write(x, Y["copies"] + 0.28, f"E{e}", bbox=CLEAR)
    for e, (x, width) in zip(LOCAL[r], places(r, arrived[r])[1]):
        box(x, Y["experts"], width + 0.08, 0.3, f"expert {e}", SHARDED)

    for (t, (first, _)), x in zip(CHOICES[r].items(), (mid - 0.6, mid, mid + 0.6)):
        for start, end, at in (("x", "gate", "x"), ("sum", "y", "y")):
            line((x, Y[start]), (x, Y[end]), t)
            square(x, Y[at], t)
        to = mid - 0.62 if first < 2 else mid + 0.55
        line((x, Y["y"] + SIDE / 2), (to + (x - mid) / 4, Y["next"] - 0.13), t)
        for copy in (c for c in copies if c[1] == t):
            spread = 0.06 if before[copy] > x else -0.06
            line((x + spread, Y["gate"] + 0.135), (before[copy], Y["copies"] - 0.13), t, copy[2])
            line((before[copy], Y["back"] + 0.13), (x + spread, Y["sum"] - 0.135), t, copy[2])

for copy in copies:
    _, t, k, _ = copy
    way = [(before[copy], Y["copies"]), (before[copy], Y["counts"] + 0.22)]
    way += [(at_expert[copy], Y["rows"] - SIDE / 2), (at_expert[copy], Y["experts"] + 0.15)]
    for start, end in zip(way, way[1:] + [(before[copy], Y["back"] - SIDE / 2)]):
        line(start, end, t, k)
    for x, row in ((before, "copies"), (at_expert, "rows"), (before, "back")):
        square(x[copy], Y[row], t)

reach = (middle(0) + 1.12, Y["counts"]), (middle(1) - 1.12, Y["counts"])
ax.annotate("", *reach, arrowprops={"arrowstyle": "<->", "color": "#333333", "lw": 1.3})
labels = {
    Y["x"]: "tokens x",
    Y["copies"]: "two copies\nof each token,\nby expert",
    Y["counts"]: "all-to-all 1\nrow counts\nper expert",
    (Y["counts"] + Y["rows"]) / 2 + 0.05: "all-to-all 2\nrows",
    Y["rows"]: "rows, by expert",
    (Y["experts"] + Y["back"]) / 2: "all-to-all 3\nrows back",
    Y["back"]: "outputs, in\nthe old order",
    Y["sum"]: "weighted sum\n+ residual",
    Y["y"]: "tokens y",
    Y["next"]: "next, by stratum\nof 1st choice",
}
for y, text in labels.items():
    weight = "bold" if text.startswith("all-to-all") else "normal"
    write(LEFT - 0.1, y, text, ha="right", linespacing=1.25, weight=weight)

handles = [Patch(fc=c, ec="#666666", lw=0.8) for c in (REPLICATED, SHARDED)]
handles += [Line2D([], [], color=STRONG, lw=2.4, ls=style) for style in ("-", (0, (2.2, 1.2)))]
handles.append(Line2D([], [], color=GREY, lw=0.9))
names = ["replicated", "sharded", f"token {SHOWN}: 1st choice", "2nd choice", "other tokens"]
spot = {"loc": "lower center", "bbox_to_anchor": (0.5, 0.002), "columnspacing": 1.4}
ax.legend(handles, names, ncol=5, frameon=False, fontsize=9, handlelength=2, **spot)
fig.savefig(Path(__file__).with_name("two_ranks.png"), facecolor="white")
