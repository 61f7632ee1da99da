"""Pairs of sentences from a program's translated messages: gettext files (.po) in an archive.

A message is an English string with its translation. The English string alone decides which split a pair is
in, so that no sentence is trained on in one language and tested in another.
"""

import html
import re
from collections import Counter
from pathlib import Path, PurePosixPath

import polib

from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes.config import Dataset
from smoe_fairseq.recipes.data.download import read_members
from smoe_fairseq.recipes.data.normalization import plain as normalized
from smoe_fairseq.recipes.data.raw import SPLITS, Section, place, write
from smoe_fairseq.recipes.processes import report

ENGLISH = "en"
ARCHIVES = ("*.tar.xz", "*.tar.gz", "*.tar.bz2", "*.tar", "*.zip")
_BETWEEN_WORDS = re.compile(
    r"</?(?:br|alt|image|bookmark_value|(?:switch|case|default)inline)\b[^<>]*>|\\[nt](?!\w)", re.I
)
_TAG = re.compile(r"</?[a-z][^<>]*>")
_ESCAPE = re.compile(r"\\([<>\"'])")
# polib breaks lines at these, gettext does not.
_LINE_ENDS = re.compile("[\v\f\x1c-\x1e\x85\u2028\u2029]")

Pairs = dict[str, str]  # English text to translation


def gather_messages(dataset: Dataset, source: Path, target: Path) -> None:
    """Write the pairs of all languages of ``dataset`` to ``target`` in the shared layout; see `raw.write`.

    The data set's ``raw.messages`` has the archive's ``layout``, such as translations/source/{language}, the
    minimum number of English ``words`` in a text, and for ``valid`` and ``test`` their ``share`` of all texts
    and the maximum number of pairs of a language (``most``). ``raw.codes`` has the archive's codes of
    languages that differ from the data set's.

    Args:
        source: the archive, or a folder with one archive.

    Raises:
        UsageError: the archive is missing, damaged, or has another layout or lacks a language; or a language
            has no pair to train or validate on.
    """
    archive = _archive(source)
    for pair in dataset.pairs:
        if not pair.startswith(f"{ENGLISH}-"):
            raise UsageError(f"{dataset.name}: pair {pair}: expected one of {ENGLISH}, as en-sl")
    found = read_pairs(dataset, archive)
    sections = {}
    for language, pairs in found.items():
        for name, part in split(pairs, dataset.raw["messages"]).items():
            if part:
                languages = dict.fromkeys((ENGLISH, language))
                sections[name, f"{ENGLISH}-{language}"] = Section(languages, elsewhere=part.copy)
            elif name == "test":
                report(f"{language} has no text to test and will not be scored")
            else:
                words = f"at least {dataset.raw['messages']['words']} English words"
                left = f"pairs left (translated, not fuzzy, of {words}, no two the same)"
                found_none = f"{archive}: {language} has {len(pairs)} {left}, and none of them to"
                advice = f"leave {ENGLISH}-{language} out of `pairs`"
                use = "train" if name == "train" else "validate"
                raise UsageError(f"{found_none} {use}: {advice}")
    kept = write(dataset, sections, target)
    for pair in dataset.pairs:
        counts = ", ".join(f"{kept.get((s, pair), Counter())['kept']:,} {s}" for s in SPLITS)
        print(f"{target}: {pair}: {counts}", flush=True)
    print(f"{target}: {_counts_in_words(found)}", flush=True)


