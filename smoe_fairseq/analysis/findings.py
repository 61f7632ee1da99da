"""A sentence on what each picture shows, with its numbers."""

import numpy as np

from smoe_fairseq.analysis.capacity_check import CapacityCheck
from smoe_fairseq.analysis.exit_curve import Curve
from smoe_fairseq.analysis.figures import frequency
from smoe_fairseq.analysis.results import Results
from smoe_fairseq.analysis.sentence import SentenceSide


def by_direction(results: Results) -> str:
    """The range of each side and, with a common language, of the directions into it."""
    parts = []
    for side in results.sides():
        means = {name: results.mean(name, side) for name in results.directions}
        low, high = min(means, key=means.get), max(means, key=means.get)
        parts.append(
            f"{side} tokens ask for {means[low]:.2f} ({low}) to {means[high]:.2f} ({high}) strata"
        )
    text = "On average " + "; ".join(parts) + "."
    pivot = results.pivot()
    into = [name for name in results.directions if pivot and name.endswith(f"-{pivot}")]
    if len(into) > 1 and "decoder" in results.sides():
        means = [results.mean(name, "decoder") for name in into]
        text += (
            f" Target tokens in {pivot} ask for {min(means):.3f} to {max(means):.3f}, depending on "
            "the source language."
        )
    return text


def token_frequency(results: Results, min_count: int) -> str:
    """Medians of each block's groups."""
    parts = []
    for block in results.blocks:
        groups = frequency.groups(results, block, min_count)
        if not all(len(ranks) for ranks in groups.values()):
            continue
        low, high, every = (np.median(groups[name]) for name in ("lowest", "highest", "all"))
        parts.append(f"{block.title}: {low:.0f} and {high:.0f} (all tokens: {every:.0f})")
    if not parts:
        return f"No token was seen {min_count} times."
    return (
        "Median training-frequency rank of the tokens that ask for least and for most: "
        + "; ".join(parts)
        + "."
    )


def by_depth(results: Results) -> str:
    """The first block against the later ones, side by side."""
    parts = []
    for side in results.sides():
        blocks = [block for block in results.blocks if block.side == side]
        means = [results.over(results.directions, block).requested_capacity for block in blocks]
        listed = ", ".join(f"{mean:.2f}" for mean in means)
        if len(means) == 1:
            parts.append(f"The {side} has one SMoE layer, which is asked for {listed}")
        else:
            most = blocks[int(np.argmax(means))].title
            parts.append(f"In the {side}, {most} is asked for most ({listed} from first to last)")
    return ". ".join(parts) + "."


def load(results: Results) -> str:
    """The busiest expert of each block."""
    parts = []
    for block in results.blocks:
        values = results.over(results.directions, block).load()
        parts.append(
            f"{block.title}: expert {int(values.argmax())} gets {values.max():.1f} times, expert "
            f"{int(values.argmin())} {values.min():.1f} times the mean number of first choices"
        )
    return "; ".join(parts) + "."


def flow(results: Results) -> str:
    """How many tokens leave at once, and how many go through all strata."""
    parts = []
    for block in results.blocks:
        counts = results.over(results.directions, block)
        moves = counts.flow()
        at_once = moves[0, -1] / counts.tokens
        parts.append(
            f"{block.title}: {at_once:.0%} of the tokens leave after the first stratum, "
            f"{moves[-1, -1] / counts.tokens:.0%} reach the last one"
        )
    return "; ".join(parts) + "."


def positions(check: CapacityCheck) -> str:
    """The range over the positions, and the two losses."""
    parts = []
    for side in check.sides():
        listed = ", ".join(f"{value:.1f}" for value in check.percent_dropped(side))
        parts.append(f"{listed}% of the first choices in the {side}")
    return (
        f"With the experts limited as in training, {' and '.join(parts)} are dropped, from the first fifth "
        f"of the sentence to the last. The loss is {check.limited_nll_loss:.3f} bits per token with that "
        f"limit and {check.nll_loss:.3f} without ({check.gap:+.3f})."
    )


def exit_bias(curve: Curve) -> str:
    """The two ends of the biases."""
    bleu, time = curve.mean("bleu"), curve.milliseconds()
    requested = curve.mean("requested_capacity")
    parts = [
        f"{curve.biases[n]:g}: a token stops at {requested[n]:.2f} strata, BLEU is {bleu[n]:.1f} and a "
        f"sentence takes {time[n]:.1f} ms"
        for n in dict.fromkeys((0, len(bleu) - 1))
    ]
    return f"With the bias {'; '.join(parts)}."


def sentence(sides: list[SentenceSide]) -> str:
    """The tokens that ask for most and for least on each side."""
    parts = []
    for side in sides:
        means = np.mean(side.requested, axis=0)
        tokens = [side.tokens[int(means.argmax())], side.tokens[int(means.argmin())]]
        parts.append(
            f"in the {side.side} {tokens[0]} asks for {means.max():.2f} strata and {tokens[1]} for "
            f"{means.min():.2f}"
        )
    return "In this sentence, " + "; ".join(parts) + "."


def training(series: dict[str, dict[int, float]]) -> str:
    """First and last requested capacity and overflow."""
    parts = []
    for name, text in (
        ("requested_capacity", "requested capacity goes from {:.2f} to {:.2f}"),
        (
            "overflow_expert1",
            "{:.1f}% of the first choices are dropped at first, {:.1f}% at the end",
        ),
    ):
        if name in series:
            values = [value for _, value in sorted(series[name].items())]
            parts.append(text.format(values[0], values[-1]))
    updates = max(max(values) for values in series.values())
    return f"Over {updates:,} updates, " + "; ".join(parts) + "."
