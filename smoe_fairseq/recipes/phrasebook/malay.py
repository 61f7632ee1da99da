"""Malay: no inflection, markers of tense before the verb, modifiers after the noun, classifiers."""

from smoe_fairseq.recipes.phrasebook.lexicon import ADJECTIVES, NOUNS, PLACES, TIMES, VERBS
from smoe_fairseq.recipes.phrasebook.meaning import Clause, Pair, Person, Thing, sentence, words

_PRONOUNS = {"I": "saya", "you": "kamu", "we": "kami", "they": "mereka"}
_NUMBERS = {2: "dua", 3: "tiga", 4: "empat", 5: "lima"}
_DEMONSTRATIVES = {"this": "ini", "that": "itu"}
_TENSES = {"present": "sedang", "past": "sudah", "future": "akan"}


def render(meaning: Clause | Pair) -> str:
    """The sentence in Malay."""
    return sentence(meaning, _clause, {"and": " dan ", "because": " kerana ", "but": ", tetapi "})


def _clause(clause: Clause) -> str:
    return words(
        "adakah" if clause.question else None,
        noun_phrase(clause.subject),
        "tidak" if clause.negative else None,
        _marker(clause),
        VERBS[clause.verb].malay,
        noun_phrase(clause.object) if clause.object else None,
        PLACES[clause.place].malay if clause.place else None,
        TIMES[clause.time].malay if clause.time else None,
    )


def _marker(clause: Clause) -> str | None:
    """Tense or want; "sudah" cannot be negated, so the time alone shows that it is the past."""
    if clause.want:
        return "mahu"
    if clause.tense == "past" and clause.negative:
        return None
    return _TENSES[clause.tense]


def noun_phrase(phrase: Person | Thing) -> str:
    """Number and classifier, noun, adjective, owner or demonstrative; doubled in the plural."""
    if isinstance(phrase, Person):
        return _PRONOUNS.get(phrase.key, phrase.key)
    noun = NOUNS[phrase.noun]
    word = noun.malay
    if phrase.number:
        word = words(_NUMBERS[phrase.number], noun.classifier, word)
    elif phrase.plural:
        word = f"{word}-{word}"
    return words(
        word,
        ADJECTIVES[phrase.adjective].malay if phrase.adjective else None,
        _PRONOUNS[phrase.owner] if phrase.owner else None,
        _DEMONSTRATIVES.get(phrase.demonstrative),
    )