def read_pairs(dataset: Dataset, archive: Path) -> dict[str, Pairs]:
    """The pairs of each language, in the order of its file names.

    The first of several translations of an English text is used.

    Raises:
        UsageError: see `gather_messages`.
    """
    settings = dataset.raw["messages"]
    above = PurePosixPath(settings["layout"].format(language="LANGUAGE")).parent.parts
    codes = dataset.raw.get("codes", {})
    files = {codes.get(pair.split("-")[1], pair.split("-")[1]): {} for pair in dataset.pairs}
    there, others = set(), set()

    def wanted(path: PurePosixPath) -> bool:
        start, rest = path.parts[: len(above)], path.parts[len(above) :]
        if path.suffix != ".po" or start != above or len(rest) < 2:
            others.update(path.parts[:1])
            return False
        there.add(rest[0])
        return rest[0] in files

    for path, content in read_members(archive, wanted):
        files[path.parts[len(above)]][str(path)] = _messages(archive, path, content)
    if not there:
        layout = f"{'/'.join(above)}/LANGUAGE/**.po"
        raise UsageError(f"{archive} has no file {layout}; it has {_listed(others)}")
    for code in files:
        if code not in there:
            raise UsageError(f"{archive} has no language {code}; it has {_listed(there)}")
    return {
        pair.split("-")[1]: _unique(files[code], settings["words"])
        for pair, code in zip(dataset.pairs, files, strict=True)
    }


def plain(text: str) -> str:
    """A message on one line, without tags, escapes and marks of access keys (``~File``, ``_File``)."""
    text = _ESCAPE.sub(r"\1", text)
    text = html.unescape(_TAG.sub("", _BETWEEN_WORDS.sub(" ", text)))
    text = re.sub(r"~(?=\w)", "", text)
    return " ".join(map(_without_mark, normalized(text).split()))


def _without_mark(word: str) -> str:
    """``Pla_ce``, but not ``%AVERAGE_VALUE`` or ``com_sun_star``."""
    is_name = word.count("_") != 1 or "%" in word or word.isupper() or word.endswith("_")
    return word if is_name else word.replace("_", "")


def split(pairs: Pairs, settings: dict) -> dict[str, list[tuple[str, str]]]:
    """Divide pairs into train, valid and test, by a hash of the English text.

    The lowest hashes are held out. Held-out pairs beyond ``most`` are in no split.
    """
    found = {"train": [], "valid": [], "test": []}
    test = settings["test"]["share"]
    valid = test + settings["valid"]["share"]
    places = {english: place(english) for english in pairs}
    for english, translation in pairs.items():
        at = places[english]
        name = "test" if at < test else "valid" if at < valid else "train"
        found[name].append((english, translation))
    for name in ("valid", "test"):
        found[name].sort(key=lambda pair: (places[pair[0]], pair[0]))
        del found[name][settings[name]["most"] :]
    return found


def _archive(source: Path) -> Path:
    if source.is_file():
        return source
    found = sorted(path for pattern in ARCHIVES for path in source.glob(pattern))
    if len(found) != 1:
        expected = f"RAW has to name one, or a folder with one ({', '.join(ARCHIVES)})"
        raise UsageError(f"{source} has {len(found) or 'no'} archives: {expected}")
    return found[0]


def _messages(archive: Path, path: PurePosixPath, content: bytes) -> list[tuple[str, str]]:
    """English and translation of all messages, except untranslated, fuzzy, obsolete and plural ones."""
    try:
        entries = polib.pofile(_LINE_ENDS.sub(" ", content.decode("utf-8")))
    except (UnicodeDecodeError, OSError, ValueError) as error:
        raise UsageError(f"{archive}: {path} is not a file of messages: {error}") from None
    return [
        (plain(entry.msgid), plain(entry.msgstr))
        for entry in entries
        if entry.translated() and not entry.msgid_plural
    ]


def _unique(files: dict[str, list[tuple[str, str]]], words: int) -> Pairs:
    pairs: Pairs = {}
    for name in sorted(files):
        for english, translation in files[name]:
            count = sum(any(c.isalpha() for c in word) for word in english.split())
            if count >= words and translation and translation != english:
                pairs.setdefault(english, translation)
    return pairs


def _counts_in_words(found: dict[str, Pairs]) -> str:
    """Counts of pairs and of texts that are in several languages, in words."""
    languages = Counter(english for pairs in found.values() for english in pairs)
    several, all_ = (sum(n >= least for n in languages.values()) for least in (2, len(found)))
    shared = f"{several:,} are in two languages or more and {all_:,} in all"
    texts = f"{len(languages):,} English texts"
    return f"{languages.total():,} pairs of {texts}, of which {shared}"


def _listed(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:200]) or "nothing"
    return shown + " and others" * (len(names) > 200)
