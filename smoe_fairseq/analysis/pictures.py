"""All pictures of an analysis, drawn and saved, each with its words for the report."""

from collections.abc import Callable, Iterator
from pathlib import Path

from smoe_fairseq.analysis import findings
from smoe_fairseq.analysis.figures import (
    by_depth,
    by_direction,
    exit_bias,
    flow,
    frequency,
    load,
    positions,
    sentence,
    style,
    training,
)
from smoe_fairseq.analysis.report import Section
from smoe_fairseq.analysis.results import Results
from smoe_fairseq.analysis.sentence import SentenceSide


def draw(
    folder: Path,
    results: Results,
    example: tuple[str, list[SentenceSide]] | None,
    series: dict[str, dict[int, float]],
    min_count: int,
) -> list[Section]:
    """Writes ``NAME.png`` and ``NAME.svg`` of each picture; those without data are left out."""
    sections = []
    for section, figure in _pictures(results, example, series, min_count):
        style.save(figure(), folder / section.name)
        sections.append(section)
    return sections


def _pictures(results, example, series, min_count) -> Iterator[tuple[Section, Callable]]:
    order = "from most to least training data" if results.sizes else "in the order they were given"
    if results.has_languages:
        yield (
            Section(
                "by_direction",
                "Requested capacity by direction",
                findings.by_direction(results),
                f"Directions {order}; means over the tokens of all blocks of a side. "
                "The dotted line is 1, the least there can be. (Figure 3 of the paper.)",
            ),
            lambda: by_direction.draw(results),
        )
    if results.ranks is not None:
        yield (
            Section(
                "frequency",
                "Frequency of the tokens that ask for least and for most",
                findings.token_frequency(results, min_count),
                f"The {frequency.TOKENS} tokens of lowest and highest mean requested capacity"
                f"{' of each direction, made unique,' * results.has_languages} among those that occur "
                f"at least {min_count} times; the dot and number are the median. (Figure 4 of the paper.)",
            ),
            lambda: frequency.draw(results, min_count),
        )
    yield (
        Section(
            "by_depth",
            "Requested capacity by depth",
            findings.by_depth(results),
            "Thin lines are directions. " * results.has_languages
            + "Only layers with experts are shown. (Figure 5 of the paper.)",
        ),
        lambda: by_depth.draw(results),
    )
    yield (
        Section(
            "load",
            "Expert load by language" if results.has_languages else "Expert load",
            findings.load(results),
            "First choices of all strata's gates. Later strata are seen by more gates, so that more "
            "than 1 is expected of them.",
        ),
        lambda: load.draw(results),
    )
    yield (
        Section(
            "flow",
            "The way through the strata",
            findings.flow(results),
            "A bar is a stratum, its height the share of the tokens that stop at it. The darker a "
            "band, the fewer strata it passes by.",
        ),
        lambda: flow.draw(results),
    )
    if (check := results.capacity) is not None:
        yield (
            Section(
                "positions",
                "What training's capacity takes away",
                findings.positions(check),
                "First choices dropped for want of capacity, in batches as those of training. They should "
                "not depend on the position, nor the loss much on the limit: where it is far higher without "
                "(0.1 and more), the experts get tokens that they never saw in training.",
            ),
            lambda: positions.draw(check),
        )
    if (curve := results.curve) is not None:
        yield (
            Section(
                "exit_bias",
                "The exit bias: fewer stops, less time",
                findings.exit_bias(curve),
                "The subset translated (beam 5) with --smoe-exit-bias, means over the directions; time is "
                "that of the search, on a CPU the processor's. BLEU is against the binarised references.",
            ),
            lambda: exit_bias.draw(curve),
        )
    if example is not None:
        direction, sides = example
        yield (
            Section(
                "sentence",
                f"One sentence, {direction}"
                if results.has_languages
                else "The beginning of a sample",
                findings.sentence(sides),
                "Strata that each token stops at, special tokens included; in the decoder, a token is "
                "the one that is given, not the one predicted from it.",
            ),
            lambda: sentence.draw(sides),
        )
    if series:
        yield (
            Section(
                "training",
                "Over the course of training",
                findings.training(series),
                "Means between two lines of the log. A log in fairseq's JSON format has each block.",
            ),
            lambda: training.draw(series),
        )
