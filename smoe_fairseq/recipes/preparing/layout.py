"""Where a data set's text is: a publisher's files, or a folder that a user gives."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from smoe_fairseq.recipes.preparing.chunks import count_lines
from smoe_fairseq.settings.dataset import Dataset
from smoe_fairseq.system.errors import UsageError

SPLITS = ("train", "valid", "test")
SHARED = "{split}.{pair}.{language}"  # how all data sets are kept once they are prepared


@dataclass(frozen=True)
class Section:
    """Lines ``start`` to ``stop`` (or the end) of the files of a pair's two languages."""

    files: dict[str, Path]
    start: int = 0
    stop: int | None = None


def publisher_names(dataset: Dataset, split: str, pair: str, language: str) -> tuple[str, ...]:
    """What a publisher may call a file, by the data set's ``raw.files``, with either order of the pair.

    In the pattern ``{code}`` is the publisher's own code for the language (``raw.codes``),
    ``{sorted}`` the pair in alphabetical order and ``{split}`` as ``raw.splits`` has it.
    """
    patterns = dataset.raw.get("files", SHARED)
    pattern = patterns if isinstance(patterns, str) else patterns[split]
    first, second = pair.split("-")
    names = (
        pattern.format(
            split=dataset.raw.get("splits", {}).get(split, split),
            pair=order,
            sorted="-".join(sorted((first, second))),
            language=language,
            code=dataset.raw.get("codes", {}).get(language, language),
        )
        for order in (pair, f"{second}-{first}")
    )
    return tuple(dict.fromkeys(names))


def all_publisher_names(dataset: Dataset) -> tuple[tuple[str, ...], ...]:
    """For each of a publisher's files, once, the names that it may have."""
    files = (
        publisher_names(dataset, split, pair, language)
        for split in SPLITS
        for pair in dataset.pairs
        for language in pair.split("-")
    )
    return tuple(dict.fromkeys(files))


def find(dataset: Dataset, source: Path, split: str, pair: str) -> Section | Path:
    """The text of a pair in ``source``, or the path of a file that is missing there.

    A file, plain or ``.gz``, may be where its publisher has it, lie directly in ``source`` under the
    same name, or under the shared layout's name (``train.eng-nso.nso``). A folder of one
    ``{language}.txt`` for each language is split as ``raw.parallel`` says.
    """
    files = {}
    for language in pair.split("-"):
        candidates = list(_candidates(dataset, source, split, pair, language))
        files[language] = next((f for f in map(stored, candidates) if f), None)
        if files[language] is None:
            return _parallel(dataset, source, split, pair) or candidates[0]
    return Section(files)


def binarised_folder(dataset: Dataset, folder: Path) -> Path | None:
    """Where ``raw.binarised`` lies in a folder that its archive was unpacked to; None: not there.

    That may be the folder itself, one in it, or the one above, where it is the archive's own.
    """
    if not (layout := dataset.raw.get("binarised")) or not folder.is_dir():
        return None
    places = [folder, *sorted(folder.iterdir())]
    if folder.resolve().name == Path(layout["text"]).parts[0]:
        places.append(folder.resolve().parent)
    return next((place for place in places if (place / layout["text"]).is_dir()), None)


def stored(path: Path) -> Path | None:
    """The file, or else its compressed form."""
    return next((p for p in (path, path.with_name(f"{path.name}.gz")) if p.is_file()), None)


def _candidates(dataset, source, split, pair, language) -> Iterator[Path]:
    names = publisher_names(dataset, split, pair, language)
    for name in names:
        yield source / name
    for name in names:
        yield source / Path(name).name
    yield source / SHARED.format(split=split, pair=pair, language=language)


def _parallel(dataset: Dataset, source: Path, split: str, pair: str) -> Section | None:
    """The pair's part of ``{language}.txt``; None where ``source`` is not such a folder."""
    files = {language: source / f"{language}.txt" for language in dataset.languages}
    if not all(file.is_file() for file in files.values()):
        return None
    lengths = {file: _count_lines(file) for file in files.values()}
    total = next(iter(lengths.values()))
    odd = next((file for file, length in lengths.items() if length != total), None)
    if odd:
        first = next(iter(files.values()))
        raise UsageError(
            f"{first} has {total} lines and {odd} {lengths[odd]}: line n of all languages has to be "
            "the same sentence"
        )
    test = total - dataset.raw["parallel"]["test"]
    valid = test - dataset.raw["parallel"]["valid"]
    if valid < 1:
        raise UsageError(
            f"{source}/*.txt have {total} lines: expected more than the {total - valid} that are set "
            "aside for validation and test (raw.parallel of the data set)"
        )
    start, stop = {"train": (0, valid), "valid": (valid, test), "test": (test, total)}[split]
    return Section({language: files[language] for language in pair.split("-")}, start, stop)


def _count_lines(path: Path) -> int:
    stat = path.stat()
    return _count_lines_once(path, stat.st_size, stat.st_mtime_ns)


@functools.cache  # each pair asks for each language's
def _count_lines_once(path: Path, _size: int, _changed: int) -> int:
    return count_lines(path)
