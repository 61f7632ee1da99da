"""``scripts/prepare.sh``."""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from smoe_fairseq import files
from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import whole_folder, write_whole
from smoe_fairseq.recipes.binarise import (
    Binariser,
    Encoder,
    binarise_files,
    encode_files,
    load_model,
)
from smoe_fairseq.recipes.config import Dataset, arguments
from smoe_fairseq.recipes.download import extract, remote_files
from smoe_fairseq.recipes.processes import (
    Folders,
    command,
    cores,
    dry_run,
    report,
    run,
    unfinished,
    whole_number,
)
from smoe_fairseq.recipes.raw import SIZES, SPLITS, Section, binarised_folder, check, copy_pair
from smoe_fairseq.recipes.text_files import count_sentences, read_dictionary

_SUFFIXES = ("bin", "idx")


def adopt(dataset: Dataset, source: Path, raw: Path, binary: Path, longest: int = 0) -> None:
    """Makes of an archive, or of the folder that it was unpacked to, what training and evaluation read.

    Args:
        raw: gets the test text, in the layout that all data sets share.
        binary: gets the binarised text and its dictionary as they are, with ``spm.model``; test sets that the
            archive has as text only are encoded and binarised with these. Of a folder, files are linked
            where that is possible.
        longest: pieces after which a line of a test set that is encoded here is cut off; 0: never.

    The numbers of training pairs go to ``sizes.json`` beside ``raw``.

    Raises:
        UsageError: the archive lacks a part, whose name is told, or a part is not what it should be.
    """
    with whole_folder(binary) as numbers, whole_folder(raw, replace=True) as text:
        given = text / "given"
        wanted = _wanted(dataset, numbers, given)
        if source.is_dir():
            _link(binarised_folder(dataset, source) or source, wanted)
        else:
            extract(source, wanted)
        archive = _Archive(dataset, source, numbers, given)
        archive.check_subwords()
        archive.complete_dictionaries()
        sizes = {pair.split("-")[1]: archive.count(pair) for pair in dataset.pairs}
        archive.take_tests(text, longest)
        shutil.rmtree(given)
        write_whole(raw.with_name(SIZES), json.dumps(sizes, indent=2) + "\n")
    print(f"{binary}: {sum(sizes.values()):,} training pairs as they are in {source}", flush=True)


def _wanted(dataset: Dataset, numbers: Path, given: Path) -> dict[str, Path]:
    """The file to write for each name that the archive may have."""
    layout = dataset.raw["binarised"]
    wanted = {layout["vocabulary"]: numbers / "spm.model"}
    names = ["dict.txt", *(f"dict.{language}.txt" for language in dataset.languages)]
    for pair in dataset.pairs:
        for order in _orders(pair):
            names += [file for split in SPLITS for file in _files(split, order)]
            for language in pair.split("-"):
                name = layout["test"].format(pair=order, language=language)
                wanted[name] = given / f"{order}.{language}"
    return wanted | {f"{layout['text']}/{name}": numbers / name for name in names}


def _orders(pair: str) -> tuple[str, str]:
    return pair, "-".join(reversed(pair.split("-")))


def _files(split: str, order: str) -> Iterator[str]:
    for language in order.split("-"):
        for suffix in _SUFFIXES:
            yield f"{split}.{order}.{language}.{suffix}"


def _link(folder: Path, wanted: dict[str, Path]) -> None:
    for name, target in wanted.items():
        if (file := folder / name).is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file.resolve(), target)
            except OSError:  # on another disk
                shutil.copyfile(file, target)


