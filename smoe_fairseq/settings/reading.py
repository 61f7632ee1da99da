"""The YAML files of data sets and methods: where they are, and how one is read."""

import os
from collections.abc import Collection
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from smoe_fairseq.system.errors import UsageError

# Those that hold keys and values of their own.
_SECTIONS = ("batch", "raw", "subwords", "task", "train", "generate", "sacrebleu")


def config_folder() -> Path:
    """``CONFIG_DIR``, or else ``configs`` as it was installed with the package, or as the checkout has it."""
    if given := os.environ.get("CONFIG_DIR"):
        folder = Path(given)
    else:
        # Installed first: beside an installed package, a folder of that name is somebody else's.
        installed = Path(__file__).parent / "configs"
        checkout = Path(__file__).parents[2] / "configs"
        folder = installed if installed.is_dir() else checkout
    if not (folder / "datasets").is_dir():
        raise UsageError(
            f"{folder} holds no recipes: set CONFIG_DIR to the folder with datasets/ and methods/"
        )
    return folder


def read(path: Path, keys: Collection[str]) -> DictConfig:
    """A file's content; a key without a value is as if it were not there.

    Raises:
        UsageError: it is missing, not YAML, or has something else than ``keys``.
    """
    try:
        content = OmegaConf.load(path)
    except FileNotFoundError:
        raise UsageError(f"{path} is missing") from None
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise UsageError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    except OSError as error:
        if error.strerror:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from None
        content = None  # OmegaConf's, for a number
    known = ", ".join(sorted(keys))
    if not isinstance(content, DictConfig):
        raise UsageError(f"{path} may only have the keys {known}")
    if unknown := [key for key in content if key not in keys]:
        raise UsageError(f"{path}: unknown key `{unknown[0]}`: expected one of {known}")
    for key, value in OmegaConf.to_container(content).items():
        if value is None:
            del content[key]
        elif key in _SECTIONS and not isinstance(value, dict):
            raise UsageError(f"{path}: `{key}` has to hold keys and values such as `lr: 0.001`")
    return content
