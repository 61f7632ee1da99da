"""An archive of binarised text, taken as it is: its subwords, its dictionary, its numbers and its tests.

What it calls them is the data set's ``raw.binarised``; both orders of a pair may name its files.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from smoe_fairseq.recipes.preparing.archives import extract
from smoe_fairseq.recipes.preparing.binarise import Binariser, binarise_files
from smoe_fairseq.recipes.preparing.encode import Encoder, encode_files, load_model
from smoe_fairseq.recipes.preparing.indexed import count_sentences, read_dictionary
from smoe_fairseq.recipes.preparing.layout import SPLITS, Section, binarised_folder
from smoe_fairseq.recipes.preparing.raw import SIZES, copy_pair
from smoe_fairseq.settings.dataset import Dataset
from smoe_fairseq.system.errors import UsageError
from smoe_fairseq.system.files import whole_folder, write_whole

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
