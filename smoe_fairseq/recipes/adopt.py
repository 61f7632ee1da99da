"""Binarised text of other people, as an archive or a folder: checked and taken as it is."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import whole_folder
from smoe_fairseq.recipes.binarise import (
    SUFFIXES,
    binarise_files,
    count_sentences,
    read_dictionary,
)
from smoe_fairseq.recipes.config import Dataset
from smoe_fairseq.recipes.download import extract
from smoe_fairseq.recipes.raw import SPLITS, Section, copy_pair, write_sizes
from smoe_fairseq.recipes.subwords import encode_files, load_model


def adopt(dataset: Dataset, source: Path, raw: Path, output: Path, longest: int = 0) -> None:
    """Make of an archive, or of the folder it was unpacked to, what training and evaluation read.

    The numbers of training pairs go to ``sizes.json`` beside ``raw``.

    Args:
        raw: gets the test text, in the layout that all data sets share.
        output: gets the binarised text and its dictionary as they are, and ``spm.model``. Test sets that
            the archive has as text only are encoded and binarised with these. Files of a folder are linked
            if possible.
        longest: pieces after which a line of such a test set is cut off; 0: never.

    Raises:
        UsageError: the archive lacks a part, which is named, or a part is not what it should be.
    """
    with whole_folder(output) as numbers, whole_folder(raw, replace=True) as text:
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
        write_sizes(raw, sizes)
    print(f"{output}: {sum(sizes.values()):,} training pairs as they are in {source}", flush=True)


def binarised_folder(dataset: Dataset, folder: Path) -> Path | None:
    """Where ``raw.binarised`` is in a folder that its archive was unpacked to; None: not there.

    That is the folder itself, one in it, or the one above if the folder is the archive's own.
    """
    if not (layout := dataset.raw.get("binarised")) or not folder.is_dir():
        return None
    places = [folder, *sorted(folder.iterdir())]
    if folder.resolve().name == Path(layout["text"]).parts[0]:
        places.append(folder.resolve().parent)
    return next((place for place in places if (place / layout["text"]).is_dir()), None)


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
        for suffix in SUFFIXES:
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
    """What was taken of an archive: ``numbers`` will be the binarised text, ``given`` has the test text."""

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
        """One dictionary for all languages, which each has under its own name."""
        names = ["dict.txt", *(f"dict.{language}.txt" for language in self.dataset.languages)]
        found = sorted(self.numbers.glob("dict*.txt"))
        if not found:
            raise self.missing(f"{self.layout['text']}/{names[1]}", "the dictionary")
        content = found[0].read_bytes()
        for file in found[1:]:
            if file.read_bytes() != content:
                raise UsageError(
                    f"{self.source}: {found[0].name} and {file.name} differ; expected one dictionary for all "
                    "languages"
                )
        for name in names:
            if not (
                self.numbers / name
            ).exists():  # an existing one may be a link to the user's file
                (self.numbers / name).write_bytes(content)

    def count(self, pair: str) -> int:
        """The pair's training sentences; raises UsageError if it has none, or none to validate on."""
        for split in ("valid", "train"):
            if not (sentences := self.sentences(split, pair)):
                name = f"{self.layout['text']}/{next(_files(split, pair))}"
                raise self.missing(name, f"which {pair} needs to {split}")
        return sentences

    def sentences(self, split: str, pair: str) -> int:
        """Sentences of a pair's binarised split, 0 without one; of both orders, that of the pair's name."""
        counts = []
        for order in _orders(pair):
            names = list(_files(split, order))
            there = [name for name in names if (self.numbers / name).exists()]
            if not there:
                continue
            if lost := sorted(set(names) - set(there)):
                raise self.missing(f"{self.layout['text']}/{lost[0]}", f"though it has {there[0]}")
            indices = [name for name in names if name.endswith(".idx")]
            sides = {index: count_sentences(self.numbers / index) for index in indices}
            if len(set(sides.values())) > 1:
                told = " and ".join(f"{count} in {name}" for name, count in sides.items())
                raise UsageError(f"{self.source} has {told}: expected as many sentences in both")
            counts.append(next(iter(sides.values())))
        return counts[0] if counts else 0

    def take_tests(self, text: Path, longest: int) -> None:
        """Copy the test text to ``text``, and binarise what is there as text only."""
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
        if not to_binarise:
            return
        pieces = self.given / "pieces"
        pieces.mkdir()
        encode_files(load_model(self.numbers / "spm.model"), to_binarise, [pieces], longest)
        outputs = {
            pieces / file.name: tuple(str(self.numbers / f"{file.name}.{s}") for s in SUFFIXES)
            for file in to_binarise
        }
        told = binarise_files(read_dictionary(self.numbers / "dict.txt"), outputs)
        print(f"tests, which are there as text only: {told}", flush=True)

    def copy_test(self, pair: str, text: Path) -> int:
        for order in _orders(pair):
            files = {lang: self.given / f"{order}.{lang}" for lang in pair.split("-")}
            if all(file.exists() for file in files.values()):
                if lines := copy_pair(Section(files), text / f"test.{pair}", keep_empty=True):
                    return lines
        name = self.layout["test"].format(pair=pair, language=pair.split("-")[0])
        raise self.missing(name, f"or no line in it, which scores of {pair} are made with")
