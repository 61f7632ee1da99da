"""Paths of a data set's files; names of its runs (a run is a method and a seed), and their checkpoints."""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import smoe_fairseq
from smoe_fairseq.checkpoints.content import fingerprint
from smoe_fairseq.compat.checkpoint_names import rank_files, saved
from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import read_plain
from smoe_fairseq.forms import read_json
from smoe_fairseq.recipes.config_files import CHECKPOINT
from smoe_fairseq.recipes.datasets import Dataset, both_orders
from smoe_fairseq.recipes.processes import command
from smoe_fairseq.recipes.program_flags import value_of

# Files in a data set's folder.
SIZES = "sizes.json"  # {pair: training sentence pairs}
LEFT_OUT = "left_out.json"  # {pair: {read, kept, and a count for each fault}} of training text
# In the folders of gathered and of binarised text: what it was made of.
GATHERED, PREPARED = ".settings.json", "preparation.json"
CONSOLIDATED = "consolidated"  # in a run's folder: checkpoints with the experts of all ranks
PARTIAL = ".partial"  # ends the name of a folder that is not complete
_RUN = re.compile(r"(?P<method>.+)\.seed-(?P<seed>\d+)")


def final(path: Path) -> str:
    """The name that a path in an incomplete folder gets at the end."""
    return str(Path(*(part.removesuffix(PARTIAL) for part in path.parts)))


def print_written(output: Path, number: int, left: int, counts: str) -> None:
    """Print the ``counts`` of the files that were ``left`` to write of a ``number``."""
    kept = f"; {number - left} were complete" * (left < number)
    print(f"{final(output)}: {left} files, {counts}{kept}", flush=True)


@dataclass(frozen=True)
class Folders:
    """The folders of one data set: below ``DATA_DIR`` (data/) and ``RUN_DIR`` (runs/)."""

    dataset: Dataset

    @property
    def data(self) -> Path:
        return self.dataset.settings.data_dir / self.dataset.name

    @property
    def download(self) -> Path:
        """Downloaded files."""
        return self.data / "download"

    @property
    def unpacked(self) -> Path:
        """The needed files from the archives in ``download``."""
        return self.data / "unpacked"

    @property
    def raw(self) -> Path:
        """Plain text, ``{split}.{pair}.{language}``: training text and references."""
        return self.data / "raw"

    @property
    def binary(self) -> Path:
        """Sentencepiece model, dictionary and binarised text; exists only when complete."""
        return self.data / "bin"

    def check_prepared(self) -> None:
        """Raise UsageError if a pair lacks binarised text for training or validation, or has other codes."""
        if not self.binary.exists():
            missing = f"{self.binary.absolute()} is missing"
            raise UsageError(f"{missing}: run scripts/prepare.sh {self.dataset}")
        self.check_languages(self.binary / PREPARED)
        folder = shard_folders(self.binary)[0]
        again = f"delete {self.binary} and run scripts/prepare.sh {self.dataset} again"
        for pair, split in itertools.product(self.dataset.pairs, ("train", "valid")):
            for language in pair.split("-"):
                texts = [f"{split}.{order}.{language}" for order in both_orders(pair)]
                content = ([f"{text}.{end}" for text in texts] for end in ("bin", "idx"))
                for names in ([f"dict.{language}.txt"], *content):
                    found = filter(Path.exists, map(folder.joinpath, names))
                    if not any(file.stat().st_size for file in found):
                        missing = f"{folder / names[0]} is missing or empty"
                        raise UsageError(f"{missing}: {again}, or leave {pair} out of `pairs`")

    def check_languages(self, record: Path) -> None:
        """Raise UsageError if text, by the record in its folder, was made with other codes of `languages`."""
        content = read_json(record) if record.exists() else {}
        before = content.get("settings", content).get("languages", {})  # older records have none
        for code, model in self.dataset.codes.items():
            if (other := before.get(code, model)) != model:
                made = f"{record.parent} was made with `languages: {{{code}: {other}}}`"
                raw = f" and {self.raw}" * (self.raw / GATHERED).exists()  # else the user's own
                again = f"delete {self.binary}{raw}, run scripts/prepare.sh {self.dataset} again"
                raise UsageError(f"{made}, not {model}: {again}")

    def texts(self, split: str, pair: str) -> dict[str, Path]:
        """A pair's files in `raw`, by language."""
        return {language: self.raw / f"{split}.{pair}.{language}" for language in pair.split("-")}

    @property
    def runs(self) -> Path:
        """A folder for each run, with its checkpoints, log, translations and scores."""
        return self.dataset.settings.run_dir / self.dataset.name

    def binary_path(self) -> str:
        """fairseq's data argument: the folder of binarised text, or ``shard0:shard1:...``."""
        if self.binary.exists():
            return ":".join(map(str, shard_folders(self.binary)))
        # Text that its authors binarised is one shard.
        shards = 1 if self.dataset.raw.get("binarised") else self.dataset.shards
        return ":".join(str(self.binary / name) for name in shard_names(shards))


def shard_names(shards: int) -> tuple[str, ...]:
    """Names of the shards' folders; a single shard is in the folder of the binarised text itself."""
    return ("",) if shards == 1 else tuple(f"shard{i}" for i in range(shards))


def shard_folders(folder: Path) -> list[Path]:
    """The shards in ``folder``, in order; ``folder`` itself if it has none."""
    shards = sum(1 for path in folder.glob("shard*") if path.is_dir())
    return [folder / name for name in shard_names(shards or 1)]


