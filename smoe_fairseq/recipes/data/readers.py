"""Readers of sentence pairs, for all supported kinds of files.

| file ending | contents |
|---|---|
| `.tsv` | a column for each language, named in the first line or by the file (``train.en-ha.tsv``) |
| `.jsonl`, `.json` | an object on each line, ``{"en": "...", "ha": "..."}``, or that as its ``translation`` |
| `.tmx` | translation units |
| other | a sentence per line, in a file per language |

Each may be compressed: `.gz`, `.xz`, `.bz2`, `.zst`. Every record is a pair; a side that it lacks is None.
Names of languages match by meaning (`languages.assign`): ``en`` is also ``en-US``, ``eng`` and ``English``.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import zip_longest
from pathlib import Path

from smoe_fairseq.errors import UsageError
from smoe_fairseq.languages import are_languages, assign, language_of
from smoe_fairseq.recipes.data import tmx
from smoe_fairseq.recipes.data.compression import COMPRESSED, compression_of, opened
from smoe_fairseq.recipes.data.normalization import unquoted
from smoe_fairseq.recipes.processes import warn

Pair = tuple[str | None, str | None]
Names = tuple[str, ...]
_warn_once = cache(warn)  # a file is read once for each split
MAX_LINE_BYTES = 1 << 24  # a longer line may be a whole file without line ends
# What no file of sentences begins with: WMT's .sgm, XML and HTML, such as a page in place of a download.
_MARKUP = re.compile(r"\s*<(\?xml|!doctype|html|srcset|refset|tstset|mteval|tmx|xliff)\b", re.I)


def ending_of(path: Path) -> str:
    """The ending in `READERS`, before that of a compression; "" if there is none."""
    suffixes = [suffix for suffix in path.suffixes if suffix not in COMPRESSED]
    return suffixes[-1] if suffixes and suffixes[-1] in READERS else ""


def lines(path: Path) -> Iterator[str]:
    """The lines of a text file, without line feeds and without a byte order mark at the beginning.

    Raises UsageError as `opened`, or for a line that is not UTF-8 or longer than `MAX_LINE_BYTES`, and for
    lines that end in a carriage return alone.
    """
    number = 0
    with opened(path) as content:
        while line := content.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise UsageError(f"{path}, line {number}: expected up to {MAX_LINE_BYTES:,} bytes")
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                if number == 1 and (ending := compression_of(line)):
                    expected = f"expected text, or a name that ends in {ending}"
                    raise UsageError(f"{path} is compressed: {expected}") from None
                reason = f"{error.reason}; convert it, as `iconv -t utf-8` does"
                raise UsageError(f"{path}, line {number}, is not UTF-8 text: {reason}") from None
            if number == 1 and (markup := _MARKUP.match(text)):
                expected = "expected text alone, a sentence or record per line"
                raise UsageError(f"{path} begins with {markup[0].strip()}: {expected}")
            if number == 1 and not line.endswith(b"\n") and "\r" in text.rstrip("\r"):
                raise UsageError(f"{path} has \\r for \\n; convert it, as `tr '\\r' '\\n'` does")
            yield text.removesuffix("\n").removesuffix("\r")


class Languages:
    """The two languages to read, by the data set's names and by those of the publisher (``raw.codes``).

    ``beside``: all languages that are read from the same text, so that a name stands for one of them.
    """

    keep_quotes: bool  # see `pairs`, which sets it

    def __init__(
        self,
        languages: Iterable[str],
        codes: Mapping[str, str] | None = None,
        beside: Iterable[str] = (),
    ):
        self.own, self.codes = tuple(languages), codes or {}
        self.all = tuple(beside) or self.own
        self.known: dict[Names, tuple] = {}  # what is found, by the names of a record
        self.first: dict[str, str] = {}  # the first name of each language

    def __str__(self) -> str:
        return " and ".join(self.own)

    def found(self, names: Iterable[str]) -> tuple[str | None, str | None]:
        """The name that stands for each of them, such as ``de-DE`` for ``de``; None if there is none."""
        wanted = tuple(self.codes.get(each, each) for each in self.all)
        codes = assign(wanted, tuple(names))
        own = assign(self.all, tuple(name for name in names if name not in codes))
        found = {}
        for each, code, name, by_code in zip(self.all, wanted, own, codes):
            # A code that is a language's, as pt-PT for pt, means no other variant, as pt-BR.
            by_own = name if name == each or not language_of(code) else None
            found[each] = by_code or by_own
        return tuple(map(found.get, self.own))

    def among(self, names: Iterable[str]) -> tuple[str | None, str | None]:
        """As `found`; if both are there, warns of another of a file's names that stands for one of them."""
        if (names := tuple(names)) in self.known:
            return self.known[names]
        if None in (found := self.found(names)):
            return found
        self.known[names] = found
        for language, name in zip(self.own, found, strict=True):
            if self.codes.get(language, language) != language:
                continue
            others = (assign((language,), (each,))[0] for each in names if each not in found)
            if other := next(filter(None, others), None):
                advice = f"`raw: {{codes: {{{language}: {name}}}}}` chooses one"
                _warn_once(
                    f"both {name} and {other} are names of {language}; {name} is read: {advice}"
                )
            elif (first := self.first.setdefault(language, name)) != name:
                _warn_once(f"{first} and {name}, in different records, are read as {language}")
        return found


