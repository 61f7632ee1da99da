"""Which files of a folder have the text of a pair for a split, by their names and the settings."""

import functools
import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice, product
from pathlib import Path
from typing import Any

from smoe_fairseq.errors import UsageError
from smoe_fairseq.languages import assign, meant, spellings
from smoe_fairseq.recipes.data import elsewhere, readers
from smoe_fairseq.recipes.data.compression import COMPRESSED
from smoe_fairseq.recipes.data.normalization import plain, unquoted
from smoe_fairseq.recipes.data.readers import READERS, Pair
from smoe_fairseq.recipes.datasets import Dataset, both_orders

SPLITS = ("train", "valid", "test")
SHARED = "{split}.{pair}.{language}"
_CALLED = {"train": "training", "valid": "validation", "test": "test"}
ByLanguage = dict[str, Path | None]


@dataclass(frozen=True)
class Section:
    """Some of the sentences of a pair of languages."""

    files: ByLanguage  # both languages may have the same file
    start: int = 0
    stop: int | None = None
    hash_range: tuple[float, float] | None = None  # bounds of the `hash_position` of the first side
    elsewhere: Callable[[], Iterable[Pair]] | None = None  # yields the pairs, in place of files
    codes: Mapping[str, str] = field(default_factory=dict)  # the files' codes (``raw.codes``)
    unquote: bool = False  # remove the quotes of spreadsheets
    beside: tuple[str, ...] = ()  # all languages that are read from the file of both

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
        if self.elsewhere:
            pairs = self.elsewhere()
        else:
            pairs = readers.pairs(self.files, self.codes, self.unquote, self.beside)
        clean = (lambda text: unquoted(plain(text)).strip()) if self.unquote else plain
        pairs = (tuple(side and clean(side) for side in pair) for pair in pairs)
        if self.hash_range is not None:
            low, high = self.hash_range
            pairs = (pair for pair in pairs if low <= hash_position(pair[0] or "") < high)
        return islice(pairs, self.start, self.stop)


def hash_position(text: str) -> float:
    """A hash in [0, 1) of the text's letters and digits, ignoring case."""
    words = " ".join(re.findall(r"\w+", text.casefold()))
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8]) / 2**64


def find(dataset: Dataset, source: Path, split: str, pair: str) -> Section | None:
    """The text of a pair in ``source``; None if there is none.

    The setting ``source`` of the data set comes first. Then a file per language: at its publisher's path
    (``raw.files``), or directly in ``source``, such as ``train.en-ha.ha`` or ``train.ha``. Or a file for both
    languages (see `readers`), such as ``train.en-ha.tsv`` or ``train.tmx``. Last, text that is not split:
    named by ``raw.files`` alike for all splits, a ``{language}.txt`` for each language,
    ``{pair}.{language}`` or ``{pair}.tsv``, which are split by ``raw.parallel`` and ``raw.split``. A pair
    that has none of these may have them in its own folder, such as ``en-ha`` or ``tsv/en-ha``. All may be
    compressed. ``raw.splits`` gives other names of the splits. Names of languages match by meaning if none is
    the same.

    Raises UsageError if several match, in the pair's own folders too, and for settings that give one text to
    train and to validate or test.
    """
    languages = pair.split("-")
    codes = dataset.raw.get("codes", {})
    in_source = readers.Languages(languages, codes, dataset.languages)
    make = functools.partial(Section, codes=codes, unquote=dataset.clean.get("quotes") == "strip")
    if split == "test" and (name := dataset.source.get("sacrebleu")):
        return Section(elsewhere.sacrebleu_files(name, in_source))
    if dataset.source.get("datasets"):
        names = {each: dataset.source.get("splits", {}).get(each, each) for each in SPLITS}
        _check_other("source.splits", names, split, dataset)
        load = functools.partial(elsewhere.read_datasets, dataset.source, split, in_source)
        return make(dict.fromkeys(languages), elsewhere=load)
    place = _Place(source, languages, codes, dataset.languages)
    found = _directly(dataset, place, split, pair, make)
    for by_meaning in (False, True) if "files" not in dataset.raw else ():
        for folder in () if found and by_meaning else place.folders(by_meaning):
            if other := find(dataset, folder, split, pair):
                if found:
                    raise _both_match(*(next(iter(x.files.values())) for x in (found, other)))
                found = other
    return found


