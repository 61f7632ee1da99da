"""Raw text: from a publisher's layout to the layout that all data sets share.

The shared layout is one folder with files ``{split}.{pair}.{language}`` for the splits train, valid and test,
in UTF-8. Line ``n`` of both sides of a pair is the same sentence.
"""

import functools
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import whole_folder, write_whole
from smoe_fairseq.forms import read_json
from smoe_fairseq.languages import assign
from smoe_fairseq.recipes.data import readers
from smoe_fairseq.recipes.data.faults import Faults
from smoe_fairseq.recipes.data.normalization import plain
from smoe_fairseq.recipes.data.readers import COMPRESSED, READERS, Pair
from smoe_fairseq.recipes.data.text_files import parallel_map, progress
from smoe_fairseq.recipes.datasets import Dataset, both_orders, translated
from smoe_fairseq.recipes.folders import LEFT_OUT, SIZES, Folders
from smoe_fairseq.recipes.processes import warn

SPLITS = ("train", "valid", "test")
SHARED = "{split}.{pair}.{language}"
SETTINGS = ".settings.json"  # in the folder of gathered text, see `settings_of`


@dataclass(frozen=True)
class Section:
    """Some of the sentences of a pair of languages."""

    files: dict[str, Path | None]  # by language; both languages may have the same file
    start: int = 0
    stop: int | None = None
    hash_range: tuple[float, float] | None = None  # bounds of the `hash_position` of the first side
    elsewhere: Callable[[], Iterable[Pair]] | None = None  # yields the pairs, in place of files
    codes: Mapping[str, str] = field(
        default_factory=dict
    )  # the files' names of languages (``raw.codes``)

    @property
    def is_divided(self) -> bool:
        """Whether it is a part of a text that holds all splits."""
        return self.hash_range is not None or self.stop is not None

    @property
    def size(self) -> int:
        """Bytes to read, as an estimate: compressed files count three times."""
        files = {file for file in self.files.values() if file is not None}
        return sum(file.stat().st_size * (3 if file.suffix in COMPRESSED else 1) for file in files)

    def pairs(self) -> Iterator[Pair]:
        """The sentences, normalised by `plain`; raises as `readers.pairs`."""
        pairs = self.elsewhere() if self.elsewhere else readers.pairs(self.files, self.codes)
        pairs = (tuple(side and plain(side) for side in pair) for pair in pairs)
        if self.hash_range is not None:
            low, high = self.hash_range
            pairs = (pair for pair in pairs if low <= hash_position(pair[0] or "") < high)
        return islice(pairs, self.start, self.stop)


def gather(dataset: Dataset, source: Path, target: Path, workers: int = 1) -> None:
    """Bring the text of a folder (see `find`) into the shared layout; see `write`.

    A pair without test files causes a warning. Raises UsageError, with ``target`` unchanged, if another file
    is missing or damaged, or two sides differ in length.
    """
    sections = {
        (split, pair): section
        for split in SPLITS
        for pair in (*dataset.pairs, *(dataset.keep if split == "test" else ()))
        if (section := _section(dataset, source, split, pair))
    }
    for pair in dataset.pairs:
        parts = {s: each for (s, p), each in sections.items() if p == pair and not each.elsewhere}
        if dataset.source.get("sacrebleu"):
            parts.pop("test", None)
        if len({part.is_divided for part in parts.values()}) > 1:
            files = ", ".join(f"{s} in {[*each.files.values()][0]}" for s, each in parts.items())
            raise UsageError(
                f"{pair} has {files}: expected all splits in files, or one text to divide"
            )
    counts = write(dataset, sections, target, workers)
    kept = sum(count["kept"] for count in counts.values())
    print(f"{target}: {2 * len(sections)} files, {kept:,} pairs of lines", flush=True)


