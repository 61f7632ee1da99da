"""Draws meanings, puts them into all languages and writes the splits."""

import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import whole_files
from smoe_fairseq.recipes.phrasebook import catalan, english, malay, sotho, tagalog
from smoe_fairseq.recipes.phrasebook.lexicon import (
    ADJECTIVES,
    NAMES,
    NOUNS,
    PLACES,
    TIMES,
    VERBS,
)
from smoe_fairseq.recipes.phrasebook.meaning import PRONOUNS, Clause, Pair, Person, Thing

LANGUAGES = {
    "eng": english.render,
    "nso": sotho.render,
    "msa": malay.render,
    "tgl": tagalog.render,
    "cat": catalan.render,
}
_TENSES = ("present", "past", "future")
_LINKS = ("and", "because", "but")
SHORTEST, LONGEST = 3, 16  # words
MOST = 100_000  # sentences in all; far fewer than there are, so that drawing stays fast


def write_corpus(
    output_dir: str | os.PathLike,
    train: int = 4000,
    valid: int = 100,
    test: int = 150,
    seed: int = 1,
) -> dict[str, int]:
    """Writes ``{split}.eng-{xxx}.{language}`` for the four pairs and returns the line counts.

    All pairs say the same in line ``n`` of a split. No sentence of any language comes twice,
    within a split or in two of them. Equal arguments give equal files on every platform. The
    files appear when all of them are complete; earlier ones of the same names are replaced.
    Raises UsageError for counts or a seed out of range, and if ``output_dir`` cannot be written.
    """
    sizes = {"train": train, "valid": valid, "test": test}
    _check(sizes, seed)
    drawn = sentences(seed)
    splits = {split: [next(drawn) for _ in range(size)] for split, size in sizes.items()}
    texts = {
        f"{split}.eng-{other}.{language}": [line[language] for line in lines]
        for split, lines in splits.items()
        for other in LANGUAGES
        if other != "eng"
        for language in ("eng", other)
    }
    _write(Path(output_dir), texts)
    return {name: len(lines) for name, lines in texts.items()}


def sentences(seed: int) -> Iterator[dict[str, str]]:
    """Sentences in all languages, by language; none comes twice in any of them."""
    rng = Random(seed)
    seen = {language: set() for language in LANGUAGES}
    while True:
        meaning = draw(rng)
        line = {language: render(meaning) for language, render in LANGUAGES.items()}
        fits = all(SHORTEST <= len(text.split()) <= LONGEST for text in line.values())
        if fits and not any(text in seen[language] for language, text in line.items()):
            for language, text in line.items():
                seen[language].add(text)
            yield line


def _check(sizes: dict[str, int], seed: int) -> None:
    for split, size in sizes.items():
        if size < 1:
            raise UsageError(f"--{split} is {size}, but has to be 1 or more sentences")
    if sum(sizes.values()) > MOST:
        raise UsageError(
            f"--train, --valid and --test ask for {sum(sizes.values())} sentences: together they "
            f"can be at most {MOST}"
        )
    if seed < 0:
        raise UsageError(f"--seed is {seed}, but has to be 0 or more")


def _write(folder: Path, texts: dict[str, list[str]]) -> None:
    with whole_files(
        [folder / name for name in texts], f"OUTPUT_DIR {folder}", parents=True
    ) as partials:
        for partial, lines in zip(partials, texts.values(), strict=True):
            Path(partial).write_bytes("".join(f"{line}\n" for line in lines).encode())


# Random meanings that make some sense: verbs with fitting subjects, objects and adjectives.


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
    place = not brief and rng.random() < (0.25 if verb.objects else 0.6)
    timed = not want and (rng.random() < 0.4 or (negative and tense == "past"))
    subject = _participant(rng, verb.subjects, brief)
    return Clause(
        subject=subject,
        verb=key,
        object=_object(rng, verb.objects, subject, brief) if verb.objects else None,
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
    plural = noun.english_plural is not None and rng.random() < 0.35
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


def _fit(kinds: str, noun) -> bool:
    """Whether a noun is of one of the kinds that a verb or an adjective goes with."""
    return kinds == "*" or any(kind in kinds.split(",") for kind in noun.kinds.split(","))