def _directly(
    dataset: Dataset, place: "_Place", split: str, pair: str, make: Callable
) -> Section | None:
    """As `find`, without the pair's own folders; ``make`` makes the section."""
    source, languages = place.source, place.languages
    names = {each: publisher_names(dataset, each, pair, languages[0]) for each in SPLITS}
    if not (undivided := len({*names.values()}) == 1):
        _check_other("raw.files" if "files" in dataset.raw else "raw.splits", names, split, dataset)
    of_orders = [
        {lang: _published(dataset, source, split, order, lang) for lang in languages}
        for order in both_orders(pair)
    ]
    published = next((each for each in of_orders if None not in each.values()), of_orders[0])
    named = dataset.raw.get("splits", {}).get(split, split)
    for name, by_meaning in product(dict.fromkeys((named, split)), (False, True)):
        shared = place.by_language(f"{name}.{pair}.")
        own = {x: (None if undivided else published[x]) or shared[x] for x in languages}
        if found := _only_one([own, *place.of_split(name, by_meaning)]):
            return make(found)
        if name != split:
            continue
        candidates = [published if undivided else {}, *place.unsplit(by_meaning)]
        if found := _only_one(candidates[:1]) or _only_one(candidates):
            return make({x: found[x] for x in languages}, **_part(dataset, found, split))
    return None


def _check_other(setting: str, names: Mapping[str, Any], split: str, dataset: Dataset) -> None:
    """Raise UsageError if a setting names the training text for another split."""
    if split != "train" and names[split] == names["train"]:
        same = f"`{setting}` names the same text for train and {split}"
        raise UsageError(f"{dataset.name}: {same}: expected another for {split}")


@dataclass(frozen=True)
class _Place:
    """A folder, with the languages of a pair, the publisher's codes, and all languages of the data set."""

    source: Path
    languages: list[str]
    codes: Mapping[str, str]
    all_languages: tuple[str, ...]

    def folders(self, by_meaning: bool) -> Iterator[Path]:
        """The pair's own folders, such as ``en-ha``, perhaps within another."""
        below = (replace(self, source=path) for path in sorted(self.source.glob("[!.]*/")))
        for place in (self, *below):
            names = (place.source / name for name in place.pairs("", by_meaning))
            yield from filter(Path.is_dir, names)

    def of_split(self, split: str, by_meaning: bool) -> list[ByLanguage]:
        """Candidates for the text of a split, by the names that it may have."""
        pairs = self.pairs(f"{split}.", by_meaning)
        of_languages = [(f"{split}.{order}.", "") for order in pairs]
        of_languages += [(f"{split}.", ""), (f"{split}.", ".txt")]
        of_both = self.of_both(f"{split}.{order}" for order in pairs) or self.of_both([split])
        found = [self.by_language(*ends, by_meaning=by_meaning) for ends in of_languages]
        return [*found, dict.fromkeys(self.languages, of_both)]

    def unsplit(self, by_meaning: bool) -> list[ByLanguage]:
        """Candidates for text that is not split."""
        pairs = self.pairs("", by_meaning)
        ends = [("", ".txt"), *((f"{order}.", "") for order in pairs)]
        found = [self.by_language(*each, by_meaning=by_meaning) for each in ends]
        return [*found, dict.fromkeys(self.languages, self.of_both(pairs))]

    def by_language(self, before: str, after: str = "", by_meaning: bool = False) -> ByLanguage:
        """The file ``{before}{language}{after}`` of each language of the pair."""
        chosen = self.languages
        if by_meaning:
            wanted = tuple(self.codes.get(each, each) for each in self.all_languages)
            middles = self.middles(before, after)
            names = dict(zip(self.all_languages, assign(wanted, middles)))
            chosen = [names.get(each) or each for each in self.languages]
            self._check_variants(before, after, names, set(middles) - set(names.values()))
        return {
            own: _existing(self.source / f"{before}{name}{after}")
            or _existing(self.source / f"{before}{self.codes.get(own, own)}{after}")
            for own, name in zip(self.languages, chosen, strict=True)
        }

    def _check_variants(
        self, before: str, after: str, names: Mapping[str, str | None], free: Collection[str]
    ) -> None:
        """Raise UsageError if another file's name stands for a language as well, such as en-GB and en-US."""
        for own in self.languages:
            code, name = self.codes.get(own, own), names.get(own)
            if name and name != code and (others := sorted(meant(code, free))):
                one, other = (f"{before}{each}{after}" for each in (name, others[0]))
                advice = f"keep one of them, or `raw: {{codes: {{{own}: {name}}}}}` chooses one"
                raise UsageError(f"{self.source}: {one} and {other} are both {own}: {advice}")

    def of_both(self, stems: Iterable[str]) -> Path | None:
        """A file that holds both languages and has one of the names; raises UsageError if several are."""
        return _existing(*(self.source / stem for stem in stems), endings=READERS)

    def pairs(self, before: str, by_meaning: bool) -> list[str]:
        """The names of the pair, in either order; by meaning those in names of files after ``before``."""
        first, second = self.languages
        known = [(first, second), tuple(self.codes.get(each, each) for each in self.languages)]
        exact = [*dict.fromkeys(order for a, b in known for order in (f"{a}-{b}", f"{b}-{a}"))]
        if not by_meaning:
            return exact
        wanted, found = known[1], {}
        for middle in self.middles(before, ""):
            stem = middle.partition(".")[0]
            for hyphen in re.finditer("-", stem):
                names = (stem[: hyphen.start()], stem[hyphen.end() :])
                if None not in assign(wanted, names) and stem not in exact:
                    found[stem] = None
        return [*found]

    def middles(self, before: str, after: str) -> tuple[str, ...]:
        """What the names of files have between these ends, without the ending of a compression."""
        files = self.source.glob("*")
        names = {file.stem if file.suffix in COMPRESSED else file.name for file in files}
        ends = len(before) + len(after)
        between = (n for n in names if n.startswith(before) and n.endswith(after) and len(n) > ends)
        return tuple(sorted(name[len(before) : len(name) - len(after)] for name in between))


