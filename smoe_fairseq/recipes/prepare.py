"""``scripts/prepare.sh``: from raw text to what ``fairseq-train`` reads."""

import os
from collections.abc import Iterator
from pathlib import Path

from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes.config import Dataset, arguments
from smoe_fairseq.recipes.folders import Folders
from smoe_fairseq.recipes.raw import check
from smoe_fairseq.recipes.shell import command, dry_run, report, run


def prepare(dataset: Dataset) -> None:
    """Fetches or takes (``RAW``) the text, learns subwords and binarises every pair, once."""
    folders = Folders(dataset.name)
    if folders.binary.exists() and not dry_run():
        print(f"{folders.binary} is prepared already: delete it to prepare it again")
        return
    given = os.environ.get("RAW")
    if given or not folders.raw.exists():
        run(_raw_text(dataset, folders, given))
    if dry_run() and not folders.raw.exists():
        tested = dataset.pairs
    else:
        tested = check(dataset, folders.raw)
    for pair in sorted(set(dataset.pairs) - set(tested)):
        report(f"{folders.raw}/test.{pair}.* is missing: {pair} will not be scored")
    run(_binarised(dataset, folders, tested))


def _raw_text(dataset: Dataset, folders: Folders, given: str | None) -> Iterator[str]:
    generator = dataset.raw.get("generator")
    if generator and not given:
        partial = f"{folders.raw}.partial"
        yield f"# {dataset.name}: generate the text"
        yield command("rm", "-rf", partial)
        yield command("python", "-m", generator, partial)
        yield command("mv", partial, folders.raw)
        return
    if not given and "url" not in dataset.raw:
        raise UsageError(f"{dataset.name} cannot be fetched: give its text with RAW=folder")
    yield f"# {dataset.name}: bring the text into one layout"
    if not given:
        yield _step("fetch", dataset.name, folders.download)
    yield _step("collect", dataset.name, given or folders.download, folders.raw)


def _binarised(dataset: Dataset, folders: Folders, tested: tuple[str, ...]) -> Iterator[str]:
    partial = Path(f"{folders.binary}.partial")
    text = partial / "text"
    yield f"# {dataset.name}: one sentencepiece model and dictionary for all languages"
    yield command("rm", "-rf", partial)
    yield _step("learn", folders.raw, partial, *arguments(dataset.subwords))
    yield _step("encode", partial / "spm.model", folders.raw, text)
    yield f"# {dataset.name}: binarise; one set of files serves both directions of a pair"
    for pair in dataset.pairs:
        source, target = pair.split("-")
        splits = ("train", "valid", "test") if pair in tested else ("train", "valid")
        prefixes = [word for s in splits for word in (f"--{s}pref", text / f"{s}.{pair}")]
        yield command(
            *("fairseq-preprocess", "--source-lang", source, "--target-lang", target),
            *prefixes,
            *("--srcdict", partial / "dict.txt", "--tgtdict", partial / "dict.txt"),
            *("--destdir", partial, "--workers", 2),
        )
    yield command("rm", "-rf", text, folders.binary)
    yield command("mv", partial, folders.binary)


def _step(name: str, *words: object) -> str:
    return command("python", "-m", "smoe_fairseq.recipes", name, *words)
