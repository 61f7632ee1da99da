"""Draws family.png: which experts the same eight tokens have in each system of the wider family.

The gates themselves choose, with weights that are drawn and not trained. Run `python docs/images/family.py`.
"""

from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Patch, Rectangle

from smoe_fairseq.modules import StratifiedMoE

TOKENS, DIM, EXPERTS = 8, 16, 6
EMPTY, GRID, NETWORK, NULL = "#f4f4f4", "#c8c8c8", "#f0b45f", "#7f8c9a"
WEIGHTS = LinearSegmentedColormap.from_list("weights", ["#bcd0ea", "#1d3f72"])
PLACES = 15.5  # width of a system, in columns

# Name, where its numbers differ, and the blocks that its tokens pass one after the other.
SIX = {"strata": str(EXPERTS)}
STRATA = {"strata": "3-3"}
SYSTEMS = [
    ("mixture, top-2", "all tokens 2 of 6", SIX),
    ("Switch, top-1", "all tokens 1", SIX | {"top_k": 1}),
    ("top-p 0.4", "more where the gate is unsure", SIX | {"gate": "top-p"}),
    ("null experts, top-4", "less the null ones (hatched)", SIX | {"top_k": 4, "null_experts": 6}),
    ("hash", "by the token's id, no gate", SIX | {"gate": "hash"}),
    ("BASE, in training", "columns are balanced", SIX | {"gate": "base"}),
    ("expert choice", "each column takes its best rows", SIX | {"gate": "expert-choice"}),
    ("CMR", "a gate between network and experts", SIX | {"cmr": True}),
    ("residual (PR-MoE)", "1 and a network", SIX | {"top_k": 1, "residual": True}),
    ("pyramid 2,6", "two layers of unequal size", {"top_k": 1, "residual": True}, ("2", "6")),
    (
        "shared and fine-grained",
        "a network and 3 of 12 narrow ones",
        {"strata": "12", "top_k": 3, "shared_experts": 1, "expert_ffn_dim": 1},
    ),
    ("chain of 2", "all tokens choose twice", SIX | {"chain": 2}),
    ("stacked 3-3", "no gate sees the other layer", STRATA | {"stacked": True}),
    ("SMoE 3-3", "by the first choice once or twice", STRATA),
    ("SMoE 3-3, exit bias 1", "fewer stop twice", STRATA | {"exit_bias": 1.0}),
    ("SMoE 2-2-2", "once, twice or three times", {"strata": "2-2-2"}),
]


class Stop(NamedTuple):
    """What one gate chose."""

    own: int  # number of the first expert that it sees
    end: int  # behind the last one
    nulls: int
    weights: dict[int, dict[int, float]]  # token -> expert -> weight
    null_choices: dict[int, int]
    network: torch.Tensor | None  # weight for each token of what stands beside the experts


def stops_of(x_TD: torch.Tensor, **options) -> list[Stop]:
    """The choices of all gates of a block, whose experts answer 0, so that tokens stay as they are."""
    if options.get("gate") == "hash":
        options["hash_table"] = torch.tensor([3, 0, 5, 3, 1, 4, 2, 0])
    options.setdefault("capacity_factor", 2.0 if options.get("gate") == "expert-choice" else 0.0)
    block = StratifiedMoE(DIM, 4, **{"second_expert_policy": "all", **options})
    block.train("exit_bias" not in options)
    generator = torch.Generator().manual_seed(5)
    for gate in block.gates:
        for weight in gate.parameters():
            with torch.no_grad():
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.22)
    h_TD = block.layer_norms[0](x_TD)
    position_T = torch.zeros(TOKENS, dtype=torch.long)
    found = []
    for i, gate in enumerate(block.gates):
        here = (position_T == i).nonzero().flatten()
        labels = {"id": [here], "sentence": [torch.zeros_like(here)], None: []}[gate.extra_input]
        routing = gate(h_TD[here], None, *labels)
        first = block.strata.first_experts[i]
        weights, nulls = {}, {}
        rows = zip(here.tolist(), routing.expert_TK.tolist(), routing.weight_TK.tolist())
        for token, experts, shares in rows:
            weights[token] = {first + e: w for e, w in zip(experts, shares) if e < gate.num_experts}
            nulls[token] = len(experts) - len(weights[token])
        network = None
        if block.shared is not None:
            network = torch.ones(TOKENS)
        elif block.residual is not None:
            network = block.residual.mix(h_TD).softmax(1)[:, 1]
        elif block.cmr is not None:
            network = 1 - block.cmr.gate(h_TD).sigmoid().flatten()
        num_nulls = options.get("null_experts", 0)
        found.append(Stop(first, first + gate.num_experts, num_nulls, weights, nulls, network))
        chosen_T = block.stratum_of_expert[routing.first_choice_T + first]
        position_T[here] = i + 1 if block.strata.fixed_depth else chosen_T + 1
    return found


