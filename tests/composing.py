"""fairseq's options, read sooner: hydra composes the parts that were chosen once per process.

For a command it takes a third of a second, which is most of a short run's time. Of a later command with the
same task, model, optimizer, ..., the settings that differ are applied, as hydra does it.
"""

import copy
import functools
from pathlib import Path

import fairseq.dataclass.utils as dataclass_utils
import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser

composed = {}  # by what was chosen: the config, and its settings {name: "name=value"}


class Later:
    """In place of `hydra.initialize`, which takes long too: `compose` does it where it has to."""

    def __init__(self, config_path: str):
        pass

    def __enter__(self):
        pass

    def __exit__(self, *error):
        pass


def compose(name: str, overrides: list[str], strict: bool):
    """As hydra's; a later call changes the config that it returned."""
    settings = {word.partition("=")[0]: word for word in overrides}
    chosen = tuple(word for setting, word in settings.items() if "." not in setting)
    config, known = composed.pop(chosen, (None, {}))
    if known.keys() == settings.keys():
        words = [word for setting, word in settings.items() if known[setting] != word]
        new = OverridesParser.create().parse_overrides(words)
        ConfigLoaderImpl._apply_overrides_to_config(new, config)
    else:
        folder = Path(dataclass_utils.__file__).parents[1] / "config"
        with hydra.initialize_config_dir(str(folder)):
            config = hydra.compose(name, overrides=overrides, strict=strict)
    composed[chosen] = config, settings
    return config


def begin() -> None:
    parse_once = functools.cache(OverridesParser.create().parse_rule)
    OverridesParser.parse_rule = lambda self, *words: copy.copy(parse_once(*words))
    dataclass_utils.initialize, dataclass_utils.compose = Later, compose
