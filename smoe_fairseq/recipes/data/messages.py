"""Pairs of sentences from a program's translated messages: gettext files (.po) in an archive.

A message is an English string with its translation. The English string alone decides the split of a pair, so
that no sentence is in the training text of one language and the test text of another.
"""

import html
import re
from collections import Counter, defaultdict
from pathlib import Path, PurePosixPath

import polib

from smoe_fairseq.errors import UsageError
from smoe_fairseq.languages import assign
from smoe_fairseq.recipes.data.archives import read_members
from smoe_fairseq.recipes.data.finding import SPLITS, Section, hash_position
from smoe_fairseq.recipes.data.normalization import plain as normalized
from smoe_fairseq.recipes.data.raw import write
from smoe_fairseq.recipes.datasets import Dataset
from smoe_fairseq.recipes.folders import final
from smoe_fairseq.recipes.processes import warn

ENGLISH = "en"
ARCHIVES = ("*.tar.xz", "*.tar.gz", "*.tar.bz2", "*.tar", "*.zip")
_BETWEEN_WORDS = re.compile(
    r"</?(?:br|alt|image|bookmark_value|(?:switch|case|default)inline)\b[^<>]*>|\\[nt](?!\w)", re.I
)
_TAG = re.compile(r"</?[a-z][^<>]*>")
_ESCAPE = re.compile(r"\\([<>\"'])")
# polib breaks lines at these, gettext does not.
_LINE_ENDS = re.compile("[\v\f\x1c-\x1e\x85\u2028\u2029]")

# What polib reads, but gettext does not: a string without its end.
_UNENDED = re.compile(r'^(?:msg[a-z]+(?:\[\d+\])?)?[ \t]*"(?:[^"\\\n]|\\.)*(?:\n|$)', re.M)

Pairs = dict[str, str]  # English text to translation


def gather_messages(dataset: Dataset, source: Path, target: Path) -> None:
    """Write the pairs of all languages of ``dataset`` to ``target`` in the shared layout; see `raw.write`.

    ``source`` is the archive, or a folder with one; configs/datasets/libreoffice.yaml explains
    ``raw.messages``. Raises UsageError if the archive is missing or damaged, has another layout or lacks a
    language; or if a language has no pair to train or validate on.
    """
    archive = _archive(source)
    for pair in dataset.pairs:
        if not pair.startswith(f"{ENGLISH}-"):
            raise UsageError(f"{dataset.name}: pair {pair}: expected one of {ENGLISH}, as en-sl")
    by_language = read_pairs(dataset, archive)
    sections = {}
    for language, pairs in by_language.items():
        for name, part in split(pairs, dataset.raw["messages"]).items():
            if part:
                languages = dict.fromkeys((ENGLISH, language))
                sections[name, f"{ENGLISH}-{language}"] = Section(languages, elsewhere=part.copy)
            elif name == "test":
                warn(f"{language} has no text to test and will not be scored")
            else:
                count = f"{len(pairs)} messages to use, and none of them for {name}"
                advice = f"leave {ENGLISH}-{language} out of `pairs`"
                raise UsageError(f"{archive}: {language} has {count}: {advice}")
    kept = write(dataset, sections, target)
    for pair in dataset.pairs:
        counts = ", ".join(f"{kept.get((s, pair), Counter())['kept']:,} {s}" for s in SPLITS)
        print(f"{final(target)}: {pair}: {counts}", flush=True)


def read_pairs(dataset: Dataset, archive: Path) -> dict[str, Pairs]:
    """The pairs of each language, in the order of its file names.

    The first of several translations of an English text is used. Raises as `gather_messages`.
    """
    settings = dataset.raw["messages"]
    parents = PurePosixPath(settings["layout"].format(language="LANGUAGE")).parent.parts
    languages = [pair.split("-")[1] for pair in dataset.pairs]
    codes = tuple(dataset.raw.get("codes", {}).get(name, name) for name in languages)
    files, present, others = defaultdict(dict), set(), set()

    def wanted(path: PurePosixPath) -> bool:
        rest = _below(path, parents)
        if path.suffix != ".po" or len(rest) < 2:
            others.update(path.parts[:1])
            return False
        present.add(rest[0])
        return any(assign((code,), (rest[0],)) != (None,) for code in codes)

    for path, content in read_members(archive, wanted):
        files[_below(path, parents)[0]][str(path)] = _messages(archive, path, content)
    if not present:
        layout = f"{'/'.join(parents)}/LANGUAGE/**.po"
        raise UsageError(f"{archive} has no file {layout}; it has {_listed(others)}")
    names = dict(zip(codes, assign(codes, tuple(sorted(present))), strict=True))
    for code, name in names.items():
        if name is None:
            raise UsageError(f"{archive} has no language {code}; it has {_listed(present)}")
    return {
        language: _unique(files[names[code]], settings["words"])
        for language, code in zip(languages, codes, strict=True)
    }


def _below(path: PurePosixPath, parents: tuple[str, ...]) -> tuple[str, ...]:
    """The parts of a path below these folders, which may lie in another one; empty if it is elsewhere."""
    for parts in (path.parts, path.parts[1:]):
        if parts[: len(parents)] == parents:
            return parts[len(parents) :]
    return ()


def plain(text: str) -> str:
    """A message on one line, without tags, escapes and marks of access keys (``~File``, ``_File``)."""
    text = _ESCAPE.sub(r"\1", text)
    text = html.unescape(_TAG.sub("", _BETWEEN_WORDS.sub(" ", text)))
    text = re.sub(r"~(?=\w)", "", text)
    return " ".join(map(_without_mark, normalized(text).split()))


def _without_mark(word: str) -> str:
    """Remove the mark in ``Pla_ce``, but not in ``%AVERAGE_VALUE`` or ``com_sun_star``."""
    is_name = word.count("_") != 1 or "%" in word or word.isupper() or not re.search(r"_\w", word)
    return word if is_name else word.replace("_", "")


def split(pairs: Pairs, settings: dict) -> dict[str, list[tuple[str, str]]]:
    """Divide pairs by a hash of the English text; held-out ones (the lowest) beyond ``most`` are dropped."""
    parts = {"train": [], "valid": [], "test": []}
    test = settings["test"]["share"]
    valid = test + settings["valid"]["share"]
    positions = {english: hash_position(english) for english in pairs}
    for english, translation in pairs.items():
        position = positions[english]
        name = "test" if position < test else "valid" if position < valid else "train"
        parts[name].append((english, translation))
    for name in ("valid", "test"):
        parts[name].sort(key=lambda pair: (positions[pair[0]], pair[0]))
        del parts[name][settings[name]["most"] :]
    return parts


def _archive(source: Path) -> Path:
    if source.is_file():
        return source
    archives = sorted(path for pattern in ARCHIVES for path in source.glob(pattern))
    if len(archives) != 1:
        expected = f"--raw has to name one, or a folder with one ({', '.join(ARCHIVES)})"
        raise UsageError(f"{source} has {len(archives) or 'no'} archives: {expected}")
    return archives[0]


def _messages(archive: Path, path: PurePosixPath, content: bytes) -> list[tuple[str, str]]:
    """English and translation of all messages, except untranslated, fuzzy, obsolete and plural ones."""
    try:
        text = _LINE_ENDS.sub(" ", content.decode("utf-8"))
        if match := _UNENDED.search(text):
            line = text.count("\n", 0, match.start()) + 1
            raise ValueError(f"line {line} has a string without its end")
        entries = polib.pofile(text)
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


def _listed(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:200]) or "nothing"
    return shown + " and others" * (len(names) > 200)