def write(
    dataset: Dataset, sections: Mapping[tuple[str, str], Section], target: Path, workers: int = 1
) -> dict[tuple[str, str], Counter]:
    """Write text in the shared layout; returns the counts of pairs read and kept, by split and pair.

    Training pairs are left out if a side is empty, or if the data set's ``clean`` drops them. ``sizes.json``
    next to ``target`` gets the numbers of training pairs, ``left_out.json`` those of pairs left out. All
    names of files and pairs have the codes of a pretrained model, if there is one.
    """
    inputs = [file for part in sections.values() for file in part.files.values() if file]
    for replaced in (target, Folders(dataset.name).raw):
        check_replaceable(replaced, inputs)
    # The longest first, so that all processes end at about the same time.
    parts = sorted(sections.items(), key=lambda part: -part[1].size)
    size = sum(section.size for _, section in parts)
    overlap, held_out = dataset.clean.get("overlap"), {pair: [] for _, pair in sections}
    for (split, pair), section in sections.items():
        if split != "train" and overlap in ("drop", "drop-all"):
            for other in dataset.pairs if overlap == "drop-all" else [pair]:
                held_out[other].append(section)
    counts: dict[tuple[str, str], Counter] = {}
    with whole_folder(target, replace=True) as partial:
        copy = functools.partial(_copy, partial, dataset.clean, dataset.codes)
        units = ((*key, section, held_out[key[1]]) for key, section in parts)
        with progress("gather", size) as advance, parallel_map(copy, workers, size) as apply:
            for (key, section), count in zip(parts, apply(units), strict=True):
                counts[key] = count
                advance(section.size)
        left_out = {
            translated(pair, dataset.codes): dict(counts["train", pair]) for pair in dataset.pairs
        }
        write_sizes(target, {pair: count["kept"] for pair, count in left_out.items()})
        (partial / SETTINGS).write_text(json.dumps(settings_of(dataset), indent=2) + "\n", "utf-8")
        write_whole(target.with_name(LEFT_OUT), json.dumps(left_out, indent=2) + "\n")
    return counts


def settings_of(dataset: Dataset) -> dict[str, Any]:
    """The settings that gathered text depends on."""
    places = ("url", "sha256", "archives")  # where the same text can be had
    settings = {key: value for key, value in dataset.raw.items() if key not in places}
    return {"raw": settings, "source": dataset.source, "clean": dataset.clean}


def check_settings(dataset: Dataset, text: Path) -> None:
    """Raise UsageError if text was gathered with other settings, or not gathered and to be cleaned."""
    now = settings_of(dataset)
    before = read_json(text / SETTINGS) if (text / SETTINGS).exists() else now | {"clean": {}}
    if changed := next((key for key in now if before.get(key) != now[key]), None):
        advice = "delete it to gather its text again, or give another folder with the text by --raw"
        raise UsageError(f"{text} was not made with this `{changed}`: {advice}")


def check_replaceable(target: Path, inputs: Iterable[Path]) -> None:
    """Raise UsageError if the folder of gathered text has an input, links resolved, or any other file."""
    others = (p for p in target.glob("[!.]*") if p.is_dir() or p.name.split(".")[0] not in SPLITS)
    inside = (path for path in inputs if path.resolve().is_relative_to(target.resolve()))
    if lost := next(inside, None) or next(others, None):
        expected = "move it elsewhere, or leave --raw out to use prepared text as it is"
        raise UsageError(
            f"{lost} would be lost, as the prepared text replaces {target}: {expected}"
        )


def write_sizes(raw: Path, sizes: dict[str, int]) -> None:
    """Write the numbers of training sentences by pair to ``sizes.json`` next to the raw text."""
    write_whole(raw.with_name(SIZES), json.dumps(sizes, indent=2) + "\n")


