"""Readers of sentence pairs, for all supported kinds of files.

| file ending | contents |
|---|---|
| `.tsv` | a column for each language, named in the first line or by the file (``train.en-ha.tsv``) |
| `.jsonl`, `.json` | an object on each line, ``{"en": "...", "ha": "..."}``, or that as its ``translation`` |
| `.tmx` | translation units; ``en`` matches the codes ``en`` and ``en-US`` |
| other | a sentence per line, in a file per language |

Each may be compressed: `.gz`, `.xz`, `.bz2`, `.zst`. Every record is a pair; a side that it lacks is None.
"""

import bz2
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import IO

from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import check_plain

Pair = tuple[str | None, str | None]
MAX_LINE_BYTES = 1 << 24  # a longer line may be a whole file without line ends


def _zstandard(path: Path) -> IO[bytes]:
    try:
        import zstandard
    except ImportError:
        advice = "install zstandard to read it, as `pip install zstandard` does, or decompress it"
        raise UsageError(f"{path}: {advice}") from None
    return io.BufferedReader(_Frames(path, zstandard))


class _Frames(io.RawIOBase):
    """The content of a .zst file; unlike zstandard's own reader, it notices that a file is cut off."""

    def __init__(self, path: Path, zstandard):
        self.zstandard, self.decompressor = zstandard, zstandard.ZstdDecompressor()
        self.file, self.frame, self.content = open(path, "rb"), None, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self.content:
            if self.frame is None or not (data := self.frame.unused_data):
                data = self.file.read(1 << 14)
            if not data:
                if self.frame is not None and not self.frame.eof:
                    raise EOFError("it is cut off")
                return 0
            if self.frame is None or self.frame.eof:
                self.frame = self.decompressor.decompressobj()
            try:
                self.content = memoryview(self.frame.decompress(data))
            except self.zstandard.ZstdError as error:
                raise OSError(str(error)) from None  # without errno, as bz2 does
        part, self.content = self.content[: len(buffer)], self.content[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        self.file.close()
        super().close()


COMPRESSED: dict[str, Callable] = {
    **{"": lambda path: open(path, "rb"), ".gz": gzip.open},
    **{".xz": lzma.open, ".bz2": bz2.open, ".zst": _zstandard},
}

_MAGIC = {".gz": b"\x1f\x8b", ".xz": b"\xfd7zXZ", ".bz2": b"BZh", ".zst": b"\x28\xb5\x2f\xfd"}


def ending_of(path: Path) -> str:
    """The ending in `READERS`, before that of a compression; "" if there is none."""
    suffixes = [suffix for suffix in path.suffixes if suffix not in COMPRESSED]
    return suffixes[-1] if suffixes and suffixes[-1] in READERS else ""


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A file's bytes, decompressed; raises UsageError, also on reading, if it is no plain file or damaged."""
    check_plain(path)
    try:
        with COMPRESSED.get(path.suffix, COMPRESSED[""])(path) as content:
            yield content
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        if reason := getattr(error, "strerror", None):  # the system's
            raise UsageError(f"{path} cannot be read: {reason}") from None
        raise UsageError(f"{path} is damaged ({error}): delete it and get it again") from None


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
                expected = f"expected at most {MAX_LINE_BYTES:,} bytes"
                raise UsageError(f"{path}, line {number}: {expected}")
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                for ending, beginning in _MAGIC.items():
                    if number == 1 and line.startswith(beginning):
                        expected = f"expected text, or a name that ends in {ending}"
                        twice = "of text that was compressed twice, decompress it once"
                        raise UsageError(f"{path} is compressed: {expected}; {twice}") from None
                reason = f"{error.reason}; convert it, as `iconv -t utf-8` does"
                raise UsageError(f"{path}, line {number}, is not UTF-8 text: {reason}") from None
            if number == 1 and not line.endswith(b"\n") and "\r" in text.rstrip("\r"):
                raise UsageError(f"{path} has \\r for \\n; convert it, as `tr '\\r' '\\n'` does")
            yield text.removesuffix("\n").removesuffix("\r")


def pairs(files: Mapping[str, Path]) -> Iterator[Pair]:
    """The pairs of sentences in the files of two languages, which may be one file.

    Raises UsageError for an unreadable file, no record with both languages, or different numbers of lines.
    """
    first, second = files.values()
    if first != second:
        yield from _aligned(first, second)
        return
    languages = tuple(files)
    reader = READERS.get(ending_of(first))
    if reader is None:
        both, expected = " and ".join(languages), f"expected one of {', '.join(READERS)}"
        raise UsageError(f"{first} is named for both {both}: {expected}")
    yield from _some_complete(reader(first, languages), str(first), languages)


def _some_complete(pairs: Iterator[Pair], source: str, languages: Pair) -> Iterator[Pair]:
    """The pairs; raises UsageError at the end if none has both sides."""
    complete = False
    for pair in pairs:
        complete = complete or None not in pair
        yield pair
    if not complete:
        raise UsageError(f"{source} has no record with both {' and '.join(languages)}")


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


def _tab_separated(path: Path, languages: Pair) -> Iterator[Pair]:
    columns, places = 0, None
    for number, line in enumerate(lines(path), 1):
        if not line:
            continue
        cells = line.split("\t")
        if places is None:
            columns = len(cells)
            names = [cell.strip().lower() for cell in cells]
            wanted = [language.lower() for language in languages]
            if set(wanted) <= set(names):
                places = [names.index(language) for language in wanted]
                continue
            parts = (part.split("-") for part in path.name.split("."))
            named = next((part for part in parts if sorted(part) == sorted(languages)), None)
            if columns != 2 or named is None:
                expected = f"names of columns, with {' and '.join(languages)} among them"
                name = f"two columns and a name such as train.{'-'.join(languages)}.tsv"
                raise UsageError(f"{path}, line 1: expected {expected}, or {name}")
            places = [named.index(language) for language in languages]
        if len(cells) != columns:
            count = f"{path}, line {number} has {len(cells)} columns"
            raise UsageError(f"{count}: expected {columns}, as in line 1")
        yield cells[places[0]], cells[places[1]]


def _json_lines(path: Path, languages: Pair) -> Iterator[Pair]:
    for number, line in enumerate(lines(path), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            expected = "expected JSON Lines, a whole object on each line"
            raise UsageError(f"{path}, line {number}: {expected} ({error})") from None
        yield record_pair(record, languages, f"{path}, line {number}")


def record_pair(record: object, languages: Pair, place: str) -> Pair:
    """The pair of a record; raises UsageError for other content than texts."""
    texts = record.get("translation", record) if isinstance(record, dict) else None
    if not isinstance(texts, dict):
        example = '{"translation": {"en": "...", "ha": "..."}}'
        raise UsageError(f"{place}: expected a text for each language, such as {example}")
    first, second = languages
    for language in languages:
        if not isinstance(text := texts.get(language), str | None):
            raise UsageError(f"{place}: the value of {language} is {text!r}: expected text")
    return texts.get(first), texts.get(second)


_MARKUP = {"bpt", "ept", "it", "ph", "ut"}  # elements whose content is markup of another format


def _translation_memory(path: Path, languages: Pair) -> Iterator[Pair]:
    from lxml import etree

    with opened(path) as content:
        safe = {"resolve_entities": False, "no_network": True, "load_dtd": False}
        try:
            for _, unit in etree.iterparse(content, tag="{*}tu", **safe):
                texts = {}
                for variant in unit.iterfind("{*}tuv"):
                    code = variant.get("{http://www.w3.org/XML/1998/namespace}lang")
                    code = (code or variant.get("lang") or "").lower().replace("_", "-")
                    segment = variant.find("{*}seg")
                    for language in languages if segment is not None else ():
                        if f"{code}-".startswith(f"{language.lower().replace('_', '-')}-"):
                            for entity in segment.iter(etree.Entity):
                                expected = "expected its text in its place"
                                raise UsageError(f"{path}: the entity {entity.text}: {expected}")
                            texts.setdefault(language, _text(segment))
                yield texts.get(languages[0]), texts.get(languages[1])
                unit.clear()
                while unit.getprevious() is not None:  # else all units stay in memory
                    del unit.getparent()[0]
        except etree.XMLSyntaxError as error:
            raise UsageError(f"{path} is not a TMX file: {error.msg}") from None


def _text(element) -> str:
    """The text of an element, without markup."""
    parts = [element.text or ""]
    for child in element:
        if isinstance(child.tag, str) and child.tag.rpartition("}")[2] not in _MARKUP:
            parts.append(_text(child))
        parts.append(child.tail or "")
    return "".join(parts)


READERS: dict[str, Callable[[Path, Pair], Iterator[Pair]]] = {
    ".tsv": _tab_separated,
    ".jsonl": _json_lines,
    ".json": _json_lines,
    ".tmx": _translation_memory,
}


# Text from elsewhere: a Hugging Face data set, a test set of sacreBLEU.


def read_datasets(source: Mapping, split: str, languages: Pair) -> Iterator[Pair]:
    """The pairs in a split of a Hugging Face data set, or of a folder written by ``save_to_disk``.

    Args:
        source: ``datasets``, a name or a folder; ``config``; and ``splits``, its names of the splits.
    """
    try:
        import datasets
    except ImportError:
        install = "pip install 'smoe-fairseq[datasets]'"
        raise UsageError(f"`source.datasets` needs the package datasets: {install}") from None
    name, config = str(source["datasets"]), source.get("config")
    split = source.get("splits", {}).get(split, {"valid": "validation"}.get(split, split))
    place = f"{name}{f' ({config})' * (config is not None)}, split {split}"
    try:
        if Path(name).is_dir() and not any(Path(name).glob("*.parquet")):
            records = datasets.load_from_disk(name)[split]
        else:
            records = datasets.load_dataset(name, config, split=split)
    except KeyError:
        raise UsageError(f"{place}: there is no such split; name it in `source.splits`") from None
    except Exception as error:  # of the hub, the network, the file system or pyarrow
        reason = " ".join(str(error).split())[:300]
        raise UsageError(f"{place} cannot be loaded ({type(error).__name__}: {reason})") from None
    pairs = (
        record_pair(record, languages, f"{place}, record {number}")
        for number, record in enumerate(records, 1)
    )
    yield from _some_complete(pairs, place, languages)


def sacrebleu_files(name: str, languages: Pair) -> dict[str, Path]:
    """The files of a sacreBLEU test set by language; sacreBLEU downloads them once."""
    from sacrebleu import utils

    if name not in utils.get_available_testsets():
        raise UsageError(f"`source.sacrebleu` {name}: `sacrebleu --list` has all test sets")
    known = utils.get_langpairs_for_testset(name)
    for order in (languages, languages[::-1]):
        pair = "-".join(order)
        if pair in known:
            try:
                files = utils.get_source_file(name, pair), utils.get_reference_files(name, pair)[0]
            except (Exception, SystemExit) as error:
                failed = f"sacreBLEU's {name} of {pair} cannot be loaded"
                raise UsageError(f"{failed}: {' '.join(str(error).split())}") from None
            by_language = dict(zip(order, map(Path, files), strict=True))
            return {language: by_language[language] for language in languages}
    raise UsageError(f"sacreBLEU's {name} has no {'-'.join(languages)}; it has {', '.join(known)}")
