"""HTML report of an analysis."""

import base64
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jinja2
import numpy as np

from smoe_fairseq.analysis import figures
from smoe_fairseq.analysis.capacity import CapacityCheck
from smoe_fairseq.analysis.results import Results
from smoe_fairseq.analysis.sentence import SentenceSide
from smoe_fairseq.errors import UsageError
from smoe_fairseq.forms import SCORES, read_json

WORD_BEGINS = "\u2581"  # as sentencepiece marks it


def summary(results: Results, checkpoint: Path) -> str:
    """The first paragraph: what was run, how many strata a token asks for, and the BLEU."""
    run, means = results.run, []
    for side in results.sides():
        counts = [results.over(results.directions, block) for block in results.blocks_of(side)]
        mean = sum(c.stops for c in counts) / max(sum(c.tokens for c in counts), 1)
        means.append(f"{mean:.2f} strata of a block in the {side}")
    over = f"{sum(run['sentences'].values()):,} samples"
    if results.has_languages:
        number = len(results.directions)
        over = f"{sum(run['sentences'].values()):,} sentence pairs in {number} direction"
        over += "s" * (number > 1)
    text = (
        f"After {run['updates']:,} updates, over {over} of {run['subset']}, a token stops on average at "
        f"{' and at '.join(means)}."
    )
    try:
        found = read_json(checkpoint.parent / "scores.json", SCORES)
        if found["checkpoint"] != checkpoint.name:
            return text
        points = [found["scores"][name]["bleu"] for name in results.directions]
    except (UsageError, KeyError):  # not evaluated, or not all of these directions
        return text
    of = "" if len(points) == 1 else f", the mean of {len(points)} directions"
    return f"{text} Its BLEU on the test set is {np.mean(points):.1f}{of}."


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
        groups = figures.groups(results, block, min_count)
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
        blocks = results.blocks_of(side)
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


def sentence(sides: list[SentenceSide]) -> str:
    """The words or parts of words that ask for most and for least on each side."""
    parts = []
    for side in sides:
        means = np.mean(side.requested, axis=0)
        text = (t != WORD_BEGINS and not s for t, s in zip(side.tokens, side.special))
        shown = [i for i, is_text in enumerate(text) if is_text]
        order = sorted(shown or range(len(means)), key=lambda i: -means[i])
        said = [f'"{side.tokens[i].strip(WORD_BEGINS)}"' for i in (order[0], order[-1])]
        most, least = (f"{round(float(means[i]), 2):g}" for i in (order[0], order[-1]))
        parts.append(
            f"in the {side.side} all tokens ask for {most}"
            if most == least
            else f"in the {side.side} {said[0]} asks for {most} strata and {said[1]} for {least}"
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


# One HTML page with everything in it: no file beside it, no network.


@dataclass(frozen=True)
class Section:
    """One picture of the report.

    Args:
        name: of the file, ``NAME.png``.
        title: what the picture shows.
        finding: what it says here, in a sentence.
        reading: how to read it.
        draw: makes the figure, ``stacked`` or not.
        wide, narrow: the picture as PNG, panels side by side, and one below the other for a phone.
    """

    name: str
    title: str
    finding: str
    reading: str
    draw: Callable
    wide: bytes = b""
    narrow: bytes = b""


def page(title: str, summary: str, description: dict[str, object], sections: list[Section]) -> str:
    """The report (``report.html.jinja``)."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["base64"] = lambda png: base64.b64encode(png).decode()
    return environment.get_template("report.html.jinja").render(
        title=title, summary=summary, description=description, sections=sections
    )


# All pictures of an analysis, drawn and saved, each with its words for the report.


def draw(
    folder: Path,
    results: Results,
    example: tuple[str, list[SentenceSide]] | None,
    series: dict[str, dict[int, float]],
    min_count: int,
) -> list[Section]:
    """Writes ``NAME.png`` and ``NAME.svg`` of each picture; those with nothing to show are left out."""
    sections, missing = [], set()
    for section in _pictures(results, example, series, min_count):
        missing |= figures.save(section.draw(stacked=False), folder / section.name)
        wide = (folder / f"{section.name}.png").read_bytes()
        narrow = figures.png(section.draw(stacked=True))
        sections.append(replace(section, wide=wide, narrow=narrow))
    figures.warn_of_missing(missing)
    return sections


def _pictures(results, example, series, min_count) -> Iterator[Section]:
    order = "from most to least training data" if results.sizes else "in the order they were given"
    if results.has_languages:
        yield Section(
            "by_direction",
            "Requested capacity by direction",
            by_direction(results),
            f"Directions {order}; means over the tokens of all blocks of a side. "
            "The dotted line is 1, the least there can be. (Figure 3 of the paper.)",
            partial(figures.draw_by_direction, results),
        )
    if results.ranks is not None:
        yield Section(
            "frequency",
            "Frequency of the tokens that ask for least and for most",
            token_frequency(results, min_count),
            f"The {figures.TOKENS} tokens of lowest and highest mean requested capacity"
            f"{' of each direction, made unique,' * results.has_languages} among those that occur "
            f"at least {min_count} times; the dot and number are the median. (Figure 4 of the paper.)",
            partial(figures.draw_frequency, results, min_count),
        )
    if any(len(results.blocks_of(side)) > 1 for side in results.sides()):
        yield Section(
            "by_depth",
            "Requested capacity by depth",
            by_depth(results),
            "Thin lines are directions. " * results.has_languages
            + "Only layers with experts are shown. (Figure 5 of the paper.)",
            partial(figures.draw_by_depth, results),
        )
    yield Section(
        "load",
        "Expert load by language" if results.has_languages else "Expert load",
        load(results),
        "First choices of all strata's gates. Later strata are seen by more gates, so that more "
        "than 1 is expected of them.",
        partial(figures.draw_load, results),
    )
    yield Section(
        "flow",
        "The way through the strata",
        flow(results),
        "A bar is a stratum, its height the share of the tokens that stop at it. The darker a "
        "band, the fewer strata it passes by.",
        partial(figures.draw_flow, results),
    )
    check = results.capacity
    if check and any(check.percent_dropped(side).any() for side in check.sides()):
        yield Section(
            "positions",
            "What training's capacity takes away",
            positions(check),
            "First choices dropped for want of capacity, in batches as those of training. They should "
            "not depend on the position, nor the loss much on the limit: where it is far higher without "
            "(0.1 and more), the experts get tokens that they never saw in training.",
            partial(figures.draw_positions, check),
        )
    if example is not None:
        direction, sides = example
        yield Section(
            "sentence",
            f"One sentence, {direction}" if results.has_languages else "The beginning of a sample",
            sentence(sides),
            "Strata that each token stops at, special tokens included; in the decoder, a token is "
            "the one that is given, not the one predicted from it.",
            partial(figures.draw_sentence, sides),
        )
    if series:
        yield Section(
            "training",
            "Over the course of training",
            training(series),
            "Means between two lines of the log. A log in fairseq's JSON format has each block.",
            partial(figures.draw_training, series),
        )
