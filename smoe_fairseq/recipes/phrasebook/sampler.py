"""Random meanings that make some sense: verbs with fitting subjects, objects and adjectives."""

from random import Random

from smoe_fairseq.recipes.phrasebook.entries import Noun
from smoe_fairseq.recipes.phrasebook.lexicon import (
    ADJECTIVES,
    NAMES,
    NOUNS,
    PLACES,
    TIMES,
    VERBS,
)
from smoe_fairseq.recipes.phrasebook.meaning import PRONOUNS, Clause, Pair, Person, Thing

_TENSES = ("present", "past", "future")
_LINKS = ("and", "because", "but")


def draw(rng: Random) -> Clause | Pair:
    """A meaning, the same for the same state of ``rng``."""
    if rng.random() < 0.1:
        first = _clause(rng, brief=True)
        return Pair(first, _clause(rng, brief=True), rng.choice(_LINKS))
    return _clause(rng, question=rng.random() < 0.2)


def _clause(rng: Random, question: bool = False, brief: bool = False) -> Clause:
    """A clause; a ``brief`` one, half of a pair, says neither where nor what things are like."""
    key = rng.choice(list(VERBS))
    verb = VERBS[key]
    tense = rng.choice(_TENSES)
    want = tense == "present" and rng.random() < 0.35
    negative = rng.random() < 0.2
    # Where, when, both or neither; wanting is not timed.
    place = not brief and rng.random() < (0.25 if verb.transitive else 0.6)
    timed = not want and (rng.random() < 0.4 or (negative and tense == "past"))
    subject = _participant(rng, verb.subjects, brief)
    return Clause(
        subject=subject,
        verb=key,
        object=_object(rng, verb.objects, subject, brief) if verb.transitive else None,
        tense=tense,
        negative=negative,
        place=rng.choice(list(PLACES)) if place else None,
        time=rng.choice([k for k, t in TIMES.items() if t.tense == tense]) if timed else None,
        question=question,
        want=want,
    )


def _object(rng: Random, kinds: str, subject: Person | Thing, brief: bool) -> Person | Thing:
    """What is acted on: no pronoun, and not the very same as the subject."""
    while True:
        drawn = _participant(rng, kinds, brief, pronouns=False)
        if drawn != subject:
            return drawn


def _participant(rng: Random, kinds: str, brief: bool, pronouns: bool = True) -> Person | Thing:
    if "person" in kinds.split(","):
        chance = rng.random()
        if pronouns and chance < 0.35:
            return Person(rng.choice(PRONOUNS))
        if chance > (0.85 if pronouns else 0.75):
            return Person(rng.choice(list(NAMES)))
    return _thing(rng, kinds, brief)


def _thing(rng: Random, kinds: str, brief: bool) -> Thing:
    key = rng.choice([k for k, noun in NOUNS.items() if _fit(kinds, noun)])
    noun = NOUNS[key]
    plural = noun.counted and rng.random() < 0.35
    number, demonstrative, owner = None, None, None
    chance = rng.random()
    if chance < 0.2:
        demonstrative = rng.choice(("this", "that"))
    elif chance < 0.4:
        owner = rng.choice(PRONOUNS)
    elif plural and chance < 0.65:
        number = rng.randint(2, 5)
    fitting = [k for k, adjective in ADJECTIVES.items() if _fit(adjective.kinds, noun)]
    described = not brief and bool(fitting) and rng.random() < 0.35
    adjective = rng.choice(fitting) if described else None
    return Thing(key, plural, adjective, number, demonstrative, owner)


def _fit(kinds: str, noun: Noun) -> bool:
    """Whether a noun is of one of the kinds that a verb or an adjective goes with."""
    return kinds == "*" or any(kind in kinds.split(",") for kind in noun.kinds.split(","))