def pairs(
    files: Mapping[str, Path],
    codes: Mapping[str, str] | None = None,
    keep_quotes: bool = False,
    beside: Iterable[str] = (),
) -> Iterator[Pair]:
    """The pairs of sentences in the files of two languages, which may be one file.

    Args:
        codes: the publisher's names of languages, if they differ.
        keep_quotes: of a TSV file all of whose cells are quoted, where the caller removes them.
        beside: see `Languages`.

    Raises UsageError for an unreadable file, no record with both languages, or different numbers of lines.
    """
    first, second = files.values()
    if first != second:
        yield from _aligned(first, second)
        return
    languages = Languages(files, codes, beside)
    languages.keep_quotes = keep_quotes
    found = READERS[ending_of(first)](first, languages)
    yield from some_complete(found, str(first), languages)


def some_complete(pairs: Iterator[Pair], source: str, languages: Languages) -> Iterator[Pair]:
    """The pairs; raises UsageError at the end if none has both sides."""
    complete = False
    for pair in pairs:
        complete = complete or None not in pair
        yield pair
    if not complete:
        raise UsageError(f"{source} has no record with both {languages}")


def _aligned(first: Path, second: Path) -> Iterator[Pair]:
    both, counts = zip_longest(lines(first), lines(second)), 0
    for one, other in both:
        if one is None or other is None:
            counts = [counts, counts + 1 + sum(1 for _ in both)]
            more, less = (first, second) if other is None else (second, first)
            numbers = f"{less.name} {counts[0]:,} and {more.name} {counts[1]:,}"
            differ = f"{first} and {second} have different numbers of lines, {numbers}"
            raise UsageError(f"{differ}: line n of both has to be the same sentence")
        counts += 1
        yield one, other


