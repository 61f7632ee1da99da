"""fairseq's config from a command's options, without hydra's search for its parts: the same, sooner.

Every command of fairseq has hydra compose its config, which is half of what a short training computes. All
that fairseq asks hydra for are the parts of the config by their names, and the value of every setting; of
what is composed it takes nothing but the values. So it is given plain dictionaries.
"""

import contextlib
import copy
import functools
import re
from enum import Enum
from pathlib import Path
from typing import Any

import fairseq
from fairseq.dataclass import utils
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import AnyNode, DictConfig, ListConfig, OmegaConf, ValueNode

compose_by_hydra, initialize_by_hydra = utils.compose, utils.initialize
CONFIG = str(Path(fairseq.__file__).with_name("config"))
NUMBER = r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:e[+-]?\d+)?"
NAME = r"[A-Za-z_]\w*"
# What hydra's grammar reads the same way; the rest is left to it.
PLAIN = re.compile(
    rf"({NAME}(?:\.{NAME})*)="
    rf"(?:({NUMBER})|'([^'\\$\n]*)'|({NAME})|\[((?:{NUMBER}(?:, {NUMBER})*)?)\])",
    re.ASCII,
)
WORDS = {"true": True, "false": False, "null": None}
REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def install() -> None:
    utils.compose = compose
    utils.initialize = initialize
    utils.OmegaConf = Values


class Values(OmegaConf):
    """Of plain dictionaries, as `convert_namespace_to_omegaconf` uses it, in half the time."""

    @staticmethod
    def to_container(cfg, **options):
        return cfg if type(cfg) is dict else OmegaConf.to_container(cfg, **options)

    @staticmethod
    def create(values):
        return node(values)


def node(value, key=None, parent=None):
    if type(value) is list:
        return ListConfig(value, key=key, parent=parent)
    if type(value) is not dict:
        return AnyNode(value, key=key, parent=parent)
    cfg = DictConfig({}, key=key, parent=parent)
    for name, each in value.items():
        cfg._content[name] = node(each, name, cfg)
    return cfg


@contextlib.contextmanager
def initialize(config_path: str):
    """In place of hydra's function, which looks through the sources of all that has called it."""
    yield


def compose(name: str, overrides: list[str], strict: bool) -> dict | DictConfig:
    """In place of hydra's function, in `convert_namespace_to_omegaconf`; what is wrong hydra has to say."""
    try:
        return composed(overrides)
    except Exception:
        return by_hydra(name, overrides, strict)


def by_hydra(name: str, overrides: list[str], strict: bool) -> DictConfig:
    with initialize_config_dir(config_dir=CONFIG):
        return compose_by_hydra(name, overrides=overrides, strict=strict)


def composed(overrides: list[str]) -> dict:
    """The values, and nothing of their types, by which they are checked and converted here."""
    groups = ConfigStore.instance().repo
    nodes = dict(without_options()._content)
    values = copy.deepcopy(values_without_options())
    settings = [parsed(override) for override in overrides]
    for key, value in settings:
        if key in groups and value is not None:
            nodes[key] = groups[key][f"{value}.yaml"].node
            values[key] = OmegaConf.to_container(nodes[key], enum_to_str=True)
    for key, value in settings:
        if key not in groups:
            *path, name = key.split(".")
            of, place = nodes, values
            for part in path:
                of, place = of[part]._content, place[part]
            place[name] = converted(of[name], value)
    resolve(values, nodes, values)
    return values


def converted(setting, value):
    """As the setting takes it."""
    if isinstance(value, str) and "${" in value:
        return value  # `resolve` comes to it
    if setting._metadata.ref_type is Any:
        return value
    if isinstance(setting, ListConfig):
        setting = copy.copy(setting)
        setting._set_value(value)
        return OmegaConf.to_container(setting, enum_to_str=True)
    assert isinstance(setting, ValueNode) and not isinstance(value, list)
    value = setting.validate_and_convert(value)
    return value.name if isinstance(value, Enum) else value


def resolve(values: dict, nodes, top: dict) -> None:
    """Puts in each reference's place what it stands for."""
    for name, value in values.items():
        if isinstance(value, dict):
            resolve(value, nodes[name]._content, top)
        elif isinstance(value, str) and "${" in value:
            found = top
            for part in REFERENCE.fullmatch(value)[1].split("."):
                found = found[part]
            values[name] = converted(nodes[name], copy.copy(found))


@functools.cache
def parsed(override: str) -> tuple[str, object]:
    """A setting such as ``model.dropout=0.1``: its name and value."""
    if plain := PLAIN.fullmatch(override):
        key, number, quoted, word, numbers = plain.groups()
        if number is not None:
            return key, number_of(number)
        if quoted is not None:
            return key, quoted
        if numbers is not None:
            return key, [number_of(text) for text in numbers.split(", ") if text]
        if word.lower() not in ("nan", "inf"):
            return key, WORDS.get(word.lower(), word)
    found = parser().parse_override(override)
    assert found.type.name == "CHANGE" and found.package is None
    return found.key_or_group, found.value()


def number_of(text: str) -> int | float:
    return float(text) if {".", "e"} & {*text} else int(text)


@functools.cache
def parser() -> OverridesParser:
    return OverridesParser.create()


@functools.cache
def without_options() -> DictConfig:
    return by_hydra("config", [], strict=False)


@functools.cache
def values_without_options() -> dict:
    return OmegaConf.to_container(without_options(), enum_to_str=True)