def choices() -> dict[str, list[Stop]]:
    """Of every system, by its name, for the same tokens."""
    torch.manual_seed(2)
    x_TD = torch.randn(TOKENS, DIM)
    found = {}
    for name, _, options, *layers in SYSTEMS:
        layers = [{"strata": strata} for strata in layers[0]] if layers else [{}]
        with torch.no_grad():
            found[name] = [stop for layer in layers for stop in stops_of(x_TD, **options, **layer)]
    return found


def experts_of_tokens(stops: list[Stop]) -> list[int]:
    return [sum(len(stop.weights.get(token, ())) for stop in stops) for token in range(TOKENS)]


def draw(ax, title: str, differs: str, stops: list[Stop]) -> None:
    """Tokens are rows; a group of columns is what one gate chooses from."""
    ax.set(xlim=(-1.0, PLACES), ylim=(TOKENS + 0.2, -2.6), aspect="equal")
    ax.axis("off")
    ax.text(0, -1.75, title, weight="bold", fontsize=9)
    ax.text(0, -0.75, differs, fontsize=7.5, color="#444444")
    x = 0.0
    for token in range(TOKENS):
        ax.text(-0.35, token + 0.5, "abcdefgh"[token], ha="right", va="center", fontsize=7.5)
    for stop in stops:
        columns = stop.end - stop.own + stop.nulls
        width = 0.5 if columns > EXPERTS else 1.0
        for column in range(stop.own, stop.own + columns):
            left = x + (column - stop.own) * width
            for token in range(TOKENS):
                weight = stop.weights.get(token, {}).get(column)
                null = column >= stop.end
                color = EMPTY if weight is None else WEIGHTS(weight)
                hatch = (
                    "////" if null and column - stop.end < stop.null_choices.get(token, 0) else ""
                )
                look = {"fc": color, "ec": NULL if hatch else GRID, "lw": 0.5, "hatch": hatch}
                ax.add_patch(Rectangle((left, token), width, 1, **look))
        x += columns * width
        if stop.network is not None:
            for token, weight in enumerate(stop.network.tolist()):
                look = {"fc": NETWORK, "alpha": 0.25 + 0.75 * weight, "ec": GRID, "lw": 0.5}
                ax.add_patch(Rectangle((x + 0.2, token), 1, 1, **look))
            x += 1.2
        x += 0.6
    for token, count in enumerate(experts_of_tokens(stops)):
        ax.text(x + 0.1, token + 0.5, count, ha="left", va="center", fontsize=7.5, weight="bold")


def main() -> None:
    plt.rcParams["hatch.linewidth"] = 0.6
    figure, axes = plt.subplots(4, 4, figsize=(10.4, 8.0), dpi=110)
    found = choices()
    for ax, (name, differs, *_) in zip(axes.flat, SYSTEMS, strict=True):
        draw(ax, name, differs, found[name])
    colors = {"an expert, darker by its weight": WEIGHTS(0.7), "a network for all tokens": NETWORK}
    handles = [Patch(fc=color, ec=GRID, label=label) for label, color in colors.items()]
    handles.append(
        Patch(fc=EMPTY, ec=NULL, hatch="////", label="null experts, as many as were chosen")
    )
    handles.append(Patch(fc="none", ec="none", label="right: experts of each token"))
    figure.legend(handles=handles, loc="lower center", ncol=4, frameon=False, fontsize=9)
    figure.subplots_adjust(0.01, 0.05, 0.99, 0.99, wspace=0.02, hspace=0.02)
    figure.savefig(Path(__file__).with_name("family.png"), facecolor="white")


if __name__ == "__main__":
    main()
