"""Paths of a data set's files, and names of its runs (a run is a method with a seed)."""

import itertools
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import smoe_fairseq
from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes.config import Dataset, orders
from smoe_fairseq.recipes.processes import whole_number

# In a data set's folder.
SIZES = "sizes.json"  # {pair: training sentence pairs}; of earlier versions {language: ...}
LEFT_OUT = "left_out.json"  # {pair: {read, kept, and a number for each fault}} of training text
LARGEST_SEED = 2**31 - 1
_RUN = re.compile(r"(?P<method>.+)\.seed-(?P<seed>\d+)")


def given_path(variable: str, default: str = "") -> Path:
    """The path in an environment variable; made absolute if it looks like a flag.

    Raises:
        UsageError: it has a default, as folders have, and is no folder.
    """
    path = Path(os.environ.get(variable) or default)
    if default and path.exists() and not path.is_dir():
        raise UsageError(f"{variable}={path}: expected a folder")
    return path.absolute() if str(path).startswith("-") else path


@dataclass(frozen=True)
class Folders:
    """The folders of one data set: below ``DATA_DIR`` (data/) and ``RUN_DIR`` (runs/)."""

    dataset: str

    @property
    def data(self) -> Path:
        return given_path("DATA_DIR", "data") / self.dataset

    @property
    def download(self) -> Path:
        """Downloaded files."""
        return self.data / "download"

    @property
    def unpacked(self) -> Path:
        """The files that the data set needs of the archives in ``download``."""
        return self.data / "unpacked"

    @property
    def raw(self) -> Path:
        """Plain text, ``{split}.{pair}.{language}``: training text and references."""
        return self.data / "raw"

    @property
    def binary(self) -> Path:
        """Sentencepiece model, dictionary and binarised text; exists only when complete."""
        return self.data / "bin"

    def check_prepared(self, pairs: Iterable[str]) -> None:
        """Raise UsageError without binarised text of all pairs to train and validate."""
        if not self.binary.exists():
            raise UsageError(f"{self.binary} is missing: run scripts/prepare.sh {self.dataset}")
        folder = shard_folders(self.binary)[0]
        advice = f"delete {self.binary} and run scripts/prepare.sh {self.dataset} again"
        for pair, split in itertools.product(pairs, ("train", "valid")):
            for language in pair.split("-"):
                texts = [f"{split}.{order}.{language}.idx" for order in orders(pair)]
                for names in ([f"dict.{language}.txt"], texts):
                    if not any((folder / name).exists() for name in names):
                        raise UsageError(f"{folder / names[0]} is missing: {advice}")

    def texts(self, split: str, pair: str) -> dict[str, Path]:
        """A pair's files in `raw`, by language."""
        return {language: self.raw / f"{split}.{pair}.{language}" for language in pair.split("-")}

    @property
    def runs(self) -> Path:
        return given_path("RUN_DIR", "runs") / self.dataset

    def run(self, name: str) -> Path:
        """Checkpoints, log, translations and scores of one run."""
        return self.runs / name

    def binary_path(self, shards: int) -> str:
        """The binarised text as fairseq's commands take it: its folder, or ``shard0:shard1:...``.

        ``shards`` is their expected number; if the text exists, its shards are counted.
        """
        if self.binary.exists():
            return ":".join(map(str, shard_folders(self.binary)))
        return ":".join(str(self.binary / name) for name in shard_names(shards))


def shard_names(shards: int) -> tuple[str, ...]:
    """Names of the shards' folders below the binarised text; a single shard has no folder of its own."""
    return ("",) if shards == 1 else tuple(f"shard{i}" for i in range(shards))


def shard_folders(folder: Path) -> list[Path]:
    """The shards in ``folder``, in order; ``folder`` itself if it has none."""
    shards = sum(1 for path in folder.glob("shard*") if path.is_dir())
    return [folder / name for name in shard_names(shards or 1)]


def tested_text(dataset: Dataset, direction: str, language: str) -> Path:
    """A direction's raw test set in one of its two languages."""
    return Folders(dataset.name).texts("test", dataset.pair_of(direction))[language]


def package_folder(*names: str) -> str:
    """The plugin's path for ``--user-dir``, or a folder below it; relative to the current one above it."""
    path = Path(smoe_fairseq.__file__).parent.joinpath(*names)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _own_seed(dataset: Dataset) -> int:
    return dataset.train.get("seed", 1)  # fairseq's default


def seed_of(dataset: Dataset) -> int:
    """``SEED``, by default the data set's seed; raises UsageError if it is no seed."""
    return whole_number("SEED", 0, _own_seed(dataset), LARGEST_SEED)


def seeds_of(dataset: Dataset) -> tuple[int, ...]:
    """``SEEDS``, by default the data set's one seed; raises UsageError if one is no seed, or comes twice."""
    given = os.environ.get("SEEDS", "").replace(",", " ").split()
    found = tuple(whole_number("SEEDS", 0, None, LARGEST_SEED, word) for word in given)
    found = found or (_own_seed(dataset),)
    if len(set(found)) < len(found):
        raise UsageError(f"SEEDS={' '.join(given)}: expected each seed once")
    return found


def run_name(dataset: Dataset, method: str, seed: int | None = None) -> str:
    """The name of a run's folder: the method, with the seed (``SEED``) unless it is the data set's own."""
    seed = seed_of(dataset) if seed is None else seed
    return method if seed == _own_seed(dataset) else f"{method}.seed-{seed}"


def method_of(name: str) -> str:
    """The method of a run's folder."""
    found = _RUN.fullmatch(name)
    return found["method"] if found else name


def seed_in(name: str, dataset: Dataset | None = None) -> int | None:
    """The seed in a folder's name; without one, the seed of ``dataset``, or None."""
    found = _RUN.fullmatch(name)
    if found:
        return int(found["seed"])
    return None if dataset is None else _own_seed(dataset)


def order(name: str) -> tuple[str, int]:
    """A sort key for run folders: by method, the data set's own seed first."""
    seed = seed_in(name)
    return method_of(name), -1 if seed is None else seed
