"""Raw text: gathered in the layout that all data sets share.

The shared layout is one folder with files ``{split}.{pair}.{language}`` for the splits train, valid and test,
in UTF-8. Line ``n`` of both sides of a pair is the same sentence.
"""

import functools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import whole_folder, write_whole
from smoe_fairseq.forms import read_json
from smoe_fairseq.languages import spellings
from smoe_fairseq.progress import progress
from smoe_fairseq.recipes.data import readers
from smoe_fairseq.recipes.data.compression import COMPRESSED
from smoe_fairseq.recipes.data.faults import Faults
from smoe_fairseq.recipes.data.finding import SPLITS, Section, find, missing, publisher_names
from smoe_fairseq.recipes.data.text_files import parallel_map
from smoe_fairseq.recipes.datasets import Dataset, translated
from smoe_fairseq.recipes.folders import GATHERED, LEFT_OUT, PARTIAL, SIZES, Folders, final
from smoe_fairseq.recipes.processes import warn


def gather(dataset: Dataset, source: Path, target: Path, workers: int = 1) -> None:
    """Bring the text of a folder (see `find`) into the shared layout; see `write`.

    A pair without test files causes a warning. Raises UsageError, with ``target`` unchanged, if another file
    is missing or damaged, or two sides differ in length.
    """
    found = {unit: _section(dataset, source, *unit) for unit in splits_of(dataset)}
    sections = _told_apart({unit: section for unit, section in found.items() if section})
    _warn_of_others(dataset, source, sections)
    for pair in dataset.pairs:
        parts = {s: each for (s, p), each in sections.items() if p == pair and not each.elsewhere}
        if dataset.source.get("sacrebleu"):
            parts.pop("test", None)
        if len({part.is_divided for part in parts.values()}) > 1:
            files = ", ".join(f"{s} in {[*each.files.values()][0]}" for s, each in parts.items())
            raise UsageError(f"{pair} has {files}: expected files for all, or one text to divide")
    counts = write(dataset, sections, target, workers)
    kept = sum(count["kept"] for count in counts.values())
    print(f"{final(target)}: {2 * len(sections)} files, {kept:,} pairs of lines", flush=True)


def splits_of(dataset: Dataset) -> list[tuple[str, str]]:
    """Each split with each of its pairs."""
    kept = [("test", pair) for pair in dataset.keep]
    return [*product(SPLITS, dataset.pairs), *kept]


def write(
    dataset: Dataset, sections: Mapping[tuple[str, str], Section], target: Path, workers: int = 1
) -> dict[tuple[str, str], Counter]:
    """Write text in the shared layout; returns the counts of pairs read and kept, by split and pair.

    Training pairs are left out if a side is empty, or if the data set's ``clean`` drops them. ``sizes.json``
    next to ``target`` gets the numbers of training pairs, ``left_out.json`` those of pairs left out (both are
    in ``target`` if its name ends in ``.partial``). All names of files and pairs have the codes of a
    pretrained model, if there is one.
    """
    inputs = [file for part in sections.values() for file in part.files.values() if file]
    for replaced in (target, Folders(dataset).raw):
        check_replaceable(replaced, inputs)
    # The longest first, so that all processes end at about the same time.
    parts = sorted(sections.items(), key=lambda part: -part[1].size)
    size = sum(section.size for _, section in parts)
    overlap, held_out = dataset.clean.get("overlap"), {pair: [] for _, pair in sections}
    for (split, pair), section in sections.items():
        if split != "train" and overlap in ("drop", "drop-all"):
            for other in dataset.pairs if overlap == "drop-all" else [pair]:
                held_out[other].append(section)
    counts: dict[tuple[str, str], Counter] = {}
    with whole_folder(target, replace=True) as partial:
        copy = functools.partial(_copy, partial, dataset.clean, dataset.codes)
        units = ((*key, section, held_out[key[1]]) for key, section in parts)
        with progress("gather", size) as advance, parallel_map(copy, workers, size) as apply:
            for (key, section), count in zip(parts, apply(units), strict=True):
                counts[key] = count
                advance(section.size)
        pairs = {pair: translated(pair, dataset.codes) for pair in dataset.pairs}
        left_out = {name: dict(counts["train", pair]) for pair, name in pairs.items()}
        # Beside the text; or in it, if it is to replace other text, until it does.
        text = partial / target.name if target.suffix == PARTIAL else target
        write_sizes(text, {pair: count["kept"] for pair, count in left_out.items()})
        made_with = settings_of(dataset) | {"languages": dataset.codes}
        (partial / GATHERED).write_text(json.dumps(made_with, indent=2) + "\n", "utf-8")
        write_whole(text.with_name(LEFT_OUT), json.dumps(left_out, indent=2) + "\n")
    return counts


