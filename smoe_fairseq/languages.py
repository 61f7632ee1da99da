"""Names of languages: BCP 47 and FLORES codes, ISO 639-1 and 639-3, English names; and how they are written.

``de``, ``deu``, ``de-DE``, ``deu_Latn`` and ``German`` are names of one language; so are ``nb`` and ``no``,
and those of a macrolanguage and its main member, such as ``zh`` and ``cmn``. A name that no language has,
such as ``xx``, stands for itself alone.
"""

import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from functools import lru_cache
from itertools import combinations

import langcodes
import regex
from langcodes import Language
from langcodes.data_dicts import LANGUAGE_ALPHA3

# Scripts without spaces between words, by ISO 15924 codes; and words, or what is about as long in these
# scripts: two letters in East Asia, else four. Tibetan divides syllables by marks (U+0F0B and others).
UNSPACED = frozenset(
    "Hani Hans Hant Jpan Hira Kana Thai Laoo Khmr Mymr Tibt Tavt Tale Talu Lana Bali Java Yiii".split()
)
_SCRIPTS = sorted(UNSPACED - {"Hans", "Hant", "Jpan", "Tibt"})
_EAST = ("Hani", "Hira", "Kana", "Yiii")
_DENSE, _LOOSE = (
    "".join(rf"\p{{Script={script}}}" for script in _SCRIPTS if (script in _EAST) == east)
    for east in (True, False)
)
_WORDS = regex.compile(
    rf"(?:[{_DENSE}]\p{{M}}*){{1,2}}|(?:[{_LOOSE}]\p{{M}}*){{1,4}}|[^\s\u0f0b-\u0f14{_DENSE}{_LOOSE}]+"
)
_PERHAPS = re.compile("[\u0e00-\u1bff\u2e80-\uabff\uf900-\ufaff\U00016000-\U0003ffff]")  # is faster


@lru_cache(4096)
def language_of(name: str) -> Language | None:
    """The language that a code or an English name stands for; None if it is no language's."""
    with suppress(LookupError, ValueError):
        if (language := Language.get(name.strip())).is_valid():
            return language
    try:
        return Language.get(langcodes.find(name.strip()).to_tag()) if len(name) > 3 else None
    except LookupError:
        return None


@lru_cache(4096)
def code_of(name: str) -> str:
    """The ISO 639-1 code, or else 639-3, of a language (of its macrolanguage for ``cmn``, ``arb`` and others
    that are the main one of theirs); the name itself if it is no language's.
    """
    if (language := language_of(name)) is None:
        return name
    code = language.prefer_macrolanguage().language or name
    return {"no": "nb"}.get(code, code)


def spellings(name: str) -> tuple[str, ...]:
    """The name, and the ISO 639-1 and 639-3 codes of its language, also older ones, such as ``tl``."""
    if (language := language_of(name)) is None:
        return (name,)
    first = name, code_of(name), language.to_alpha3()
    known = {*first, re.split("[-_]", name)[0], *(["no"] if "nb" in first else [])}
    more = (code for codes in LANGUAGE_ALPHA3.items() if known & {*codes} for code in codes)
    return tuple(dict.fromkeys((*first, *more)))


def is_unspaced(name: str) -> bool:
    """Whether a language is written without spaces between its words."""
    language = language_of(name)
    return language is not None and language.maximize().script in UNSPACED


def bleu_tokenizer(name: str) -> str:
    """sacreBLEU's tokenizer for BLEU into a language: as it advises; letters where words have no spaces."""
    language, code = language_of(name), code_of(name)
    if language and language.maximize().script in ("Hans", "Hant", "Hani"):
        return "zh"
    other = "char" if is_unspaced(name) else "13a"
    return {"ja": "ja-mecab", "ko": "ko-mecab"}.get(code, other)


def words_in(text: str) -> int:
    """The number of words; about it in scripts without spaces between words, of syllables in Tibetan."""
    if text.isascii() or not _PERHAPS.search(text):
        return len(text.split())
    return len(_WORDS.findall(text))


@lru_cache(4096)
def assign(wanted: tuple[str, ...], names: tuple[str, ...]) -> tuple[str | None, ...]:
    """The one of ``names`` that stands for each ``wanted`` language; None for a language that has none.

    The same spelling comes first, so that ``pt`` and ``pt-BR``, if both are wanted, are told apart; then the
    nearest of the names, such as ``zh-CN`` before ``zh-TW`` for ``zh``.
    """
    plain = {name: name.strip().casefold().replace("_", "-") for name in (*wanted, *names)}
    found = {w: name for name in reversed(names) for w in wanted if plain[w] == plain[name]}
    for language in wanted:
        free = [name for name in names if name not in found.values() and _is_same(language, name)]
        if language not in found and free:
            tags = {name: language_of(name) for name in (language, *free)}
            found[language] = min(
                free, key=lambda n: langcodes.tag_distance(tags[language], tags[n])
            )
    return tuple(map(found.get, wanted))


def meant(name: str, known: Collection[str]) -> list[str]:
    """Those of the ``known`` languages that a name may stand for; itself alone if it is one of them."""
    return [name] if name in known else [each for each in known if _is_same(name, each)]


def are_languages(names: tuple[str, ...]) -> bool:
    """Whether all names are languages, no two the same, as in a header (but ``No``, ``Ja`` are words)."""
    known = [name for name in names if language_of(name) and (len(name) > 3 or not name.istitle())]
    return len({code_of(name) for name in known}) == len(names)


def spelled_twice(names: Iterable[str]) -> list[tuple[str, str]]:
    """The pairs of codes of one language, as ``fr`` and ``fra``; not variants, as ``pt`` and ``pt-BR``."""

    def alike(one: str, other: str) -> bool:
        tags = [language_of(name) for name in (one, other)]
        kinds = {(tag.language, tag.maximize().script, tag.territory) for tag in filter(None, tags)}
        return None not in tags and len(kinds) == 1

    return [each for each in combinations(names, 2) if alike(*each)]


def _is_same(one: str, other: str) -> bool:
    """Whether two names may stand for one language: scripts and countries differ only if both name theirs."""
    first, second = language_of(one), language_of(other)
    if first is None or second is None or code_of(one) != code_of(other):
        return False
    scripts = {x.maximize().script for x in (first, second) if x.script or x.territory}
    countries = {x.territory for x in (first, second) if x.territory}
    return len(scripts) < 2 and len(countries) < 2