def _published(
    dataset: Dataset, source: Path, split: str, order: str, language: str
) -> Path | None:
    """The publisher's file, at its path or directly in ``source``; None if there is none."""
    if "files" not in dataset.raw:
        return None
    names = publisher_names(dataset, split, order, language, orders=(order,))
    spelled = publisher_names(dataset, split, order, language, spellings, (order,))
    exact = filter(None, (_existing(source / name) for name in names))
    if (file := next(exact, None)) is None and tells_apart(dataset):
        spelled = (*(Path(name).name for name in names), *spelled)
    return file or next(filter(None, (_existing(source / name) for name in spelled)), None)


def _only_one(candidates: Iterable[ByLanguage]) -> dict[str, Path] | None:
    """The files by language that are all there; raises UsageError if several candidates are."""
    complete = [files for files in candidates if files and None not in files.values()]
    if other := next((files for files in complete if files != complete[0]), None):
        raise _both_match(*(next(iter(files.values())) for files in (complete[0], other)))
    return complete[0] if complete else None


def _existing(*paths: Path, endings: Iterable[str] = ("",)) -> Path | None:
    """The file with one of the endings, plain or compressed; raises UsageError if there are several."""
    names = map("".join, product(map(str, paths), endings, COMPRESSED))
    files = [*map(Path, filter(os.path.lexists, names))]
    if len(files) > 1:
        raise _both_match(*files)
    return files[0] if files else None


def _both_match(first: Path, second: Path, *_more: Path) -> UsageError:
    advice = "keep one of them, or give each pair of languages a folder, such as en-ha"
    return UsageError(f"{first} and {second} both match: {advice}")


