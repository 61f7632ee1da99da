"""Replaces functions of fairseq as soon as their modules have been imported."""

import functools
import inspect
import sys
from collections.abc import Callable
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
        if not getattr(module.__spec__, "_initializing", False):  # else the finder does, at the end
            action(module)
    _WaitingFinder.actions.setdefault(name, []).append(action)
    if _WaitingFinder not in sys.meta_path:
        sys.meta_path.insert(0, _WaitingFinder)


def _pattern(name: str) -> str:
    return f"{name.partition('.')[0]}.*"


class _WaitingFinder:
    """Finds modules by the other finders, and runs the actions at the end of a module's loading."""

    actions: dict[str, list[Action]] = {}

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if not cls.actions.keys() & {name, _pattern(name)}:
            return None
        others = (finder for finder in sys.meta_path if finder is not cls)
        spec = next(filter(None, (each.find_spec(name, path, target) for each in others)), None)
        if spec is None or spec.loader is None:  # missing, or a folder without code
            return spec
        execute = spec.loader.exec_module

        def execute_then_act(module: ModuleType) -> None:
            execute(module)
            for action in [*cls.actions.get(name, ()), *cls.actions.get(_pattern(name), ())]:
                action(module)

        spec.loader.exec_module = execute_then_act
        return spec
