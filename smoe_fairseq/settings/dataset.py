"""Data sets: what is trained and scored on, as YAML files that stand on one another."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from smoe_fairseq.settings.flags import Flags
from smoe_fairseq.settings.reading import config_folder, read
from smoe_fairseq.system.errors import UsageError

_KEYS = {
    *("base", "pairs", "experts", "shards", "batch", "raw", "subwords"),
    *("task", "train", "generate", "checkpoint", "sacrebleu", "study"),
}


@dataclass(frozen=True)
class Dataset:
    """One file of ``configs/datasets`` over ``configs/common.yaml``; its keys are explained there.

    ``pairs`` are language pairs as their files are named (``eng-nso``); each is two directions.
    ``batch`` holds tokens per update by name and is empty where ``train`` fixes the batch instead.
    ``study`` are the methods that ``scripts/study.sh`` compares.
    """

    name: str
    pairs: tuple[str, ...]
    experts: int
    shards: int
    batch: dict[str, int]
    raw: dict[str, Any]
    subwords: dict[str, Any]
    task: Flags
    train: Flags
    generate: Flags
    checkpoint: str
    sacrebleu: Flags
    study: list[str]

    @property
    def languages(self) -> tuple[str, ...]:
        """All languages in order of appearance, which is the order of their tokens."""
        return tuple(dict.fromkeys(lang for pair in self.pairs for lang in pair.split("-")))

    @property
    def directions(self) -> tuple[str, ...]:
        """``source-target`` names in the paper's order: into the first language, then out of it."""
        reverse = tuple("-".join(reversed(pair.split("-"))) for pair in self.pairs)
        return reverse + self.pairs

    def pair_of(self, direction: str) -> str:
        """The pair whose files hold a direction."""
        return direction if direction in self.pairs else "-".join(reversed(direction.split("-")))


def load_dataset(name: str) -> Dataset:
    """Reads ``configs/datasets/NAME.yaml``; an unknown name or key is a `UsageError`."""
    folder = config_folder()
    path = folder / "datasets" / f"{name}.yaml"
    known = sorted(file.stem for file in path.parent.glob("*.yaml"))
    if name not in known:
        raise UsageError(f"unknown dataset {name!r}: choose one of {', '.join(known)}")
    merged = OmegaConf.to_container(OmegaConf.merge(*_layers(folder, path)))
    pairs, experts = merged.get("pairs"), merged.get("experts")
    if not isinstance(pairs, list) or not all(map(_is_pair, pairs or [""])):
        given = "missing" if pairs is None else pairs
        raise UsageError(
            f"{path}: `pairs` has to list language pairs such as [eng-nso, eng-fra]; it is {given}"
        )
    if experts is not None and (type(experts) is not int or experts < 1):
        raise UsageError(f"{path}: `experts` is {experts}: expected a whole number of at least 1")
    values = {key: merged.get(key) for key in _KEYS - {"base"}}
    return Dataset(name=name, **(values | {"pairs": tuple(pairs)}))


def _is_pair(name) -> bool:
    """Whether it names two languages."""
    found = re.fullmatch(r"([^-\s]+)-([^-\s]+)", str(name))
    return found is not None and found[1] != found[2]


def _layers(folder: Path, path: Path) -> list[DictConfig]:
    """``common``, what stands on it and so on, up to the file itself: what each has as its ``base``."""
    layers, names = [], []
    while True:
        names.append(path.stem)
        own = read(path, _KEYS)
        base = own.pop("base", "common")
        layers.insert(0, own)
        if path.stem == "common":
            return layers
        if base in names:
            raise UsageError(f"{path}: its `base` {base} stands on it in turn")
        path = folder / f"{base}.yaml"
