"""What a sentence says, independent of any language; the renderers put it into words."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Tense = Literal["present", "past", "future"]
PRONOUNS = ("I", "you", "we", "they")


@dataclass(frozen=True)
class Person:
    """One of `PRONOUNS`, or a name of the lexicon.

    "you" is one person and "we" leaves the listener out, which some of the languages distinguish.
    He and she are missing because others do not distinguish those.
    """

    key: str


@dataclass(frozen=True)
class Thing:
    """A definite noun phrase: "the cat", "that cat", "my cats", "the two black cats".

    At most one of `number` (2 to 5), `demonstrative` and `owner` (one of `PRONOUNS`) is given;
    `number` makes it plural.
    """

    noun: str
    plural: bool = False
    adjective: str | None = None
    number: int | None = None
    demonstrative: Literal["this", "that"] | None = None
    owner: str | None = None

    def __post_init__(self):
        if sum(x is not None for x in (self.number, self.demonstrative, self.owner)) > 1:
            raise ValueError("a Thing takes one of number, demonstrative and owner")
        if self.number is not None and not self.plural:
            raise ValueError("a Thing with a number is plural")


@dataclass(frozen=True)
class Clause:
    """Who does what to what, where and when.

    `want` is present tense only. The past is negated only together with a `time`: Malay, which
    marks it by "sudah" otherwise, has nothing else that would show it.
    """

    subject: Person | Thing
    verb: str
    object: Person | Thing | None = None
    tense: Tense = "present"
    negative: bool = False
    place: str | None = None
    time: str | None = None
    question: bool = False
    want: bool = False

    def __post_init__(self):
        if self.want and self.tense != "present":
            raise ValueError("a Clause with want is in the present tense")
        if self.negative and self.tense == "past" and self.time is None:
            raise ValueError("a negative Clause in the past tense needs a time")


@dataclass(frozen=True)
class Pair:
    """Two statements in one sentence."""

    first: Clause
    second: Clause
    link: Literal["and", "because", "but"] = "and"


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
