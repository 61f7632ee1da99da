"""Raw text: from a publisher's layout to the one all data sets share.

That layout is one folder with ``{split}.{pair}.{language}`` for the splits train, valid and test,
UTF-8, line ``n`` of both sides of a pair being the same sentence.
"""

import gzip
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes.config import Dataset
from smoe_fairseq.recipes.shell import report

SPLITS = ("train", "valid", "test")


def publisher_name(dataset: Dataset, split: str, pair: str, language: str) -> str:
    """How the publisher names a file, by the data set's ``raw.files`` and ``raw.splits``."""
    pattern = dataset.raw.get("files", "{split}.{pair}.{language}")
    split = dataset.raw.get("splits", {}).get(split, split)
    return pattern.format(split=split, pair=pair, language=language)


def publisher_names(dataset: Dataset) -> tuple[str, ...]:
    """All of the publisher's files, each once."""
    return tuple(
        dict.fromkeys(
            publisher_name(dataset, split, pair, language)
            for split in SPLITS
            for pair in dataset.pairs
            for language in pair.split("-")
        )
    )


def collect(dataset: Dataset, source: Path, target: Path) -> None:
    """Brings a publisher's files, plain or ``.gz``, into the shared layout.

    Runs of white space become single spaces, which also removes the line separators that other
    programs would break a sentence at. Training pairs with an empty side are left out. A pair
    without test files is reported. A missing or damaged file, or sides of different length, is a
    `UsageError` and leaves an existing ``target`` as it was.
    """
    if not source.is_dir():
        raise UsageError(
            f"{source} is not a folder: RAW has to name one with {dataset.name}'s text"
        )
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for split in SPLITS:
        for pair in dataset.pairs:
            files = {
                language: source / publisher_name(dataset, split, pair, language)
                for language in pair.split("-")
            }
            missing = [file for file in files.values() if not _stored(file)]
            if missing and split == "test":
                report(f"{missing[0]} is missing: {pair} has no test data and will not be scored")
            elif missing:
                raise UsageError(f"{missing[0]} (or .gz) is missing: {pair} needs it to {split}")
            else:
                _copy_pair(files, partial / f"{split}.{pair}", keep_empty=split != "train")
    shutil.rmtree(target, ignore_errors=True)
    os.replace(partial, target)


def check(dataset: Dataset, raw: Path) -> tuple[str, ...]:
    """The pairs that have test data; missing training or validation text is a `UsageError`."""
    tested = []
    for pair in dataset.pairs:
        for split in SPLITS:
            files = [raw / f"{split}.{pair}.{language}" for language in pair.split("-")]
            missing = [file for file in files if not file.exists()]
            if split == "test" and not missing:
                tested.append(pair)
            elif split != "test" and missing:
                raise UsageError(f"{missing[0]} is missing: {pair} needs it to {split}")
    return tuple(tested)


def _copy_pair(files: dict[str, Path], prefix: Path, keep_empty: bool) -> None:
    with ExitStack() as stack:
        outputs = [
            stack.enter_context(open(f"{prefix}.{language}", "w", encoding="utf-8"))
            for language in files
        ]
        try:
            for sides in zip(*map(_lines, files.values()), strict=True):
                if keep_empty or all(sides):
                    for output, side in zip(outputs, sides, strict=True):
                        output.write(f"{side}\n")
        except ValueError:
            first, second = files.values()
            raise UsageError(
                f"{first} and {second} have different numbers of lines: line n of both has to be "
                "the same sentence"
            ) from None


def _stored(path: Path) -> Path | None:
    return next((p for p in (path, path.with_name(f"{path.name}.gz")) if p.is_file()), None)


def _lines(path: Path) -> Iterator[str]:
    path = _stored(path)
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8", newline="\n") as lines:
            for line in lines:
                yield " ".join(line.split())
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error.reason}") from None
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise UsageError(f"{path} is damaged: delete it and get it again") from None
