"""Binarised text of other authors, in an archive or a folder: checked, and used unchanged."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import read_plain, whole_folder
from smoe_fairseq.recipes.data.archives import extract
from smoe_fairseq.recipes.data.binarise import (
    SUFFIXES,
    binarise_files,
    count_sentences,
    read_dictionary,
)
from smoe_fairseq.recipes.data.raw import (
    SPLITS,
    Section,
    check_replaceable,
    copy_pairs,
    write_sizes,
)
from smoe_fairseq.recipes.data.subwords import encode_files
from smoe_fairseq.recipes.datasets import Dataset, both_orders
from smoe_fairseq.recipes.folders import final
from smoe_fairseq.subwords import SPECIAL, check_pieces, read_subwords, write_sums


def adopt(dataset: Dataset, source: Path, raw: Path, output: Path, longest: int = 0) -> None:
    """Use the data of an archive, or of the folder it was unpacked to, for training and evaluation.

    Writes the test text to ``raw``, the numbers of training pairs to ``sizes.json`` next to it, and the
    binarised text, its dictionary and ``spm.model`` to ``output``, where files of a folder are linked if
    possible. Test sets that the archive has only as text are encoded, up to ``longest`` pieces (0: all) of a
    line, and binarised.
    """
    check_replaceable(raw, [source])
    with whole_folder(output) as numbers, whole_folder(raw, replace=True) as text:
        original = text / "original"
        targets = _targets(dataset, numbers, original)
        if source.is_dir():
            _link(binarised_folder(dataset, source) or source, targets)
        else:
            extract(source, targets)
        archive = _Archive(dataset, source, numbers, original)
        archive.complete_dictionaries()
        archive.check_subwords()
        sizes = {pair: archive.count(pair) for pair in dataset.pairs}
        archive.write_tests(text, longest)
        shutil.rmtree(original)
        write_sizes(raw, sizes)
    pairs = f"{sum(sizes.values()):,} training pairs as they are in {source}"
    print(f"{final(output)}: {pairs}", flush=True)


def binarised_folder(dataset: Dataset, folder: Path) -> Path | None:
    """The folder to which paths of ``raw.binarised`` are relative; None if there is none.

    It is ``folder``, a folder in it, or its parent if ``folder`` is the top folder of the archive.
    """
    if not (layout := dataset.raw.get("binarised")) or not folder.is_dir():
        return None
    places = [folder, *sorted(folder.iterdir())]
    if folder.resolve().name == Path(layout["text"]).parts[0]:
        places.append(folder.resolve().parent)
    return next((place for place in places if (place / layout["text"]).is_dir()), None)


def _targets(dataset: Dataset, numbers: Path, original: Path) -> dict[str, Path]:
    """The file to write for each name in the archive."""
    layout = dataset.raw["binarised"]
    targets = {layout["vocabulary"]: numbers / "spm.model"}
    names = _dictionaries(dataset)
    for pair in dataset.pairs:
        for order in both_orders(pair):
            names += [file for split in SPLITS for file in _names(split, order)]
            for language in pair.split("-"):
                name = layout["test"].format(pair=order, language=language)
                targets[name] = original / f"{order}.{language}"
    return targets | {f"{layout['text']}/{name}": numbers / name for name in names}


def _dictionaries(dataset: Dataset) -> list[str]:
    return ["dict.txt", *(f"dict.{language}.txt" for language in dataset.languages)]


def _names(split: str, order: str) -> Iterator[str]:
    for language in order.split("-"):
        for suffix in SUFFIXES:
            yield f"{split}.{order}.{language}.{suffix}"


def _link(folder: Path, targets: dict[str, Path]) -> None:
    for name, target in targets.items():
        if (file := folder / name).is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file.resolve(), target)
            except OSError:  # on another disk
                shutil.copyfile(file, target)


class _Archive:
    """The extracted files of an archive: binarised text in ``numbers``, test text in ``original``."""

    def __init__(self, dataset: Dataset, source: Path, numbers: Path, original: Path):
        self.dataset = dataset
        self.layout = dataset.raw["binarised"]
        self.source = source
        self.numbers = numbers
        self.original = original

    def missing(self, name: str, use: str) -> UsageError:
        expected = f"the archive of docs/reproduce.md, whole, or --raw folder with {self.dataset.name}'s text"
        return UsageError(f"{self.source} has no {name}, {use}: expected {expected}")

    def check_subwords(self) -> None:
        name, model = self.layout["vocabulary"], self.numbers / "spm.model"
        if not model.exists():
            raise self.missing(name, "the model of the subwords")
        words = [*read_dictionary(self.numbers / "dict.txt")]
        try:
            check_pieces(model, words[len(SPECIAL) :])
        except UsageError as error:
            raise UsageError(str(error).replace(str(model), f"{self.source}: {name}")) from None

    def complete_dictionaries(self) -> None:
        """Write the dictionary under every name that fairseq reads."""
        names = _dictionaries(self.dataset)
        contents = {file.name: read_plain(file) for file in sorted(self.numbers.glob("dict.*txt"))}
        if not contents:
            raise self.missing(f"{self.layout['text']}/{names[1]}", "the dictionary")
        first, *_ = contents
        for name in contents:
            if contents[name] != contents[first]:
                both = f"{self.source}: {first} and {name} differ"
                raise UsageError(f"{both}; expected one dictionary for all languages")
        # Existing files may be links to the user's, so they are not rewritten.
        for name in set(names) - contents.keys():
            (self.numbers / name).write_bytes(contents[first])
        write_sums(self.numbers)

    def count(self, pair: str) -> int:
        """The number of training sentences; raises UsageError if there is no training or validation text."""
        for split in ("valid", "train"):
            if not (sentences := self.sentences(split, pair)):
                name = f"{self.layout['text']}/{next(_names(split, pair))}"
                raise self.missing(name, f"which {pair} needs to {split}")
        return sentences

    def sentences(self, split: str, pair: str) -> int:
        """The number of sentences in a split, 0 if it is missing; files may name the pair in either order."""
        counts = []
        for order in both_orders(pair):
            names = list(_names(split, order))
            present = [name for name in names if (self.numbers / name).exists()]
            if not present:
                continue
            if lost := sorted(set(names) - set(present)):
                use = f"though it has {present[0]}"
                raise self.missing(f"{self.layout['text']}/{lost[0]}", use)
            indices = [name for name in names if name.endswith(".idx")]
            one, other = (count_sentences(self.numbers / index) for index in indices)
            if one != other:
                both = f"{one} in {indices[0]} and {other} in {indices[1]}"
                raise UsageError(f"{self.source} has {both}: expected as many sentences in both")
            counts.append(one)
        return counts[0] if counts else 0

    def write_tests(self, text: Path, longest: int) -> None:
        """Copy the test text to ``text``, and binarise the tests that the archive has only as text."""
        to_binarise = []
        for pair in self.dataset.pairs:
            lines = self.copy_test(pair, text)
            sentences = self.sentences("test", pair)
            if not sentences:
                to_binarise += [text / f"test.{pair}.{language}" for language in pair.split("-")]
            elif sentences != lines:
                both = f"{sentences} sentences binarised, and {lines} as text: expected as many"
                raise UsageError(f"{self.source} has of the test of {pair} {both}")
        if not to_binarise:
            return
        pieces = self.original / "pieces"
        pieces.mkdir()
        encode_files(read_subwords(self.numbers / "spm.model"), to_binarise, [pieces], longest)
        outputs = {
            pieces / file.name: tuple(str(self.numbers / f"{file.name}.{s}") for s in SUFFIXES)
            for file in to_binarise
        }
        counts = binarise_files(read_dictionary(self.numbers / "dict.txt"), outputs)
        print(f"tests, binarised from text: {counts}", flush=True)

    def copy_test(self, pair: str, text: Path) -> int:
        for order in both_orders(pair):
            files = {lang: self.original / f"{order}.{lang}" for lang in pair.split("-")}
            if all(file.exists() for file in files.values()):
                if lines := copy_pairs(Section(files), text / f"test.{pair}", None)["kept"]:
                    return lines
        name = self.layout["test"].format(pair=pair, language=pair.split("-")[0])
        raise self.missing(name, f"or no line in it, which scores of {pair} are made with")