class _Archive:
    """What was taken of one: ``numbers`` is to become the binarised text, ``given`` has the test text."""

    def __init__(self, dataset: Dataset, source: Path, numbers: Path, given: Path):
        self.dataset = dataset
        self.layout = dataset.raw["binarised"]
        self.source = source
        self.numbers = numbers
        self.given = given

    def missing(self, name: str, use: str) -> UsageError:
        return UsageError(
            f"{self.source} has no {name}, {use}: expected the archive of docs/reproduce.md, whole, or "
            f"RAW=folder with {self.dataset.name}'s text"
        )

    def check_subwords(self) -> None:
        model = self.numbers / "spm.model"
        if not model.exists():
            raise self.missing(self.layout["vocabulary"], "the model of the subwords")
        try:
            load_model(model)
        except UsageError:
            raise UsageError(
                f"{self.source}: {self.layout['vocabulary']} is not a sentencepiece model"
            ) from None

    def complete_dictionaries(self) -> None:
        """One for all languages, which each has under its own name."""
        found = sorted(self.numbers.glob("dict*.txt"))
        if not found:
            name = f"{self.layout['text']}/dict.{self.dataset.languages[0]}.txt"
            raise self.missing(name, "the dictionary")
        content = found[0].read_bytes()
        for file in found[1:]:
            if file.read_bytes() != content:
                raise UsageError(
                    f"{self.source}: {found[0].name} and {file.name} differ; expected one dictionary for all "
                    "languages"
                )
        for name in ("dict.txt", *(f"dict.{language}.txt" for language in self.dataset.languages)):
            if not (self.numbers / name).exists():  # else it may be a link to the user's own
                (self.numbers / name).write_bytes(content)

    def count(self, pair: str) -> int:
        """The pair's training sentences; it has to have text to validate on too."""
        if not self.sentences("valid", pair):
            raise self.lacks("valid", pair)
        if not (sentences := self.sentences("train", pair)):
            raise self.lacks("train", pair)
        return sentences

    def lacks(self, split: str, pair: str) -> UsageError:
        return self.missing(
            f"{self.layout['text']}/{next(_files(split, pair))}", f"which {pair} needs to {split}"
        )

    def sentences(self, split: str, pair: str) -> int:
        """Of a pair's binarised split, in the order of its name if both are there; 0: there is none."""
        counts = []
        for order in _orders(pair):
            names = list(_files(split, order))
            there = [name for name in names if (self.numbers / name).exists()]
            if not there:
                continue
            if lost := sorted(set(names) - set(there)):
                name = f"{self.layout['text']}/{lost[0]}"
                raise self.missing(name, f"though it has {there[0]}")
            sides = {
                index: count_sentences(self.numbers / index)
                for index in names
                if index.endswith(".idx")
            }
            if len(set(sides.values())) > 1:
                told = " and ".join(f"{count} in {name}" for name, count in sides.items())
                raise UsageError(f"{self.source} has {told}: expected as many sentences in both")
            counts.append(next(iter(sides.values())))
        return counts[0] if counts else 0

    def take_tests(self, text: Path, longest: int) -> None:
        """To ``text``; binarised they are as they are, or made of the text."""
        to_binarise = []
        for pair in self.dataset.pairs:
            lines = self.copy_test(pair, text)
            sentences = self.sentences("test", pair)
            if not sentences:
                to_binarise += [text / f"test.{pair}.{language}" for language in pair.split("-")]
            elif sentences != lines:
                raise UsageError(
                    f"{self.source} has {sentences} sentences of the test of {pair} binarised, and {lines} "
                    "as text: expected as many"
                )
        pieces = self.given / "pieces"
        pieces.mkdir()
        encoder = Encoder(load_model(self.numbers / "spm.model"), 1, longest)
        encode_files(encoder, to_binarise, [pieces], workers=1)
        written = {
            pieces / file.name: tuple(
                str(self.numbers / f"{file.name}.{suffix}") for suffix in _SUFFIXES
            )
            for file in to_binarise
        }
        binariser = Binariser(read_dictionary(self.numbers / "dict.txt"))
        told = binarise_files(binariser, written, workers=1)
        if written:
            print(f"tests, which are there as text only: {told}", flush=True)

    def copy_test(self, pair: str, text: Path) -> int:
        for order in _orders(pair):
            files = {lang: self.given / f"{order}.{lang}" for lang in pair.split("-")}
            if all(file.exists() for file in files.values()):
                if lines := copy_pair(Section(files), text / f"test.{pair}", keep_empty=True):
                    return lines
        name = self.layout["test"].format(pair=pair, language=pair.split("-")[0])
        raise self.missing(name, f"or no line in it, which scores of {pair} are made with")


# ``scripts/prepare.sh``: from raw text to what ``fairseq-train`` reads.

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
            files.release(folders.data, files.PREPARATION)


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
    files.take(folder, files.PREPARATION)


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
        if dataset.raw.get("messages"):
            source = folders.download / remote_files(dataset)[0].name
        elif dataset.raw.get("archives"):
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
