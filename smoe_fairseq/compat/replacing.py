"""How fairseq is changed: when a module of it has been imported, and by functions in place of its own."""

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType

Action = Callable[[ModuleType], None]
PATCHES: list[tuple[str, Action]] = []  # module of fairseq, and what is done with it


def patches(place: str) -> Callable:
    """Adds the decorated function to `PATCHES`; ``place`` is as of `replaces`."""

    def add(function: Callable) -> Callable:
        PATCHES.append(_at(place, function))
        return function

    return add


def replaces(place: str) -> Callable:
    """Has the decorated function called in place of ``MODULE:NAME`` (see `replace`), or with ``MODULE``."""

    def add(function: Callable) -> Callable:
        when_imported(*_at(place, function))
        return function

    return add


def _at(place: str, function: Callable) -> tuple[str, Action]:
    module, _, name = place.partition(":")
    if not name:
        return module, function

    @functools.wraps(function)
    def action(loaded: ModuleType) -> None:
        replace(loaded, name, function)

    return module, action


def replace(module: ModuleType, name: str, function: Callable) -> None:
    """Have ``function(original, ...)`` called in place of a module's function, ``NAME`` or ``CLASS.NAME``."""
    *classes, name = name.split(".")
    owner = functools.reduce(getattr, classes, module)
    found = inspect.getattr_static(owner, name)
    bind = type(found) if isinstance(found, staticmethod | classmethod) else lambda plain: plain
    original = getattr(found, "__func__", found)

    @functools.wraps(original, updated=())
    def replaced(*arguments, **options):
        return function(original, *arguments, **options)

    setattr(owner, name, bind(replaced))


def when_imported(name: str, action: Action) -> None:
    """Call ``action(module)`` once ``name`` has been imported; at once if it already has been.

    ``PACKAGE.*`` stands for a package and each module in it. It imports nothing itself.
    """
    for module in [m for other, m in sys.modules.items() if name in (other, _whole(other)) and m]:
        action(module)
    _WaitingFinder.actions.setdefault(name, []).append(action)
    if _WaitingFinder not in sys.meta_path:
        sys.meta_path.insert(0, _WaitingFinder)


def _whole(name: str) -> str:
    return f"{name.partition('.')[0]}.*"


class _WaitingFinder:
    """Leaves finding to the other finders, and adds the actions to the end of a module's loading."""

    actions: dict[str, list[Action]] = {}

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        actions = [*cls.actions.get(name, ()), *cls.actions.get(_whole(name), ())]
        if not actions:
            return None
        others = (finder for finder in sys.meta_path if finder is not cls)
        spec = next(filter(None, (each.find_spec(name, path, target) for each in others)), None)
        if spec is None or spec.loader is None:  # missing, or a folder without code
            return spec
        execute = spec.loader.exec_module

        def execute_then_act(module: ModuleType) -> None:
            execute(module)
            for action in actions:
                action(module)

        spec.loader.exec_module = execute_then_act
        return spec