def _section(dataset: Dataset, source: Path, split: str, pair: str) -> Section | None:
    """The text of a pair; raises UsageError if it is missing, but only warns and returns None for a test."""
    section = find(dataset, source, split, pair)
    if isinstance(section, Section):
        used = {file.name for file in section.files.values() if file}
        stems = {Path(name).name for names in all_publisher_names(dataset) for name in names}
        named = {stem + ending for stem in stems for ending in COMPRESSED}
        if (split, pair) == ("train", dataset.pairs[0]) and "files" in dataset.raw and used - named:
            warn(f"{source} has no file of `raw.files`; {' and '.join(sorted(used))} is used")
        return section
    if split == "test":
        warn(f"{section} is missing: {pair} has no test data and will not be scored")
        return None
    texts = [f"{language}.txt" for language in dataset.languages]
    absent = [name for name in texts if _existing(source / name) is None]
    if absent and len(absent) < len(texts):
        raise UsageError(f"{source} has no {absent[0]}: expected {', '.join(texts)}")
    names = [SHARED.format(split=split, pair=pair, language=pair.split("-")[0])]
    names += [f"{split}.{pair}{ending}" for ending in (".tsv", ".jsonl", ".tmx")]
    names += [f"{pair}.{pair.partition('-')[0]}", f"{pair}.tsv", texts[0]]
    others = ", ".join(name for name in names if name != section.name)
    missing = f"{section} is missing, plain or compressed, and so are {others} in {source}"
    there = sorted(file.name for file in source.glob("[!.]*"))
    listed = ", ".join(there[:5]) + f" and {len(there) - 5:,} more" * (len(there) > 5)
    has = f"; it has {listed}, of other names or kinds" * bool(there)
    needed = f"{pair} needs one of these, or files that `raw.files` names, to {split}"
    raise UsageError(f"{missing}: {needed}{has}")


def find(dataset: Dataset, source: Path, split: str, pair: str) -> Section | Path:
    """The text of a pair in ``source``, or the path of a missing file.

    The setting ``source`` of the data set comes first. Then a file per language, at its publisher's path, or
    directly in ``source`` with the publisher's or the shared layout's name. Then a file for both languages
    (see `readers`), such as ``train.en-ha.tsv`` or ``train.tmx``. Last, text that is not split: named by
    ``raw.files`` alike for all splits, a ``{language}.txt`` for each language, ``{pair}.{language}`` or
    ``{pair}.tsv``, which are split by ``raw.parallel`` and ``raw.split``. All of these may be compressed.

    Raises UsageError for settings that give one text to train and to validate or test.
    """
    languages = pair.split("-")
    codes = dataset.raw.get("codes", {})
    named = readers.Languages(languages, codes)
    if split == "test" and (name := dataset.source.get("sacrebleu")):
        return Section(readers.sacrebleu_files(name, named))
    if dataset.source.get("datasets"):
        names = {each: dataset.source.get("splits", {}).get(each, each) for each in SPLITS}
        _check_other(dataset, "source.splits", names, split)
        load = functools.partial(readers.read_datasets, dataset.source, split, named)
        return Section(dict.fromkeys(languages), elsewhere=load)
    names = {each: publisher_names(dataset, each, pair, languages[0]) for each in SPLITS}
    if not (undivided := len({*names.values()}) == 1):
        _check_other(dataset, "raw.files", names, split)
    files, missing = {}, None
    for language in languages:
        shared = source / SHARED.format(split=split, pair=pair, language=language)
        file = None if undivided else _published(dataset, source, split, pair, language)
        files[language] = file or _existing(shared)
        name = publisher_names(dataset, split, pair, language)[0]
        missing = missing or (source / name if files[language] is None else None)
    both = _of_both(source, [f"{split}.{order}" for order in both_orders(pair)])
    both = both or _of_both(source, [split])
    if found := _only_one([files, dict.fromkeys(languages, both)]):
        return Section(found, codes=codes)
    return _unsplit(dataset, source, split, pair, undivided) or missing


def _check_other(dataset: Dataset, setting: str, names: Mapping[str, Any], split: str) -> None:
    """Raise UsageError if a setting names the training text for another split."""
    if split != "train" and names[split] == names["train"]:
        same = f"`{setting}` names the same text for train and {split}"
        raise UsageError(f"{dataset.name}: {same}: expected another for {split}")


def _published(dataset: Dataset, source: Path, split: str, pair: str, language: str) -> Path | None:
    """The publisher's file, at its path or directly in ``source``; None if there is none."""
    names = publisher_names(dataset, split, pair, language)
    names += tuple(Path(name).name for name in names)
    return next(filter(None, (_existing(source / name) for name in names)), None)


def _only_one(candidates: Iterable[dict[str, Path | None]]) -> dict[str, Path] | None:
    """The files by language that are all there; raises UsageError if several candidates are."""
    complete = [files for files in candidates if None not in files.values()]
    if len(complete) > 1:
        first, second = (next(iter(files.values())) for files in complete[:2])
        raise UsageError(f"{first} and {second} both match: keep one of them")
    return complete[0] if complete else None


