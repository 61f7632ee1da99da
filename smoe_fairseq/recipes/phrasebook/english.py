"""English: auxiliaries, do-support in negation and questions, plural demonstratives."""

from smoe_fairseq.recipes.phrasebook.lexicon import ADJECTIVES, NOUNS, PLACES, TIMES, VERBS
from smoe_fairseq.recipes.phrasebook.meaning import (
    PRONOUNS,
    Clause,
    Pair,
    Person,
    Thing,
    sentence,
    words,
)

_NUMBERS = {2: "two", 3: "three", 4: "four", 5: "five"}
_OWNERS = {"I": "my", "you": "your", "we": "our", "they": "their"}


def render(meaning: Clause | Pair) -> str:
    """The sentence in English."""
    return sentence(meaning, _clause, {"and": " and ", "because": " because ", "but": ", but "})


def _clause(clause: Clause) -> str:
    auxiliary, verb = _verb(clause)
    subject = noun_phrase(clause.subject)
    return words(
        *((auxiliary, subject) if clause.question else (subject, auxiliary)),
        "not" if clause.negative else None,
        verb,
        noun_phrase(clause.object) if clause.object else None,
        PLACES[clause.place].english if clause.place else None,
        TIMES[clause.time].english if clause.time else None,
    )


def _verb(clause: Clause) -> tuple[str | None, str]:
    """The auxiliary, which a plain past and a plain want lack, and the rest."""
    verb = VERBS[clause.verb]
    helped = clause.negative or clause.question
    third = _third_person(clause.subject)
    if clause.want:
        if helped:
            return ("does" if third else "do"), f"want to {verb.english}"
        return None, f"{'wants' if third else 'want'} to {verb.english}"
    if clause.tense == "present":
        be = "is" if third else "am" if clause.subject == Person("I") else "are"
        return be, verb.english_ing
    if clause.tense == "future":
        return "will", verb.english
    return ("did", verb.english) if helped else (None, verb.english_past)


def _third_person(subject: Person | Thing) -> bool:
    if isinstance(subject, Person):
        return subject.key not in PRONOUNS
    return not subject.plural


def noun_phrase(phrase: Person | Thing) -> str:
    """Determiner, number, adjective, noun."""
    if isinstance(phrase, Person):
        return phrase.key
    noun = NOUNS[phrase.noun]
    determiner = "the"
    if phrase.demonstrative:
        plural = {"this": "these", "that": "those"}
        determiner = plural[phrase.demonstrative] if phrase.plural else phrase.demonstrative
    elif phrase.owner:
        determiner = _OWNERS[phrase.owner]
    return words(
        determiner,
        _NUMBERS.get(phrase.number),
        ADJECTIVES[phrase.adjective].english if phrase.adjective else None,
        noun.english_plural if phrase.plural else noun.english,
    )
