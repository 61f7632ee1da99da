"""Tagalog: verb first, marked noun phrases, linkers, and pronouns and "ba" in second position."""

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

_TOPICS = {"I": "ako", "you": "ka", "we": "kami", "they": "sila"}
_ACTORS = {"I": "ko", "you": "mo", "we": "namin", "they": "nila"}
_OWNERS = {"I": "aking", "you": "iyong", "we": "aming", "they": "kanilang"}
_NUMBERS = {2: "dalawa", 3: "tatlo", 4: "apat", 5: "lima"}
_DEMONSTRATIVES = {"this": "ito", "that": "iyon"}


def render(meaning: Clause | Pair) -> str:
    """The sentence in Tagalog."""
    return sentence(meaning, _clause, {"and": " at ", "because": " dahil ", "but": ", pero "})


def _clause(clause: Clause) -> str:
    verb = VERBS[clause.verb]
    # Of a transitive verb, and of wanting, the actor is marked as such and not as the topic.
    topic = not (verb.objects or clause.want)
    enclitics, actor = _placed_actor(clause, topic)
    aspects = {
        "past": verb.tagalog_past,
        "present": verb.tagalog_present,
        "future": verb.tagalog_future,
    }
    if clause.want:
        wanting = words("ayaw" if clause.negative else "gusto", enclitics)
        # "ayaw" by itself takes no linker: "ayaw na" is "no longer want".
        start = words(wanting if wanting == "ayaw" else linked(wanting), verb.tagalog_infinitive)
    elif clause.negative:
        start = words("hindi", enclitics, aspects[clause.tense])
    else:
        start = words(aspects[clause.tense], enclitics)
    return words(
        start,
        actor,
        noun_phrase(clause.object) if clause.object else None,
        PLACES[clause.place].tagalog if clause.place else None,
        TIMES[clause.time].tagalog if clause.time else None,
    )


def _placed_actor(clause: Clause, topic: bool) -> tuple[str | None, str | None]:
    """What follows the first word ("ba", pronouns), and the actor unless it is a pronoun.

    Pronouns of one syllable come before "ba", longer ones after it.
    """
    question = "ba" if clause.question else None
    if not (isinstance(clause.subject, Person) and clause.subject.key in PRONOUNS):
        return question, noun_phrase(clause.subject, topic)
    pronoun = (_TOPICS if topic else _ACTORS)[clause.subject.key]
    if pronoun in ("ka", "ko", "mo"):
        return words(pronoun, question), None
    return words(question, pronoun), None


def noun_phrase(phrase: Person | Thing, topic: bool = True) -> str:
    """A name or noun with its modifiers, after the marker of the topic or of the actor."""
    if isinstance(phrase, Person):
        return f"{'si' if topic else 'ni'} {phrase.key}"
    noun = NOUNS[phrase.noun].tagalog
    return words(
        "ang" if topic else "ng",
        _OWNERS[phrase.owner] if phrase.owner else None,
        linked(_NUMBERS[phrase.number]) if phrase.number else None,
        "mga" if phrase.plural and not phrase.number else None,
        linked(ADJECTIVES[phrase.adjective].tagalog) if phrase.adjective else None,
        linked(noun) if phrase.demonstrative else noun,
        _DEMONSTRATIVES.get(phrase.demonstrative),
    )


def linked(text: str) -> str:
    """The linker: ``-ng`` after a vowel, ``-g`` after n, a word ``na`` after other consonants."""
    if text[-1] in "aeiou":
        return f"{text}ng"
    return f"{text}g" if text[-1] == "n" else f"{text} na"
