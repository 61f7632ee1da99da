"""Draws meanings, puts them into all languages and writes the splits."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import whole_files
from smoe_fairseq.recipes.phrasebook import catalan, english, malay, sotho, tagalog
from smoe_fairseq.recipes.phrasebook.sampler import draw

LANGUAGES = {
    "eng": english.render,
    "nso": sotho.render,
    "msa": malay.render,
    "tgl": tagalog.render,
    "cat": catalan.render,
}
SHORTEST, LONGEST = 3, 16  # words
MOST = 100_000  # sentences in all; far fewer than there are, so that drawing stays fast


def write_corpus(
    output_dir: str | os.PathLike,
    train: int = 4000,
    valid: int = 100,
    test: int = 150,
    seed: int = 1,
) -> dict[str, int]:
    """Writes ``{split}.eng-{xxx}.{language}`` for the four pairs and returns the line counts.

    All pairs say the same in line ``n`` of a split. No sentence of any language comes twice,
    within a split or in two of them. Equal arguments give equal files on every platform. The
    files appear when all of them are complete; earlier ones of the same names are replaced.
    Counts or a seed out of range, or an ``output_dir`` that cannot be written, is a `UsageError`.
    """
    sizes = {"train": train, "valid": valid, "test": test}
    _check(sizes, seed)
    drawn = sentences(seed)
    splits = {split: [next(drawn) for _ in range(size)] for split, size in sizes.items()}
    texts = {
        f"{split}.eng-{other}.{language}": [line[language] for line in lines]
        for split, lines in splits.items()
        for other in LANGUAGES
        if other != "eng"
        for language in ("eng", other)
    }
    _write(Path(output_dir), texts)
    return {name: len(lines) for name, lines in texts.items()}


def sentences(seed: int) -> Iterator[dict[str, str]]:
    """Sentences in all languages, by language; none comes twice in any of them."""
    rng = random.Random(seed)
    seen = {language: set() for language in LANGUAGES}
    while True:
        meaning = draw(rng)
        line = {language: render(meaning) for language, render in LANGUAGES.items()}
        fits = all(SHORTEST <= len(text.split()) <= LONGEST for text in line.values())
        if fits and not any(text in seen[language] for language, text in line.items()):
            for language, text in line.items():
                seen[language].add(text)
            yield line


def _check(sizes: dict[str, int], seed: int) -> None:
    for split, size in sizes.items():
        if size < 1:
            raise UsageError(f"--{split} is {size}, but has to be 1 or more sentences")
    if sum(sizes.values()) > MOST:
        raise UsageError(
            f"--train, --valid and --test ask for {sum(sizes.values())} sentences: together they "
            f"can be at most {MOST}"
        )
    if seed < 0:
        raise UsageError(f"--seed is {seed}, but has to be 0 or more")


def _write(folder: Path, texts: dict[str, list[str]]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"OUTPUT_DIR {folder} cannot be made: {error.strerror}; it has to be a folder that can be "
            "written, or the name of a new one"
        ) from None
    with whole_files([folder / name for name in texts], f"OUTPUT_DIR {folder}") as partials:
        for partial, lines in zip(partials, texts.values(), strict=True):
            Path(partial).write_bytes("".join(f"{line}\n" for line in lines).encode())
