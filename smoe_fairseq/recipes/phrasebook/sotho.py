"""Northern Sotho: noun classes, with which verbs, adjectives and demonstratives agree."""

from smoe_fairseq.recipes.phrasebook.lexicon import ADJECTIVES, NOUNS, PLACES, TIMES, VERBS
from smoe_fairseq.recipes.phrasebook.meaning import Clause, Pair, Person, Thing, sentence, words

# Of each noun class or pronoun: subject concord; the one after "ga" in the negative present; the
# one of the negative past.
_SUBJECT = {
    "I": ("ke", "ke", "ka"),
    "you": ("o", "o", "wa"),
    "we": ("re", "re", "ra"),
    "they": ("ba", "ba", "ba"),
    "1": ("o", "a", "a"),
    "2": ("ba", "ba", "ba"),
    "3": ("o", "o", "wa"),
    "4": ("e", "e", "ya"),
    "5": ("le", "le", "la"),
    "6": ("a", "a", "a"),
    "7": ("se", "se", "sa"),
    "8": ("di", "di", "tša"),
    "9": ("e", "e", "ya"),
    "10": ("di", "di", "tša"),
    "14": ("bo", "bo", "bja"),
}

# Of each noun class: possessive concord; demonstratives "this", which also introduces adjectives,
# and "that"; prefix of adjectives.
_MODIFIER = {
    "1": ("wa", "yo", "yoo", "mo"),
    "2": ("ba", "ba", "bao", "ba"),
    "3": ("wa", "wo", "woo", "mo"),
    "4": ("ya", "ye", "yeo", "me"),
    "5": ("la", "le", "leo", "le"),
    "6": ("a", "a", "ao", "ma"),
    "7": ("sa", "se", "seo", "se"),
    "8": ("tša", "tše", "tšeo", "di"),
    "9": ("ya", "ye", "yeo", ""),
    "10": ("tša", "tše", "tšeo", "di"),
    "14": ("bja", "bjo", "bjoo", "bo"),
}
_NASAL = ("8", "9", "10")  # Their adjectives have the form of class 9, with a changed consonant.
_OWNERS = {"I": "ka", "you": "gago", "we": "rena", "they": "bona"}
_NUMBERS = {2: "bedi", 3: "raro", 4: "ne", 5: "hlano"}
_NASAL_NUMBERS = {2: "pedi", 3: "tharo", 4: "nne", 5: "hlano"}


def render(meaning: Clause | Pair) -> str:
    """The sentence in Northern Sotho."""
    links = {"and": " gomme ", "because": " ka gobane ", "but": ", eupša "}
    return sentence(meaning, _clause, links)


def _clause(clause: Clause) -> str:
    after = words(
        noun_phrase(clause.object) if clause.object else None,
        PLACES[clause.place].sotho if clause.place else None,
        TIMES[clause.time].sotho if clause.time else None,
    )
    return words(
        "na" if clause.question else None,
        noun_phrase(clause.subject),
        _verb(clause, final=not after),
        after,
    )


def _verb(clause: Clause, final: bool) -> str:
    """Concord, markers and verb; ``final`` when nothing follows it in the clause."""
    concord, negative_concord, past_concord = _SUBJECT[_class(clause.subject)]
    verb = VERBS[clause.verb]
    stem, complement = verb.sotho, None
    if clause.want:
        stem, complement = "nyaka", f"go {verb.sotho}"
    if clause.tense == "future":
        if clause.negative:
            potential = {"ke": "nka"}.get(concord, f"{negative_concord} ka")
            return f"{potential} se {_with_e(stem)}"
        return f"{concord} tla {stem}"
    if clause.tense == "past":
        return f"ga se {past_concord} {stem}" if clause.negative else f"{concord} {verb.sotho_past}"
    if clause.negative:
        return words("ga", negative_concord, _with_e(stem), complement)
    # The present has an "a" of its own before a verb that ends its clause.
    return words(concord, "a" if final and not complement else None, stem, complement)


def _with_e(stem: str) -> str:
    return f"{stem[:-1]}e"


def _class(phrase: Person | Thing) -> str:
    if isinstance(phrase, Person):
        return phrase.key if phrase.key in _SUBJECT else "1"
    noun = NOUNS[phrase.noun]
    return noun.sotho_plural_class if phrase.plural else noun.sotho_class


def noun_phrase(phrase: Person | Thing) -> str | None:
    """Noun, demonstrative or owner, number, adjective; a pronoun is in the verb's concord."""
    if isinstance(phrase, Person):
        return None if phrase.key in _SUBJECT else phrase.key
    noun = NOUNS[phrase.noun]
    nclass = _class(phrase)
    possessive, this, that, prefix = _MODIFIER[nclass]
    number = None
    if phrase.number and nclass in _NASAL:
        number = f"{this} {_NASAL_NUMBERS[phrase.number]}"
    elif phrase.number:
        number = f"{this} {prefix}{_NUMBERS[phrase.number]}"
    return words(
        noun.sotho_plural if phrase.plural else noun.sotho,
        {"this": this, "that": that}.get(phrase.demonstrative),
        f"{possessive} {_OWNERS[phrase.owner]}" if phrase.owner else None,
        number,
        _adjective(phrase.adjective, nclass) if phrase.adjective else None,
    )


def _adjective(key: str, nclass: str) -> str:
    adjective = ADJECTIVES[key]
    possessive, this, _, prefix = _MODIFIER[nclass]
    if adjective.sotho_nasal is None:
        return f"{possessive} {adjective.sotho}"
    return f"{this} {prefix}{adjective.sotho_nasal if nclass in _NASAL else adjective.sotho}"