def settings_of(dataset: Dataset) -> dict[str, Any]:
    """The settings that gathered text depends on."""
    places = ("url", "sha256", "archives")  # where the same text can be had
    settings = {key: value for key, value in dataset.raw.items() if key not in places}
    return {"raw": settings, "source": dataset.source, "clean": dataset.clean}


def check_settings(dataset: Dataset, text: Path) -> None:
    """Raise UsageError if text was gathered with other settings, or not gathered and to be cleaned."""
    now = settings_of(dataset)
    before = read_json(text / GATHERED) if (text / GATHERED).exists() else now | {"clean": {}}
    if changed := next((key for key in now if before.get(key) != now[key]), None):
        advice = "delete it to gather its text again, or give another folder with the text by --raw"
        if not (text / GATHERED).exists():
            advice = "move it elsewhere and give it by --raw"
        raise UsageError(f"{text} was not made with this `{changed}`: {advice}")


def put_away(raw: Path) -> str:
    """The advice, behind "delete it", for text in the way: what was not gathered may be nowhere else."""
    gathered = (raw / GATHERED).exists()
    return f" and {raw}" if gathered else f", move {raw} elsewhere and give it by --raw"


def check_replaceable(target: Path, inputs: Iterable[Path]) -> None:
    """Raise UsageError if the folder of gathered text has an input, links resolved, or any other file."""
    others = (p for p in target.glob("[!.]*") if p.is_dir() or p.name.split(".")[0] not in SPLITS)
    inside = (path for path in inputs if path.resolve().is_relative_to(target.resolve()))
    if lost := next(inside, None) or next(others, None):
        expected = "move it elsewhere, or leave --raw out to use prepared text as it is"
        raise UsageError(f"{lost} would be lost, as new text replaces {target}: {expected}")


def write_sizes(raw: Path, sizes: dict[str, int]) -> None:
    """Write the numbers of training sentences by pair to ``sizes.json`` next to the raw text."""
    write_whole(raw.with_name(SIZES), json.dumps(sizes, indent=2) + "\n")


def _section(dataset: Dataset, source: Path, split: str, pair: str) -> Section | None:
    """The text of a pair; raises UsageError if it is missing, but only warns and returns None for a test."""
    if section := find(dataset, source, split, pair):
        return section
    lacks = missing(dataset, source, split, pair)
    if split != "test":
        raise UsageError(lacks)
    warn(f"{lacks}; without it, {pair} is not scored")
    return None


def _told_apart(sections: Mapping[tuple[str, str], Section]) -> dict[tuple[str, str], Section]:
    """The sections with all languages that are read from their files.

    Raises UsageError if a file with a sentence per line would be read as two languages.
    """
    read: dict[Path | None, dict[str, None]] = {}
    for section in sections.values():
        for language, file in section.files.items():
            read.setdefault(file, {})[language] = None
    for file, languages in read.items():
        if file and len(languages) > 1 and not readers.ending_of(file):
            both = " and ".join(languages)
            expected = f"expected a file of each, or one of {', '.join(readers.READERS)}"
            raise UsageError(f"{file} is named for both {both}: {expected}")
    beside = {unit: read[[*part.files.values()][0]] for unit, part in sections.items()}
    return {unit: replace(part, beside=(*beside[unit],)) for unit, part in sections.items()}


def _warn_of_others(
    dataset: Dataset, source: Path, sections: Mapping[tuple[str, str], Section]
) -> None:
    """Warn of files that are used where `raw.files` or `raw.splits` names others."""
    patterns, splits, others = dataset.raw.get("files", {}), dataset.raw.get("splits", {}), {}
    for (split, pair), section in sections.items():
        used = {file.name for file in section.files.values() if file}
        if split == "test" and dataset.source.get("sacrebleu"):
            continue
        if isinstance(patterns, str) or split in patterns:
            own = (publisher_names(dataset, split, pair, x, spellings) for x in pair.split("-"))
            stems = {Path(name).name for names in own for name in names}
            if used - {stem + ending for stem in stems for ending in COMPRESSED}:
                others.setdefault("files", []).extend(sorted(used))
        elif not all(name.startswith(f"{splits[split]}.") for name in used if split in splits):
            others.setdefault("splits", []).extend(sorted(used))
    for setting, names in others.items():
        shown = " and ".join(dict.fromkeys(names[:2])) + " and others" * (len({*names}) > 2)
        warn(f"{source} has no file of `raw.{setting}`; {shown} is used")