def _existing(path: Path, endings: Iterable[str] = ("",)) -> Path | None:
    """The file with one of the endings, plain or compressed; raises UsageError if there are several."""
    names = (f"{path}{ending}{compressed}" for ending in endings for compressed in COMPRESSED)
    files = [*map(Path, filter(os.path.lexists, names))]
    if len(files) > 1:
        raise UsageError(f"{files[0]} and {files[1]} both match: keep one of them")
    return files[0] if files else None


def _of_both(source: Path, stems: Iterable[str]) -> Path | None:
    """A file that holds both languages and has one of the names; raises UsageError if there are several."""
    files = [*filter(None, (_existing(source / stem, READERS) for stem in stems))]
    if len(files) > 1:
        raise UsageError(f"{files[0]} and {files[1]} both match the pair: keep one of them")
    return files[0] if files else None


def publisher_names(dataset: Dataset, split: str, pair: str, language: str) -> tuple[str, ...]:
    """The possible names of a publisher's file, by the pattern ``raw.files`` with the pair in either order.

    In the pattern, ``{code}`` is the publisher's code of the language (``raw.codes``), ``{sorted}`` is the
    pair in alphabetical order, and ``{split}`` is the publisher's name of the split (``raw.splits``).
    """
    patterns = dataset.raw.get("files", SHARED)
    pattern = patterns if isinstance(patterns, str) else patterns[split]
    words = {
        "split": dataset.raw.get("splits", {}).get(split, split),
        "sorted": "-".join(sorted(pair.split("-"))),
        "language": language,
        "code": dataset.raw.get("codes", {}).get(language, language),
    }
    return tuple(dict.fromkeys(pattern.format(pair=order, **words) for order in both_orders(pair)))


def all_publisher_names(dataset: Dataset) -> tuple[tuple[str, ...], ...]:
    """The possible names of each of a publisher's files."""
    files = (
        publisher_names(dataset, split, pair, language)
        for split in SPLITS
        for pair in dataset.pairs
        for language in pair.split("-")
    )
    return tuple(dict.fromkeys(files))


def _unsplit(
    dataset: Dataset, source: Path, split: str, pair: str, published: bool
) -> Section | None:
    """The part of unsplit text for a split; None if ``source`` has no such text.

    Args:
        published: whether ``raw.files`` names such text.
    """
    languages, codes = pair.split("-"), dataset.raw.get("codes", {})
    files = {}
    if published:
        files = {lang: _published(dataset, source, split, pair, lang) for lang in languages}
    if not files or None in files.values():
        stems = sorted({file.name.split(".txt")[0] for file in source.glob("*.txt*")})
        named = assign(tuple(codes.get(each, each) for each in dataset.languages), tuple(stems))
        candidates = [
            {
                lang: _existing(source / f"{name or lang}.txt")
                for lang, name in zip(dataset.languages, named, strict=True)
            }
        ]
        for order in both_orders(pair):
            candidates.append({lang: _existing(source / f"{order}.{lang}") for lang in languages})
        candidates.append(dict.fromkeys(languages, _of_both(source, both_orders(pair))))
        if not (files := _only_one(candidates)):
            return None
    changed = tuple(file.stat().st_mtime_ns for file in files.values())
    total = _count(tuple(files.items()), tuple(codes.items()), changed)
    tested = dataset.raw["parallel"]["test"]
    held = tested + dataset.raw["parallel"]["valid"]
    if held >= total:
        expected = "more than raw.parallel of the data set has for validation and test"
        file = next(iter(files.values()))
        raise UsageError(f"{file} has {total} lines: expected {expected}, {held}")
    files = {language: files[language] for language in languages}
    start, stop = {"test": (0, tested), "valid": (tested, held), "train": (held, total)}[split]
    if dataset.raw.get("split") == "hash":
        return Section(files, hash_range=(start / total, stop / total), codes=codes)
    return Section(files, total - stop, total - start, codes=codes)  # the last lines are the test


