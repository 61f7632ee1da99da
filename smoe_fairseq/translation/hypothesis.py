"""What a translation is made of."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Hypothesis:
    """One translation of a text.

    Args:
        text: detokenised.
        score: ``sum(scores) / len(scores) ** lenpen``, as fairseq-generate prints it.
        tokens: subwords, with the end of sentence.
        scores: log-probability of each token, to base 2.
        requested: strata that the decoder stopped at for each token that it was given, mean over its MoE
            layers; None for the end of sentence, which it is not given.
            None of a dense decoder, or if nobody asked.
    """

    text: str
    score: float
    tokens: list[str]
    scores: list[float]
    requested: list[float | None] | None = None


@dataclass(frozen=True)
class Translation:
    """A text and what was found for it, best first.

    Args:
        tokens: what the encoder was given, tokens of languages and end of sentence included.
        requested: as of `Hypothesis`, of the encoder.
        parts: in how many the text was translated, since it was too long for one.
    """

    source: str
    hypotheses: list[Hypothesis]
    tokens: list[str]
    requested: list[float] | None = None
    parts: int = 1


def joined(source: str, parts: list[Translation], lenpen: float) -> Translation:
    """The translation of a text by those of its parts: of each rank the hypotheses of that rank in a row.

    A text without parts has one hypothesis without words.
    """
    if len(parts) == 1:
        return replace(parts[0], source=source)
    number = min((len(part.hypotheses) for part in parts), default=1)
    hypotheses = [_in_a_row([part.hypotheses[n] for part in parts], lenpen) for n in range(number)]
    return Translation(
        source,
        hypotheses,
        [token for part in parts for token in part.tokens],
        _chained([part.requested for part in parts]),
        len(parts),
    )


def _in_a_row(hypotheses: list[Hypothesis], lenpen: float) -> Hypothesis:
    scores = [score for hypothesis in hypotheses for score in hypothesis.scores]
    return Hypothesis(
        " ".join(hypothesis.text for hypothesis in hypotheses),
        sum(scores) / max(1, len(scores)) ** lenpen,
        [token for hypothesis in hypotheses for token in hypothesis.tokens],
        scores,
        _chained([hypothesis.requested for hypothesis in hypotheses]),
    )


def _chained(parts: list[list | None]) -> list | None:
    return None if None in parts or not parts else [value for part in parts for value in part]
