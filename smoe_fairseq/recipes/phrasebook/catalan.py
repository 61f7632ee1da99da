"""Catalan: gender and number, elision and contraction, periphrastic past; pronouns are dropped."""

import re

from smoe_fairseq.recipes.phrasebook.lexicon import (
    ADJECTIVES,
    NAMES,
    NOUNS,
    PLACES,
    TIMES,
    VERBS,
)
from smoe_fairseq.recipes.phrasebook.meaning import (
    PRONOUNS,
    Clause,
    Pair,
    Person,
    Thing,
    sentence,
    words,
)

# Forms by person: first, second and third singular, first and third plural.
_PERSONS = {"I": 0, "you": 1, "we": 3, "they": 4}
_PAST = ("vaig", "vas", "va", "vam", "van")
_WANT = ("vull", "vols", "vol", "volem", "volen")
_FUTURE = ("é", "às", "à", "em", "an")

# Forms by gender and number: masculine, feminine, masculine plural, feminine plural.
_ARTICLE = ("el", "la", "els", "les")
_DEMONSTRATIVES = {
    "this": ("aquest", "aquesta", "aquests", "aquestes"),
    "that": ("aquell", "aquella", "aquells", "aquelles"),
}
_OWNERS = {
    "I": ("meu", "meva", "meus", "meves"),
    "you": ("teu", "teva", "teus", "teves"),
    "we": ("nostre", "nostra", "nostres", "nostres"),
    "they": ("seu", "seva", "seus", "seves"),
}
_NUMBERS = {
    2: ("dos", "dues", "dos", "dues"),
    3: ("tres",) * 4,
    4: ("quatre",) * 4,
    5: ("cinc",) * 4,
}


def render(meaning: Clause | Pair) -> str:
    """The sentence in Catalan."""
    return sentence(meaning, _clause, {"and": " i ", "because": " perquè ", "but": ", però "})


def _clause(clause: Clause) -> str:
    return words(
        noun_phrase(clause.subject),
        "no" if clause.negative else None,
        _verb(clause),
        noun_phrase(clause.object) if clause.object else None,
        _place(clause.place) if clause.place else None,
        TIMES[clause.time].catalan if clause.time else None,
    )


def _verb(clause: Clause) -> str:
    verb, person = VERBS[clause.verb], _person(clause.subject)
    if clause.want:
        return f"{_WANT[person]} {verb.catalan}"
    if clause.tense == "past":
        return f"{_PAST[person]} {verb.catalan}"
    if clause.tense == "future":
        # The stem is the infinitive less a final e and less a written accent.
        return verb.catalan.removesuffix("e").replace("ó", "o") + _FUTURE[person]
    return verb.catalan_present.split(",")[person]


def _person(subject: Person | Thing) -> int:
    if isinstance(subject, Thing):
        return 4 if subject.plural else 2
    return _PERSONS.get(subject.key, 2)


def noun_phrase(phrase: Person | Thing) -> str | None:
    """Determiner, number, noun, adjective; a pronoun is in the verb's ending."""
    if isinstance(phrase, Person):
        if phrase.key in PRONOUNS:
            return None
        article = "la" if NAMES[phrase.key].gender == "f" else "en"
        return _elided(f"{article} {phrase.key}")
    noun = NOUNS[phrase.noun]
    form = (noun.gender == "f") + 2 * phrase.plural
    determiner = _ARTICLE[form]
    if phrase.demonstrative:
        determiner = _DEMONSTRATIVES[phrase.demonstrative][form]
    return _elided(
        words(
            determiner,
            _OWNERS[phrase.owner][form] if phrase.owner else None,
            _NUMBERS[phrase.number][form] if phrase.number else None,
            noun.catalan_plural if phrase.plural else noun.catalan,
            ADJECTIVES[phrase.adjective].catalan.split(",")[form] if phrase.adjective else None,
        )
    )


def _place(key: str) -> str:
    place = PLACES[key]
    if place.gender is None:
        return f"{place.preposition} {place.catalan}"
    phrase = _elided(f"{_ARTICLE[place.gender == 'f']} {place.catalan}")
    return re.sub(r"\b(a|de) el ", r"\1l ", f"{place.preposition} {phrase}")


def _elided(phrase: str) -> str:
    """``el``, ``la`` or ``en`` at the start becomes ``l'`` before a vowel or h."""
    return re.sub(r"^(el|la|en) (?=[aeiouhàèéíòóú])", "l'", phrase, flags=re.IGNORECASE)
