"""Raw text: from a publisher's layout to the layout that all data sets share.

The shared layout is one folder with files ``{split}.{pair}.{language}`` for the splits train, valid and test,
in UTF-8. Line ``n`` of both sides of a pair is the same sentence.
"""

import functools
import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import whole_folder, write_whole
from smoe_fairseq.recipes.config import Dataset
from smoe_fairseq.recipes.data.text_files import count_lines, progress, shared
from smoe_fairseq.recipes.folders import SIZES
from smoe_fairseq.recipes.processes import report

SPLITS = ("train", "valid", "test")
SHARED = "{split}.{pair}.{language}"


@dataclass(frozen=True)
class Section:
    """Lines ``start`` to ``stop`` (None: the end) of a file per language of a pair."""

    files: dict[str, Path]
    start: int = 0
    stop: int | None = None

    @property
    def size(self) -> int:
        """Bytes, as a measure of the work: compressed files count three times."""
        files = self.files.values()
        return sum(file.stat().st_size * (3 if file.suffix == ".gz" else 1) for file in files)


def gather(dataset: Dataset, source: Path, target: Path, workers: int = 1) -> None:
    """Bring the text of a folder (see `find`) into the shared layout.

    Runs of white space become single spaces; this includes separators at which other programs would break
    a line. Training pairs with an empty side are left out. A pair without test files is reported. The
    numbers of training pairs go to ``sizes.json`` beside ``target``.

    Raises:
        UsageError: a file is missing or damaged, or two sides differ in length. An existing ``target`` stays
            unchanged.
    """
    if not source.is_dir():
        raise UsageError(
            f"{source} is not a folder: RAW has to name one with {dataset.name}'s text"
        )
    parts = [
        (split, pair, section)
        for split in SPLITS
        for pair in dataset.pairs
        if (section := _section(dataset, source, split, pair))
    ]
    parts.sort(
        key=lambda part: -part[2].size
    )  # the longest first, so that all processes end together
    size = sum(section.size for *_, section in parts)
    counts = {}
    with whole_folder(target, replace=True) as partial:
        copy = functools.partial(_copy, partial)
        with progress("gather", size) as advance, shared(copy, workers, size) as each:
            for (split, pair, section), count in zip(parts, each(parts), strict=True):
                counts[split, pair] = count
                advance(section.size)
        sizes = {pair.split("-")[1]: counts["train", pair] for pair in dataset.pairs}
        write_sizes(target, sizes)
    print(f"{target}: {2 * len(parts)} files, {sum(counts.values()):,} pairs of lines", flush=True)


def write_sizes(raw: Path, sizes: dict[str, int]) -> None:
    """Write the numbers of training pairs by language to ``sizes.json`` beside the raw text."""
    write_whole(raw.with_name(SIZES), json.dumps(sizes, indent=2) + "\n")


def _section(dataset: Dataset, source: Path, split: str, pair: str) -> Section | None:
    """The text of a pair; None with a warning if it has no test text.

    Raises:
        UsageError: training or validation text is missing.
    """
    section = find(dataset, source, split, pair)
    if isinstance(section, Section):
        return section
    if split == "test":
        report(f"{section} is missing: {pair} has no test data and will not be scored")
        return None
    texts = [f"{language}.txt" for language in dataset.languages]
    absent = [name for name in texts if not (source / name).is_file()]
    if absent and len(absent) < len(texts):
        raise UsageError(f"{source} has no {absent[0]}: expected {', '.join(texts)}")
    shared_name = SHARED.format(split=split, pair=pair, language=pair.split("-")[0])
    others = texts[0] if section.name == shared_name else f"{shared_name} or {texts[0]}"
    raise UsageError(
        f"{section} (or .gz) is missing (nor has {source} such as {others}): {pair} needs it to {split}"
    )


def find(dataset: Dataset, source: Path, split: str, pair: str) -> Section | Path:
    """The text of a pair in ``source``, or the path of a missing file.

    A file, plain or ``.gz``, may have its publisher's path, its publisher's name directly in ``source``, or
    the shared layout's name there. A folder with one ``{language}.txt`` for each language is split as
    ``raw.parallel`` says.
    """
    files = {}
    for language in pair.split("-"):
        names = publisher_names(dataset, split, pair, language)
        names += tuple(Path(name).name for name in names)
        names += (SHARED.format(split=split, pair=pair, language=language),)
        paths = [source / f"{name}{ending}" for name in names for ending in ("", ".gz")]
        files[language] = next(filter(Path.is_file, paths), None)
        if files[language] is None:
            return _parallel(dataset, source, split, pair) or paths[0]
    return Section(files)