def publisher_names(
    dataset: Dataset,
    split: str,
    pair: str,
    language: str,
    spelled: Callable[[str], tuple[str, ...]] = lambda name: (name,),
    orders: Collection[str] = (),
) -> tuple[str, ...]:
    """The possible names of a publisher's file, by the pattern ``raw.files`` with the pair in either order.

    In the pattern, ``{code}`` is the publisher's code of the language (``raw.codes``), ``{first}`` and
    ``{second}`` are the languages of the pair, ``{sorted}`` is the pair in alphabetical order, and
    ``{split}`` is the publisher's name of the split (``raw.splits``).

    Args:
        spelled: the codes of a language to try, the likeliest first.
        orders: of the pair; by default both.
    """
    patterns = dataset.raw.get("files", SHARED)
    pattern = patterns if isinstance(patterns, str) else patterns.get(split, SHARED)
    codes, names = dataset.raw.get("codes", {}), {}
    for order in orders or both_orders(pair):
        place = order.split("-").index(language)
        both = [*product(*map(spelled, order.split("-")))]
        for together, spelling in product(both, both):
            own = spelling[place]
            name = pattern.format(
                split=dataset.raw.get("splits", {}).get(split, split),
                pair="-".join(together),
                sorted="-".join(sorted(together)),
                first=spelling[0],
                second=spelling[1],
                language=own,
                code=codes.get(language, own),
            )
            names[name] = None
    return tuple(names)


def all_publisher_names(dataset: Dataset) -> tuple[tuple[str, ...], ...]:
    """The possible names of each of a publisher's files."""
    files = (
        publisher_names(dataset, split, pair, language)
        for split in SPLITS
        for pair in dataset.pairs
        for language in pair.split("-")
    )
    return tuple(dict.fromkeys(files))


def tells_apart(dataset: Dataset) -> bool:
    """Whether a publisher's files have different names without their folders."""
    files = [names[0] for names in all_publisher_names(dataset)]
    return len({Path(name).name for name in files}) == len({*files})


def _part(dataset: Dataset, files: Mapping[str, Path], split: str) -> dict[str, Any]:
    """Which part of an unsplit text a split is, as arguments of `Section`."""
    changed = tuple(file.stat().st_mtime_ns for file in files.values())
    codes = dataset.raw.get("codes", {})
    total = _count(tuple(files.items()), tuple(codes.items()), changed)
    tested = 0 if dataset.source.get("sacrebleu") else dataset.raw["parallel"]["test"]
    held = tested + dataset.raw["parallel"]["valid"]
    if held >= total:
        expected = "more than raw.parallel of the data set has for validation and test"
        file = next(iter(files.values()))
        raise UsageError(f"{file} has {total} lines: expected {expected}, {held}")
    start, stop = {"test": (0, tested), "valid": (tested, held), "train": (held, total)}[split]
    if dataset.raw.get("split") == "hash":
        return {"hash_range": (start / total, stop / total)}
    return {"start": total - stop, "stop": total - start}  # the last lines are the test


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


def missing(dataset: Dataset, source: Path, split: str, pair: str) -> str:
    """That a folder lacks the text of a pair for a split, what it has, and which settings name others."""
    first, second = languages = pair.split("-")
    if "files" in dataset.raw:
        names = (publisher_names(dataset, split, pair, each)[0] for each in languages)
        expected = f"{' and '.join(dict.fromkeys(names))} by `raw.files`"
    else:
        place = _Place(source, languages, dataset.raw.get("codes", {}), dataset.languages)
        if folders := [*place.folders(False)] or [*place.folders(True)]:
            if len(folders) > 1:
                raise _both_match(*folders)
            return missing(dataset, folders[0], split, pair)
        expected = f"{split}.{pair}.tsv, or {split}.{first} and {split}.{second}"
        for begin in (f"{split}.{pair}.", f"{split}."):
            files = place.by_language(begin)
            if None in files.values() and len({*files.values()}) > 1:
                lacks = next(language for language, file in files.items() if file is None)
                has = next(filter(None, files.values()))
                return f"{source / f'{begin}{lacks}'} is missing, the other side of {has}"
    there = sorted(path.name for path in source.glob("[!.]*"))
    listed = ", ".join(there[:9]) + f" and {len(there) - 9:,} more" * (len(there) > 9)
    begin = f"`raw: {{splits: {{{split}: NAME}}}}` if its files begin with another NAME"
    other = f"{begin}, `raw: {{files: PATTERN}}` if they are called otherwise (docs/recipes.md)"
    lacks = f"{source} has no {_CALLED[split]} set of {pair}, but {listed or 'no file'}"
    return f"{lacks}: expected {expected}; set {other}"
