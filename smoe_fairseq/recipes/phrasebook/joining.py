"""What all renderers share: words and clauses are joined, with a capital and punctuation."""

from collections.abc import Callable

from smoe_fairseq.recipes.phrasebook.meaning import Clause, Pair


def words(*parts: str | None) -> str:
    """The given parts between single spaces, without the empty ones."""
    return " ".join(part for part in parts if part)


def sentence(meaning: Clause | Pair, clause: Callable[[Clause], str], links: dict[str, str]) -> str:
    """A clause, or two joined by ``links[link]``, as a sentence."""
    if isinstance(meaning, Pair):
        text = clause(meaning.first) + links[meaning.link] + clause(meaning.second)
    else:
        text = clause(meaning)
    question = isinstance(meaning, Clause) and meaning.question
    return f"{text[0].upper()}{text[1:]}{'?' if question else '.'}"
