"""Raw text: from a publisher's layout to the one that all data sets share."""

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
from smoe_fairseq.recipes.processes import report
from smoe_fairseq.recipes.text_files import count_lines, progress, shared

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


# Raw text: from a publisher's layout to the one all data sets share.
#
# That layout is one folder with ``{split}.{pair}.{language}`` for the splits train, valid and
# test, UTF-8, line ``n`` of both sides of a pair being the same sentence.

SIZES = "sizes.json"


def gather(dataset: Dataset, source: Path, target: Path, workers: int = 1) -> None:
    """Brings the text of a folder (see `layout.find`) into the shared layout.

    Runs of white space become single spaces, which also removes the line separators that other
    programs would break a sentence at. Training pairs with an empty side are left out. A pair
    without test files is reported. A missing or damaged file, or sides of different length, is a
    `UsageError` and leaves an existing ``target`` as it was. The numbers of training pairs go to
    ``sizes.json`` beside ``target``, as ``{language: pairs}``.
    """
    if not source.is_dir():
        raise UsageError(
            f"{source} is not a folder: RAW has to name one with {dataset.name}'s text"
        )
    parts = [
        Part(split, pair, section)
        for split in SPLITS
        for pair in dataset.pairs
        if (section := _section(dataset, source, split, pair))
    ]
    # Longest first: a process that takes the longest one last would keep the others waiting.
    parts.sort(key=lambda part: -part.size)
    size = sum(part.size for part in parts)
    counts = {}
    with whole_folder(target, replace=True) as partial:
        with progress("gather", size) as advance, shared(Copier(partial), workers, size) as each:
            for part, count in zip(parts, each(parts), strict=True):
                counts[part.split, part.pair] = count
                advance(part.size)
        sizes = {pair.split("-")[1]: counts["train", pair] for pair in dataset.pairs}
        write_whole(target.with_name(SIZES), json.dumps(sizes, indent=2) + "\n")
    print(f"{target}: {2 * len(parts)} files, {sum(counts.values()):,} pairs of lines", flush=True)


@dataclass(frozen=True)
class Part:
    """The text of a pair for one split."""

    split: str
    pair: str
    section: Section

    @property
    def size(self) -> int:
        """Bytes of its files, as a measure of the work; a compressed one has three times as many or more."""
        files = self.section.files.values()
        return sum(file.stat().st_size * (3 if file.suffix == ".gz" else 1) for file in files)


@dataclass(frozen=True)
class Copier:
    """Called with a part, writes it to ``folder`` in the shared layout and gives the number of lines."""

    folder: Path

    def __call__(self, part: Part) -> int:
        split, pair, files = part.split, part.pair, part.section.files
        prefix = self.folder / f"{split}.{pair}"
        count = copy_pair(part.section, prefix, keep_empty=split != "train")
        if not count:
            for file in files.values():
                _refuse_empty(file, split, pair)
            first, second = files.values()
            raise UsageError(
                f"{first} and {second} have no line with text on both sides: {pair} needs one to {split}"
            )
        return count


def _section(dataset: Dataset, source: Path, split: str, pair: str) -> Section | None:
    """None where there is no test data, which is reported."""
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


def check(
    dataset: Dataset, raw: Path, needed: tuple[str, ...] = ("train", "valid")
) -> tuple[str, ...]:
    """The pairs that have test data; what is ``needed`` and missing, or is empty, is a `UsageError`."""
    tested = []
    for pair in dataset.pairs:
        for split in (*needed, "test"):
            files = [raw / f"{split}.{pair}.{language}" for language in pair.split("-")]
            missing = [file for file in files if not file.exists()]
            if split == "test" and not missing:
                tested.append(pair)
            elif split != "test" and missing:
                raise UsageError(f"{missing[0]} is missing: {pair} needs it to {split}")
            for file in files:
                if file not in missing:
                    _refuse_empty(file, split, pair)
    return tuple(tested)


def _refuse_empty(file: Path, split: str, pair: str) -> None:
    if not file.stat().st_size:
        leave_out = f", or remove the files to leave {pair} out of it" if split == "test" else ""
        raise UsageError(f"{file} is empty: {pair} needs at least one line to {split}{leave_out}")


def copy_pair(section: Section, prefix: Path, keep_empty: bool) -> int:
    """Writes ``PREFIX.{language}`` and returns the number of lines."""
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
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
