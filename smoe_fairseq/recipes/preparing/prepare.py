"""``scripts/prepare.sh``: from raw text to what ``fairseq-train`` reads."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from smoe_fairseq.recipes.folders import Folders
from smoe_fairseq.recipes.launch import cores, whole_number
from smoe_fairseq.recipes.preparing.download import remote_files
from smoe_fairseq.recipes.preparing.layout import binarised_folder
from smoe_fairseq.recipes.preparing.raw import check
from smoe_fairseq.recipes.shell import command, dry_run, report, run, unfinished
from smoe_fairseq.settings.dataset import Dataset
from smoe_fairseq.settings.flags import arguments
from smoe_fairseq.system import lock
from smoe_fairseq.system.errors import UsageError

FAIRSEQ_POSITIONS = 1024  # --max-source-positions where it is not given


def prepare(dataset: Dataset, extra: Sequence[str] = ()) -> None:
    """Fetches or takes (``RAW``) the text, learns subwords and binarises every pair, once.

    ``extra`` flags go to the step that learns the subwords.
    """
    folders = Folders(dataset.name)
    if dry_run():
        _prepare(dataset, folders, extra)
    elif not _is_prepared(folders):
        _hold(folders.data)
        try:
            if not _is_prepared(folders):  # by another one meanwhile
                _prepare(dataset, folders, extra)
        finally:
            lock.release(folders.data, lock.PREPARATION)


def _is_prepared(folders: Folders) -> bool:
    if folders.binary.exists():
        print(f"{folders.binary} is prepared already: delete it to prepare it again")
    return folders.binary.exists()


def _prepare(dataset: Dataset, folders: Folders, extra: Sequence[str]) -> None:
    given = os.environ.get("RAW")
    if archive := _archive(dataset, folders, given):
        if extra:
            raise UsageError(
                f"{' '.join(extra)}: {archive} comes with its subwords; give RAW=folder with text to learn "
                "others"
            )
        with unfinished(_partial(folders.binary)), unfinished(_partial(folders.raw)):
            run(_adopted(dataset, folders, archive, given))
        return
    if given or not folders.raw.exists():
        with unfinished(_partial(folders.raw)) as partial:
            run(_raw_text(dataset, folders, partial, given))
    if dry_run() and not folders.raw.exists():
        tested = dataset.pairs
    else:
        tested = check(dataset, folders.raw)
    for pair in sorted(set(dataset.pairs) - set(tested)):
        report(f"{folders.raw}/test.{pair}.* is missing: {pair} will not be scored")
    with unfinished(_partial(folders.binary)) as partial:
        run(_binarised(dataset, folders, partial, extra))


def _hold(folder: Path) -> None:
    """A second preparation would write to the same files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"DATA_DIR: {folder} cannot be made: {error.strerror}") from None
    lock.take(folder, lock.PREPARATION)


def _partial(folder: Path) -> Path:
    return Path(f"{folder}.partial")


def _archive(dataset: Dataset, folders: Folders, given: str | None) -> Path | None:
    """The archive of binarised text, or its folder, to make the data set of; None: it is made of text."""
    if not dataset.raw.get("binarised"):
        return None
    if given:
        source = Path(given)
        return source if source.is_file() or binarised_folder(dataset, source) else None
    if any(folders.raw.glob("train.*")):
        return None  # gathered before, or put there
    return folders.download / remote_files(dataset)[0].name


def _adopted(dataset: Dataset, folders: Folders, archive: Path, given: str | None) -> Iterator[str]:
    yield f"# {dataset.name}: binarised text, subwords and tests as they are in the authors' archive"
    if not given:
        yield _step("fetch", dataset.name, folders.download)
    words = ("adopt", dataset.name, archive, folders.raw, folders.binary)
    yield _step(*words, "--longest", _longest(dataset))


def _raw_text(
    dataset: Dataset, folders: Folders, partial: Path, given: str | None
) -> Iterator[str]:
    generator = dataset.raw.get("generator")
    if generator and not given:
        yield f"# {dataset.name}: generate the text"
        yield command("rm", "-rf", partial)
        yield command("python", "-m", generator, partial)
        yield command("mv", partial, folders.raw)
        return
    if not given and not remote_files(dataset):
        raise UsageError(f"{dataset.name} cannot be fetched: give its text with RAW=folder")
    yield f"# {dataset.name}: bring the text into one layout"
    source = given or folders.download
    if not given:
        yield _step("fetch", dataset.name, folders.download)
        if dataset.raw.get("archives"):
            source = folders.unpacked
            yield _step("unpack", dataset.name, folders.download, folders.unpacked)
    yield _step("gather", dataset.name, source, folders.raw, *_workers())


def _binarised(
    dataset: Dataset,
    folders: Folders,
    partial: Path,
    extra: Sequence[str],
) -> Iterator[str]:
    text = partial / "text"
    yield f"# {dataset.name}: one sentencepiece model and dictionary for all languages"
    yield command("rm", "-rf", partial)
    yield _step("learn", folders.raw, partial, *arguments(dataset.subwords), *extra)
    limits = ("--shards", dataset.shards, "--longest", _longest(dataset))
    workers = _workers()
    yield _step("encode", partial / "spm.model", folders.raw, text, *limits, *workers)
    yield f"# {dataset.name}: binarise; one set of files serves both directions of a pair"
    yield _step("binarise", dataset.name, text, partial / "dict.txt", partial, *workers)
    yield command("rm", "-rf", text, folders.binary)
    yield command("mv", partial, folders.binary)


def _longest(dataset: Dataset) -> int:
    """Sources of the test set, binarised for translation only, must not exceed the model's positions.

    Of these the language's token and the end of the sentence take two.
    """
    return dataset.train.get("max-source-positions", FAIRSEQ_POSITIONS) - 2


def _workers() -> tuple[str, object]:
    return "--workers", whole_number("WORKERS", least=1, default=None) or cores()


def _step(name: str, *words: object) -> str:
    return command("python", "-m", "smoe_fairseq.recipes", name, *words)