def text_files(raw: Path, pairs: str = "", names: str = "*.*-*.*") -> list[Path]:
    """The files of gathered text of ``pairs``, such as ``en-ca,en-sl``; by default of all."""
    files = sorted(raw.glob(names))
    return [file for file in files if not pairs or file.name.split(".")[1] in pairs.split(",")]


def give_alone(pair: str) -> str:
    """The advice for training text of which most is in the other splits."""
    return f"if this is all text of {pair}, give it alone, called {pair}: then it is divided"


def _copy(folder: Path, clean: Mapping[str, Any], codes: Mapping[str, str], unit: tuple) -> Counter:
    """Write a section to ``folder`` in the shared layout; returns the counts of pairs read and kept."""
    split, pair, section, held_out = unit
    faults = Faults(_held_out(pair.split("-"), held_out), clean) if split == "train" else None
    prefix = folder / f"{split}.{translated(pair, codes)}"
    counts = copy_pairs(section, prefix, faults, codes, clean.get("empty") == "drop")
    if not counts["kept"]:
        files = dict.fromkeys(str(file) for file in section.files.values() if file)
        found = ", ".join(f"{number:,} {name}" for name, number in counts.items()) or "none read"
        advice = ""
        if "overlap" in counts:  # the other splits were taken from it
            advice = f"; {give_alone(pair)}"
        elif section.hash_range:
            hashed = (
                "chance divides different sources: expected more of them, or a larger `parallel`"
            )
            advice = f"; with `raw: {{split: hash}}`, {hashed}"
        kept = f"{' and '.join(files) or 'the source'}: no line is kept ({found})"
        raise UsageError(f"{kept}: {pair} needs one to {split}{advice}")
    return counts


def _held_out(languages: Sequence[str], sections: Iterable[Section]) -> Iterator[tuple]:
    """The sentences of sections in two languages; None for a language that a section lacks."""
    for section in sections:
        if set(languages) & set(section.files):
            for pair in section.pairs():
                yield tuple(map(dict(zip(section.files, pair, strict=True)).get, languages))


def copy_pairs(
    section: Section,
    prefix: Path,
    faults: Faults | None,
    codes: Mapping[str, str] = {},
    drop_empty: bool = False,
) -> Counter:
    """Write ``PREFIX.{language}`` without faulty and incomplete pairs; returns the counts.

    Without ``faults``, pairs with an empty side are written unless ``drop_empty``.
    """
    counts = Counter()
    first, second = (f"{prefix}.{codes.get(lang, lang)}" for lang in section.files)
    with open(first, "w", encoding="utf-8") as one, open(second, "w", encoding="utf-8") as other:
        for sides in section.pairs():
            counts["read"] += 1
            # A record without a language may be of another pair: it is no empty line of a test.
            lacks = None in sides or (drop_empty and "" in sides)
            if names := ("empty",) * lacks if faults is None else faults.of(*sides):
                counts[names[0]] += 1
                continue
            counts["kept"] += 1
            one.write(f"{sides[0]}\n")
            other.write(f"{sides[1]}\n")
    return counts


def check(
    dataset: Dataset, raw: Path, needed: tuple[str, ...] = ("train", "valid")
) -> tuple[str, ...]:
    """The pairs with test text.

    Raises UsageError if a ``needed`` file is missing, a file is empty, or text has other codes of languages.
    """
    Folders(dataset).check_languages(raw / GATHERED)
    tested = []
    for pair in dataset.all_pairs:
        for split in (*(needed if pair in dataset.pairs else ()), "test"):
            files = [raw / f"{split}.{pair}.{language}" for language in pair.split("-")]
            present = [file for file in files if file.exists()]
            if empty := next((file for file in present if not file.stat().st_size), None):
                advice = f", or remove the files to leave {pair} out" * (split == "test")
                raise UsageError(f"{empty} is empty: {pair} needs a line to {split}{advice}")
            if present == files and split == "test":
                tested.append(pair)
            elif present != files and split != "test":
                missing = next(file for file in files if file not in present)
                again = f"; delete {raw} to gather its text again" * (raw / GATHERED).exists()
                raise UsageError(f"{missing} is missing: {pair} needs it to {split}{again}")
    return tuple(tested)
