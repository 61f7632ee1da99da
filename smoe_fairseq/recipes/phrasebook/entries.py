"""The lexicon's rows, and how a table of them is read.

A table is text with one concept per line and columns between white space, so that the languages
can be compared at a glance. ``_`` stands for a space within a column, ``-`` for nothing.
"""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Noun:
    english: str
    english_plural: str | None
    sotho: str
    sotho_plural: str | None
    sotho_class: str
    sotho_plural_class: str | None
    malay: str
    classifier: str | None
    tagalog: str
    catalan: str
    catalan_plural: str | None
    gender: str
    kinds: str

    @property
    def counted(self) -> bool:
        return self.english_plural is not None


@dataclass(frozen=True)
class Verb:
    english: str
    english_past: str
    english_ing: str
    sotho: str
    sotho_past: str
    malay: str
    subjects: str
    objects: str | None
    tagalog_past: str
    tagalog_present: str
    tagalog_future: str
    tagalog_infinitive: str
    catalan: str
    catalan_present: str

    @property
    def transitive(self) -> bool:
        return self.objects is not None


@dataclass(frozen=True)
class Adjective:
    english: str
    sotho: str
    sotho_nasal: str | None
    malay: str
    tagalog: str
    catalan: str
    kinds: str


@dataclass(frozen=True)
class Name:
    english: str
    gender: str


@dataclass(frozen=True)
class Place:
    key: str
    english: str
    sotho: str
    malay: str
    tagalog: str
    preposition: str
    catalan: str
    gender: str


@dataclass(frozen=True)
class Time:
    english: str
    sotho: str
    malay: str
    tagalog: str
    catalan: str
    tense: str


def read(table: str, row: type) -> dict:
    """The rows of a table by their first column, in order; a malformed one is a `ValueError`."""
    rows = {}
    for line in filter(str.strip, table.splitlines()):
        cells = [None if c == "-" else c.replace("_", " ") for c in line.split()]
        if len(cells) != len(fields(row)) or cells[0] in rows:
            raise ValueError(f"not one new {row.__name__} of {len(fields(row))} columns: {line}")
        rows[cells[0]] = row(*cells)
    return rows
