"""Where a recipe keeps its files: ``DATA_DIR`` and ``RUN_DIR``."""

import os
from dataclasses import dataclass
from pathlib import Path

import smoe_fairseq
from smoe_fairseq.settings.dataset import Dataset


@dataclass(frozen=True)
class Folders:
    """The folders of one data set: below ``DATA_DIR`` (data/) and ``RUN_DIR`` (runs/)."""

    dataset: str

    @property
    def data(self) -> Path:
        return Path(os.environ.get("DATA_DIR") or "data") / self.dataset

    @property
    def download(self) -> Path:
        """Files as their publisher has them."""
        return self.data / "download"

    @property
    def raw(self) -> Path:
        """Plain text, ``{split}.{pair}.{language}``: what is trained on and scored against."""
        return self.data / "raw"

    @property
    def unpacked(self) -> Path:
        """What a data set needs of the archives in ``download``."""
        return self.data / "unpacked"

    @property
    def binary(self) -> Path:
        """Sentencepiece model, dictionary and binarised text; there only when complete."""
        return self.data / "bin"

    def binary_path(self, shards: int) -> str:
        """The binarised text as fairseq's commands take it: its folder, or ``shard0:shard1:...``.

        Args:
            shards: how many, where it is not there yet.
        """
        if self.binary.exists():
            return ":".join(map(str, shard_folders(self.binary)))
        return ":".join(str(self.binary / name) for name in shard_names(shards))

    @property
    def runs(self) -> Path:
        return Path(os.environ.get("RUN_DIR") or "runs") / self.dataset

    def run(self, method: str) -> Path:
        """Checkpoints, log, translations and scores of one method."""
        return self.runs / method


def shard_names(shards: int) -> tuple[str, ...]:
    """Folders below the binarised text; an only shard needs none."""
    return ("",) if shards == 1 else tuple(f"shard{i}" for i in range(shards))


def shard_folders(folder: Path) -> list[Path]:
    """Those that `shard_names` has called so in ``folder``, in order; without any, it is the only one."""
    shards = sum(1 for path in folder.glob("shard*") if path.is_dir())
    return [folder / name for name in shard_names(shards or 1)]


def tested_text(dataset: Dataset, direction: str, language: str) -> Path:
    """A direction's test set in one of its two languages, raw: what is translated, and scored against."""
    raw = Folders(dataset.name).raw
    return raw / f"test.{dataset.pair_of(direction)}.{language}"


def user_dir() -> str:
    """The plugin's path for ``--user-dir``, relative where that is possible."""
    path = Path(smoe_fairseq.__file__).parent
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
