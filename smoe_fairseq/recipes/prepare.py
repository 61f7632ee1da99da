"""``scripts/prepare.sh``: from raw text to what ``fairseq-train`` reads."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from smoe_fairseq.recipes.download import remote_files
from smoe_fairseq.recipes.folders import Folders
from smoe_fairseq.recipes.raw import check
from smoe_fairseq.recipes.shell import command, dry_run, report, run, unfinished
from smoe_fairseq.settings.dataset import Dataset
from smoe_fairseq.settings.flags import arguments
from smoe_fairseq.system.errors import UsageError

FAIRSEQ_POSITIONS = 1024  # --max-source-positions where it is not given


def prepare(dataset: Dataset, extra: Sequence[str] = ()) -> None:
    """Fetches or takes (``RAW``) the text, learns subwords and binarises every pair, once.

    ``extra`` flags go to the step that learns the subwords.
    """
    folders = Folders(dataset.name)
    if folders.binary.exists() and not dry_run():
        print(f"{folders.binary} is prepared already: delete it to prepare it again")
        return
    given = os.environ.get("RAW")
    if given or not folders.raw.exists():
        with unfinished(Path(f"{folders.raw}.partial")) as partial:
            run(_raw_text(dataset, folders, partial, given))
    if dry_run() and not folders.raw.exists():
        tested = dataset.pairs
    else:
        tested = check(dataset, folders.raw)
    for pair in sorted(set(dataset.pairs) - set(tested)):
        report(f"{folders.raw}/test.{pair}.* is missing: {pair} will not be scored")
    with unfinished(Path(f"{folders.binary}.partial")) as partial:
        run(_binarised(dataset, folders, partial, extra))


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
    # Sources of the test set, binarised for translation only, must not exceed the model's positions,
    # of which the language's token and the end of the sentence take two.
    longest = dataset.train.get("max-source-positions", FAIRSEQ_POSITIONS) - 2
    yield f"# {dataset.name}: one sentencepiece model and dictionary for all languages"
    yield command("rm", "-rf", partial)
    yield _step("learn", folders.raw, partial, *arguments(dataset.subwords), *extra)
    limits = ("--shards", dataset.shards, "--longest", longest)
    workers = _workers()
    yield _step("encode", partial / "spm.model", folders.raw, text, *limits, *workers)
    yield f"# {dataset.name}: binarise; one set of files serves both directions of a pair"
    yield _step("binarise", dataset.name, text, partial / "dict.txt", partial, *workers)
    yield command("rm", "-rf", text, folders.binary)
    yield command("mv", partial, folders.binary)


def _workers() -> tuple[str, object]:
    given = os.environ.get("WORKERS") or str(os.cpu_count() or 1)
    if not given.isdecimal() or int(given) < 1:
        raise UsageError(f"WORKERS={given}: expected a whole number of at least 1")
    return "--workers", given


def _step(name: str, *words: object) -> str:
    return command("python", "-m", "smoe_fairseq.recipes", name, *words)