@functools.cache  # called for each split and pair
def _count(
    files: tuple[tuple[str, Path], ...],
    codes: tuple[tuple[str, str], ...],
    _changed: tuple[int, ...],
) -> int:
    """The number of pairs of lines; raises UsageError if files have different numbers of lines."""
    (_, first), *others = files
    if readers.ending_of(first):
        return sum(1 for _ in readers.pairs(dict(files), dict(codes)))
    lengths = {file: sum(1 for _ in readers.lines(file)) for _, file in files}
    if odd := next((file for _, file in others if lengths[file] != lengths[first]), None):
        both = f"{first} has {lengths[first]} lines and {odd} {lengths[odd]}"
        raise UsageError(f"{both}: line n of all languages has to be the same sentence")
    return lengths[first]


def hash_position(text: str) -> float:
    """A hash in [0, 1) of the text's letters and digits, ignoring case."""
    words = " ".join(re.findall(r"\w+", text.casefold()))
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8]) / 2**64


def _copy(folder: Path, clean: Mapping[str, Any], codes: Mapping[str, str], unit: tuple) -> Counter:
    """Write a section to ``folder`` in the shared layout; returns the counts of pairs read and kept."""
    split, pair, section, held_out = unit
    faults = None
    if split == "train":
        faults = Faults(_held_out(pair.split("-"), held_out), clean)
    prefix = folder / f"{split}.{translated(pair, codes)}"
    counts = copy_pairs(section, prefix, faults, codes)
    if not counts["kept"]:
        files = list(dict.fromkeys(filter(None, section.files.values())))
        for file in files:
            _refuse_empty(file, split, pair)
        named = " and ".join(map(str, files)) or "the source"
        kept = "no line with text on both sides is kept"
        if left_out := [name for name in counts if name not in ("read", "empty")]:
            kept = f"`clean` leaves no line, by {' and '.join(left_out)}"
        elif section.hash_range and not counts["read"]:
            kept = "`raw: {split: hash}` leaves an empty split, as sources repeat or lines are few"
        raise UsageError(f"{named}: {kept}: {pair} needs one to {split}")
    return counts


def _held_out(languages: Sequence[str], sections: Iterable[Section]) -> Iterator[tuple]:
    """The sentences of sections in two languages; None for a language that a section lacks."""
    for section in sections:
        if set(languages) & set(section.files):
            for pair in section.pairs():
                yield tuple(map(dict(zip(section.files, pair, strict=True)).get, languages))


def copy_pairs(
    section: Section, prefix: Path, faults: Faults | None, codes: Mapping[str, str] = {}
) -> Counter:
    """Write ``PREFIX.{language}`` without faulty and incomplete pairs; returns the counts."""
    counts = Counter()
    first, second = (f"{prefix}.{codes.get(lang, lang)}" for lang in section.files)
    with open(first, "w", encoding="utf-8") as one, open(second, "w", encoding="utf-8") as other:
        for sides in section.pairs():
            counts["read"] += 1
            # A record without a language may be of another pair: it is no empty line of a test.
            if names := ("empty",) * (None in sides) if faults is None else faults.of(*sides):
                counts[names[0]] += 1
                continue
            counts["kept"] += 1
            one.write(f"{sides[0]}\n")
            other.write(f"{sides[1]}\n")
    return counts


def check(
    dataset: Dataset, raw: Path, needed: tuple[str, ...] = ("train", "valid")
) -> tuple[str, ...]:
    """The pairs with test text; raises UsageError if a ``needed`` file is missing, or a file is empty."""
    tested = []
    for pair in (*dataset.pairs, *dataset.keep):
        for split in (*(needed if pair in dataset.pairs else ()), "test"):
            files = [raw / f"{split}.{pair}.{language}" for language in pair.split("-")]
            present = [file for file in files if file.exists()]
            for file in present:
                _refuse_empty(file, split, pair)
            if present == files and split == "test":
                tested.append(pair)
            elif present != files and split != "test":
                missing = next(file for file in files if file not in present)
                raise UsageError(f"{missing} is missing: {pair} needs it to {split}")
    return tuple(tested)


def _refuse_empty(file: Path, split: str, pair: str) -> None:
    if not file.stat().st_size:
        leave_out = f", or remove the files to leave {pair} out of it" if split == "test" else ""
        raise UsageError(f"{file} is empty: {pair} needs at least one line to {split}{leave_out}")
