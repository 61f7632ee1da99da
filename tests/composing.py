"""fairseq's config from a command's options, without hydra's search for its parts: the same, sooner.

Every command of fairseq has hydra compose its config, which is half of what a short training computes. All
that fairseq asks hydra for are the parts of the config by their names, and the value of every setting.
"""

import contextlib
import copy
import functools
from pathlib import Path

import fairseq
from fairseq.dataclass import utils
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

compose_by_hydra, initialize_by_hydra = utils.compose, utils.initialize
CONFIG = str(Path(fairseq.__file__).with_name("config"))


def install() -> None:
    utils.compose = compose
    utils.initialize = initialize


@contextlib.contextmanager
def initialize(config_path: str):
    """In place of hydra's function, which looks through the sources of all that has called it."""
    yield


def compose(name: str, overrides: list[str], strict: bool) -> DictConfig:
    """In place of hydra's function, in `convert_namespace_to_omegaconf`; what is wrong hydra has to say."""
    try:
        return composed(overrides)
    except Exception:
        return by_hydra(name, overrides, strict)


def by_hydra(name: str, overrides: list[str], strict: bool) -> DictConfig:
    with initialize_config_dir(config_dir=CONFIG):
        return compose_by_hydra(name, overrides=overrides, strict=strict)


def composed(overrides: list[str]) -> DictConfig:
    cfg = copy.deepcopy(without_options())
    settings = [parsed(override) for override in overrides]
    groups = ConfigStore.instance().repo
    for key, value in settings:
        if key in groups and value is not None:
            cfg[key] = copy.deepcopy(groups[key][f"{value}.yaml"].node)
    OmegaConf.set_struct(cfg, True)
    for key, value in settings:
        if key not in groups:
            OmegaConf.update(cfg, key, copy.copy(value), merge=True)
    OmegaConf.set_struct(cfg, False)
    return cfg


@functools.cache
def parsed(override: str) -> tuple[str, object]:
    """A setting such as ``model.dropout=0.1``: its name and value."""
    found = parser().parse_override(override)
    assert found.type.name == "CHANGE" and found.package is None
    return found.key_or_group, found.value()


@functools.cache
def parser() -> OverridesParser:
    return OverridesParser.create()


@functools.cache
def without_options() -> DictConfig:
    return by_hydra("config", [], strict=False)