def publisher_names(dataset: Dataset, split: str, pair: str, language: str) -> tuple[str, ...]:
    """The names that a publisher's file may have, by the pattern ``raw.files`` with the pair in either order.

    In the pattern, ``{code}`` is the publisher's code of the language (``raw.codes``), ``{sorted}`` is the
    pair in alphabetical order, and ``{split}`` is the split's name in ``raw.splits``.
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
    """The names that each of a publisher's files may have."""
    files = (
        publisher_names(dataset, split, pair, language)
        for split in SPLITS
        for pair in dataset.pairs
        for language in pair.split("-")
    )
    return tuple(dict.fromkeys(files))


def _parallel(dataset: Dataset, source: Path, split: str, pair: str) -> Section | None:
    """The pair's lines of ``{language}.txt``; None if ``source`` has no such files."""
    files = {language: source / f"{language}.txt" for language in dataset.languages}
    if not all(file.is_file() for file in files.values()):
        return None
    lengths = {file: _count_once(file, file.stat().st_mtime_ns) for file in files.values()}
    (first, total), *_ = lengths.items()
    odd = next((file for file, length in lengths.items() if length != total), None)
    if odd:
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


@functools.cache  # each pair asks for all languages
def _count_once(file: Path, _changed: int) -> int:
    return count_lines(file)


def _copy(folder: Path, part: tuple[str, str, Section]) -> int:
    """Write a part to ``folder`` in the shared layout; returns the number of lines."""
    split, pair, section = part
    count = copy_pair(section, folder / f"{split}.{pair}", keep_empty=split != "train")
    if not count:
        for file in section.files.values():
            _refuse_empty(file, split, pair)
        first, second = section.files.values()
        raise UsageError(
            f"{first} and {second} have no line with text on both sides: {pair} needs one to {split}"
        )
    return count


def copy_pair(section: Section, prefix: Path, keep_empty: bool) -> int:
    """Write ``PREFIX.{language}``; returns the number of lines."""
    count = 0
    with ExitStack() as stack:
        outputs = [
            stack.enter_context(open(f"{prefix}.{language}", "w", encoding="utf-8"))
            for language in section.files
        ]
        pairs = zip(*map(_lines, section.files.values()), strict=True)
        try:
            for sides in islice(pairs, section.start, section.stop):
                if keep_empty or all(sides):
                    count += 1
                    for output, side in zip(outputs, sides, strict=True):
                        output.write(f"{side}\n")
        except ValueError:
            first, second = section.files.values()
            raise UsageError(
                f"{first} and {second} have different numbers of lines: line n of both has to be "
                "the same sentence"
            ) from None
    return count


def _lines(path: Path) -> Iterator[str]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8", newline="\n") as lines:
            for line in lines:
                yield " ".join(line.split())
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error.reason}") from None
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise UsageError(f"{path} is damaged: delete it and get it again") from None


def check(
    dataset: Dataset, raw: Path, needed: tuple[str, ...] = ("train", "valid")
) -> tuple[str, ...]:
    """The pairs that have test text; raises UsageError if a ``needed`` file is missing, or one is empty."""
    tested = []
    for pair in dataset.pairs:
        for split in (*needed, "test"):
            files = [raw / f"{split}.{pair}.{language}" for language in pair.split("-")]
            there = [file for file in files if file.exists()]
            for file in there:
                _refuse_empty(file, split, pair)
            if there == files and split == "test":
                tested.append(pair)
            elif there != files and split != "test":
                missing = next(file for file in files if file not in there)
                raise UsageError(f"{missing} is missing: {pair} needs it to {split}")
    return tuple(tested)


def _refuse_empty(file: Path, split: str, pair: str) -> None:
    if not file.stat().st_size:
        leave_out = f", or remove the files to leave {pair} out of it" if split == "test" else ""
        raise UsageError(f"{file} is empty: {pair} needs at least one line to {split}{leave_out}")
