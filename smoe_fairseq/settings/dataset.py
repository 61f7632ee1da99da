"""Data sets and methods: YAML files, composed into the flags of fairseq's commands."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from smoe_fairseq.system.errors import UsageError

Flags = dict[str, Any]

_DATASET_KEYS = {
    *("base", "pairs", "experts", "shards", "batch", "raw", "subwords"),
    *("task", "train", "generate", "checkpoint", "sacrebleu"),
}
_METHOD_KEYS = {"train"}
_FAMILY = re.compile(r"(?P<family>.+?)-(?P<strata>[1-9]\d*(-[1-9]\d*)*)")


@dataclass(frozen=True)
class Dataset:
    """One file of ``configs/datasets`` over ``configs/common.yaml``; its keys are explained there.

    ``pairs`` are language pairs as their files are named (``eng-nso``); each is two directions.
    ``batch`` holds tokens per update by name and is empty where ``train`` fixes the batch instead.
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
    merged = _with_base(folder, path)
    pairs = merged["pairs"] or []
    if not pairs or not all(re.fullmatch(r"[^-\s]+-[^-\s]+", str(pair)) for pair in pairs):
        raise UsageError(f"{path}: `pairs` has to list language pairs such as eng-nso")
    return Dataset(name=name, **(merged | {"pairs": tuple(pairs)}))


def _with_base(folder: Path, path: Path) -> dict[str, Any]:
    """A file over its ``base`` (``configs/BASE.yaml``), that over its own, down to ``common``."""
    own = _read(path, _DATASET_KEYS)
    base = own.pop("base", "common")
    if path.stem == "common":
        return own
    below = _with_base(folder, folder / f"{base}.yaml")
    return {key: _overlay(below.get(key), own.get(key)) for key in _DATASET_KEYS - {"base"}}


def method_flags(name: str, dataset: Dataset) -> Flags:
    """The training flags of a method: ``NAME.yaml``, or for ``FAMILY-4-12`` the family's file.

    In a method file ``{experts}`` stands for the data set's number of experts and, in a family's,
    ``{strata}`` for what follows the family's name. An unknown name is a `UsageError`.
    """
    folder = config_folder() / "methods"
    files = {path.stem: path for path in sorted(folder.glob("*.yaml"), key=lambda path: path.stem)}
    families = {stem for stem, path in files.items() if "{strata}" in path.read_text("utf-8")}
    match = _FAMILY.fullmatch(name)
    if name in files.keys() - families:
        path, strata = files[name], ""
    elif match and match["family"] in families:
        path, strata = files[match["family"]], match["strata"]
    else:
        known = [f"{stem}-A-B-..." if stem in families else stem for stem in files]
        raise UsageError(f"unknown method {name!r}: choose one of {', '.join(known)}")

    def fill(value):
        if not isinstance(value, str):
            return value
        return value.replace("{strata}", strata).replace("{experts}", str(dataset.experts))

    flags = _read(path, _METHOD_KEYS).get("train") or {}
    return {key: fill(value) for key, value in flags.items()}


def arguments(flags: Flags) -> list[str]:
    """Command-line words for flags: ``true`` is the bare flag, ``false`` and null leave it out."""
    words: list[str] = []
    for key, value in flags.items():
        if value is None or value is False:
            continue
        words.append(f"--{key}")
        if value is not True:
            words.append(str(value))
    return words


def config_folder() -> Path:
    """``CONFIG_DIR``, or else the ``configs`` folder of the checkout this package is part of."""
    if given := os.environ.get("CONFIG_DIR"):
        folder = Path(given)
    else:
        folder = Path(__file__).parents[2] / "configs"
    if not (folder / "datasets").is_dir():
        raise UsageError(
            f"{folder} holds no recipes: set CONFIG_DIR to the folder with datasets/ and methods/"
        )
    return folder


def _overlay(base, own):
    if isinstance(base, dict) and isinstance(own, dict):
        return base | own
    return base if own is None else own


def _read(path: Path, keys: set[str]) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text("utf-8")) or {}
    except FileNotFoundError:
        raise UsageError(f"{path} is missing") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or not keys.issuperset(content):
        raise UsageError(f"{path} may only have the keys {', '.join(sorted(keys))}")
    return content