def vocab_size(dataset: Dataset) -> int:
    """Subwords of the prepared text, ``<unk>``, ``<s>`` and ``</s>`` among them; else the setting."""
    if dataset.start:  # language tokens and <pad> are in its dictionary
        return dataset.start["rows"] - 1 - len(dataset.languages)
    files = sorted(Folders(dataset).binary.glob("**/dict*.txt"))
    return read_plain(files[0]).count(b"\n") + 3 if files else int(dataset.subwords["vocab-size"])


def runs_of(dataset: Dataset) -> list[str]:
    """The names of a data set's runs, in order; raises UsageError if two are of one method and seed."""
    folder = Folders(dataset).runs
    folders = (p for p in folder.glob("*") if p.is_dir() and not p.name.startswith("."))
    names = sorted((path.name for path in folders), key=run_order)
    refuse_twice({folder / name: run_seed(name, dataset) for name in names})
    return names


def refuse_twice(seeds: Mapping[Path, int]) -> None:
    """Raise UsageError if two folders of runs are of one method and seed; ``seeds`` are by folder."""
    by_seed = {}
    for folder, seed in seeds.items():
        other = by_seed.setdefault((run_method(folder.name), seed), folder)
        if other is not folder:
            raise UsageError(f"{other} and {folder} are both of seed {seed}: delete one of them")


def checkpoint_file(run: Path, which: str) -> Path:
    """The checkpoint ``best``, ``last`` or ``average:N`` of a run's folder; raises UsageError for others."""
    if not CHECKPOINT.fullmatch(which):
        raise UsageError(f"--checkpoint {which}: expected best, last or average:N")
    kind, _, number = which.partition(":")
    if number:
        return run / "averaged" / f"checkpoint_average_{number}.pt"
    return run / f"checkpoint_{kind}.pt"


def whole_checkpoint(folder: Path, which: str) -> tuple[Path, tuple[str, ...]]:
    """A run's checkpoint in one file, and the commands that make it if necessary."""
    parts, whole = _parts(folder, which), checkpoint_file(folder, which)
    if parts != [whole]:
        average = command("smoe", "average", *parts, "--output", whole, "--force")
        comment = f"# the mean of {len(parts)} checkpoints"
        preparation = (comment, command("mkdir", "-p", whole.parent), average)
    elif ranks := rank_files(whole):
        if whole.exists():
            raise UsageError(f"{whole} and {min(ranks.values())} both exist: move one away")
        whole = folder / CONSOLIDATED / whole.name
        consolidate = command("smoe", "consolidate", *parts, "--output", whole, "--force")
        preparation = ("# the experts of all processes in one checkpoint", consolidate)
    else:
        return whole, ()
    if whole.exists():
        from smoe_fairseq.checkpoints.reading import made_of  # imports torch

        if made_of(whole) == fingerprints(folder, which):
            return whole, ()
    return whole, preparation


def fingerprints(folder: Path, which: str) -> dict[str, str]:
    """The fingerprints of what a run's checkpoint is, or is made of, by name; raises OSError without it."""
    return {part.name: fingerprint(part) for part in _parts(folder, which)}


def _parts(folder: Path, which: str) -> list[Path]:
    """The files, or names of sets, that a run's checkpoint is, or is made of."""
    file = checkpoint_file(folder, which)
    if not (number := int(which.partition(":")[2] or 0)):
        return [file]
    names = "of-*-ranks/checkpoint*.pt", "checkpoint*.pt"  # of other numbers of ranks, and of this
    found = {at: file for name in names for file, at in saved(folder.glob(name)).items()}
    numbers = [(epoch, updates) for epoch, updates in found if updates] or list(found)
    last = [found[at] for at in sorted(numbers, key=lambda at: at[::-1])[-number:]]
    if len(last) < number:
        advice = "keep more with --keep-interval-updates of training"
        raise UsageError(f"--checkpoint {which}: {folder} has {len(last)} to average: {advice}")
    return last


def test_file(dataset: Dataset, direction: str, language: str) -> Path:
    """The raw test set of a direction in one of its languages."""
    return Folders(dataset).texts("test", dataset.pair_of(direction))[language]


def package_folder(*names: str) -> str:
    """The package (for ``--user-dir``) or a folder in it; relative if it is below the current folder."""
    path = Path(smoe_fairseq.__file__).parent.joinpath(*names)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def default_seed(dataset: Dataset) -> int:
    """The data set's seed."""
    return value_of(dataset.train, "seed", 1)  # fairseq's default


def seed_of(dataset: Dataset) -> int:
    """``SEED``, by default the data set's seed."""
    seed = dataset.settings.seed
    return default_seed(dataset) if seed is None else seed


def run_name(dataset: Dataset, method: str, seed: int | None = None) -> str:
    """The name of a run's folder: the method, and the seed unless it is the data set's."""
    seed = seed_of(dataset) if seed is None else seed
    return method if seed == default_seed(dataset) else f"{method}.seed-{seed}"


def run_method(name: str) -> str:
    """The method of a run's folder."""
    match = _RUN.fullmatch(name)
    return match["method"] if match else name


def run_seed(name: str, dataset: Dataset | None = None) -> int | None:
    """The seed in a folder's name, else the seed of ``dataset``, else None."""
    if match := _RUN.fullmatch(name):
        return int(match["seed"])
    return None if dataset is None else default_seed(dataset)


def run_order(name: str) -> tuple[str, int]:
    """A sort key for run folders: by method, then by seed, the data set's seed first."""
    seed = run_seed(name)
    return run_method(name), -1 if seed is None else seed
