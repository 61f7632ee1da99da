"""Replaces functions of fairseq as soon as their modules have been imported."""

import functools
import inspect
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

Action = Callable[[ModuleType], None]
PATCHES: list[tuple[str, Action]] = []  # (module, action on it)


def patches(place: str) -> Callable:
    """Adds the decorated function to `PATCHES`; ``place`` is that of `replaces`."""

    def add(function: Callable) -> Callable:
        PATCHES.append(_action(place, function))
        return function

    return add


def replaces(place: str) -> Callable:
    """Replaces ``MODULE:NAME`` by the decorated function (see `replace`), or calls it with ``MODULE``."""

    def add(function: Callable) -> Callable:
        when_imported(*_action(place, function))
        return function

    return add


def _action(place: str, function: Callable) -> tuple[str, Action]:
    module, _, name = place.partition(":")
    if not name:
        return module, function

    @functools.wraps(function)
    def action(loaded: ModuleType) -> None:
        replace(loaded, name, function)

    return module, action


def replace(module: ModuleType, name: str, function: Callable) -> None:
    """Replace a module's function, ``NAME`` or ``CLASS.NAME``, by ``function(original, ...)``."""
    *classes, name = name.split(".")
    owner = functools.reduce(getattr, classes, module)
    current = inspect.getattr_static(owner, name)
    bind = type(current) if isinstance(current, staticmethod | classmethod) else lambda plain: plain
    original = getattr(current, "__func__", current)

    @functools.wraps(original, updated=())
    def replaced(*arguments, **options):
        return function(original, *arguments, **options)

    setattr(owner, name, bind(replaced))


def when_imported(name: str, action: Action) -> None:
    """Call ``action(module)`` once ``name`` has been imported; now if it has been already.

    ``PACKAGE.*`` means a package and each module in it.
    """
    for module in [m for other, m in sys.modules.items() if name in (other, _pattern(other)) and m]:
        if getattr(module.__spec__, "_initializing", False):  # it is being imported
            module.__spec__.__class__ = _WatchedSpec
        else:
            action(module)
    WaitingFinder.actions.setdefault(name, []).append(action)
    if WaitingFinder not in sys.meta_path:
        sys.meta_path.insert(0, WaitingFinder)


def _pattern(name: str) -> str:
    return f"{name.partition('.')[0]}.*"


class WaitingFinder:
    """Finds modules by the other finders, for the actions at the end of their import."""

    actions: dict[str, list[Action]] = {}

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if not cls.actions.keys() & {name, _pattern(name)}:
            return None
        others = (finder for finder in sys.meta_path if finder is not cls)
        spec = next(filter(None, (each.find_spec(name, path, target) for each in others)), None)
        if spec is not None and spec.loader is not None:  # else missing, or a folder without code
            spec.__class__ = _WatchedSpec
        return spec


class _WatchedSpec(ModuleSpec):
    """Runs a module's actions when Python notes that its import has ended."""

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        module = sys.modules.get(self.name)  # missing after an error
        if name == "_initializing" and not value and module is not None:
            actions = WaitingFinder.actions
            for action in [*actions.get(self.name, ()), *actions.get(_pattern(self.name), ())]:
                action(module)