def _tab_separated(path: Path, languages: Languages) -> Iterator[Pair]:
    columns, places, quoted = 0, None, False
    for number, cells in _rows(path):
        if places is None:
            columns = len(cells)
            names = tuple(unquoted(cell).strip(' "') for cell in cells)
            quoted = all(map(_is_quoted, cells))
            if places := _places(languages, names):  # of a quoted header, all cells may be quoted
                twice = next((names[i] for i in places if names.count(names[i]) > 1), None)
                if twice is not None:
                    raise UsageError(f"{path}, line 1: {twice} names two columns; expected one")
                continue
            parts = [*path.name.split("."), path.parent.name]
            orders = (tuple(re.split("-|_to_", part)) for part in parts)
            pairs = (_places(languages, order) for order in orders if len(order) == 2)
            named = next(filter(None, pairs), None)
            is_header = are_languages(names) or {*map(str.casefold, names)} <= _ROLES
            if is_header or columns != 2 or named is None:
                expected = f"names of columns, with {languages} among them"
                other = f"two columns and a name such as train.{'-'.join(languages.own)}.tsv"
                if columns == 2 and named:
                    other = "no such line"
                shown = " | ".join(names)
                raise UsageError(f"{path}, line 1, {shown:.60}: expected {expected}, or {other}")
            places, quoted = named, False
        if len(cells) != columns:
            found = f"expected {columns} columns, as in line 1, not {len(cells)}"
            raise UsageError(f"{path}, line {number}: {found}")
        remove = quoted and not languages.keep_quotes
        yield tuple(unquoted(cells[i]) if remove else cells[i] for i in places)


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The number of each line that is not empty, and its cells.

    A quoted cell may have tabs and line breaks, which become blanks. If a row has too many cells, or all of
    the first line are quoted, a cell whose quote is open is joined with those that follow. A last cell whose
    quote is open is joined with the lines that follow, if that closes it and no row gets more cells than the
    first line has; but lines that each have as many cells as the first stay rows, as those of a dialogue.
    """
    columns, all_quoted, numbered, again = 0, False, enumerate(lines(path), 1), []

    def read() -> tuple[int, str] | None:
        return again.pop() if again else next(numbered, None)

    def divided(row: str) -> list[str]:
        cells = row.split("\t")
        return _joined(cells) if all_quoted or 0 < columns < len(cells) else cells

    while first := read():
        row, more = first[1], []
        cells = divided(row)
        if not columns:
            columns, all_quoted = len(cells), all(map(_is_quoted, cells))
        while _is_open(cells[-1]) and len(cells) <= columns and len(more) < 99:
            if (following := read()) is None:
                break
            more.append(following)
            row += f"\n{following[1]}"
            cells = divided(row)
        if more or len(cells) <= row.count("\t"):
            broken = [re.search(r"[\n\t]", cell) for cell in cells]
            whole = [unquoted(cell) if each else cell for cell, each in zip(cells, broken)]
            quoted = all(new != cell for cell, new, each in zip(cells, whole, broken) if each)
            tabs = {line.count("\t") for line in row.split("\n")}
            dialogue = more and tabs == {columns - 1} and not all_quoted
            if quoted and len(cells) <= columns and not dialogue:
                cells = [re.sub(r"[\n\t]", " ", cell) for cell in whole]
            else:  # these are rows of their own
                cells = first[1].split("\t")
                again += more[::-1]
        if cells != [""]:
            yield first[0], cells


def _is_quoted(cell: str) -> bool:
    return len(cell) > 1 and cell[0] == cell[-1] == '"'


def _joined(cells: list[str]) -> list[str]:
    joined = []
    for cell in cells:
        if joined and _is_open(joined[-1]):
            joined[-1] += f"\t{cell}"
        else:
            joined.append(cell)
    return joined


def _is_open(cell: str) -> bool:
    """Whether a cell begins with a quote that it does not close."""
    return cell.startswith('"') and cell.count('"') % 2 == 1


_ROLES = {"source", "target", "src", "tgt"}  # names of columns that do not tell the language


def _places(languages: Languages, names: Names) -> tuple[int, int] | None:
    """The places of two languages in a line, or in a name such as en-de; None if one is missing."""
    found = languages.among(names)
    return None if None in found else tuple(map(names.index, found))


def _json_lines(path: Path, languages: Languages) -> Iterator[Pair]:
    for number, line in enumerate(lines(path), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            expected = "expected JSON Lines, a whole object on each line"
            raise UsageError(f"{path}, line {number}: {expected} ({error})") from None
        yield record_pair(record, languages, f"{path}, line {number}")


def record_pair(record: object, languages: Languages, place: str) -> Pair:
    """The pair of a record; raises UsageError for other content than texts."""
    texts = record.get("translation", record) if isinstance(record, dict) else None
    if not isinstance(texts, dict):
        example = '{"translation": {"en": "...", "ha": "..."}}'
        raise UsageError(f"{place}: expected a text for each language, such as {example}")
    first, second = languages.among(texts)
    for language in (first, second):
        if not isinstance(text := texts.get(language), str | None):
            raise UsageError(f"{place}: the value of {language} is {text!r}: expected text")
    return texts.get(first), texts.get(second)


def _translation_memory(path: Path, languages: Languages) -> Iterator[Pair]:
    for segments in tmx.units(path):
        found = [segments.get(name) for name in languages.among(segments)]
        yield tuple(None if each is None else tmx.text_of(each, path) for each in found)


READERS: dict[str, Callable[[Path, Languages], Iterator[Pair]]] = {
    ".tsv": _tab_separated,
    ".jsonl": _json_lines,
    ".json": _json_lines,
    ".tmx": _translation_memory,
}
