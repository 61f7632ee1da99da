"""Acts on a module as soon as it has been imported, whenever that may be."""

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType

Action = Callable[[ModuleType], None]


def when_imported(name: str, action: Action) -> None:
    """Calls ``action(module)`` once ``name`` has been imported; at once if it already has been.

    Nothing is imported for it, so that waiting for torch or fairseq does not load them.
    """
    if name in sys.modules:
        action(sys.modules[name])
        return
    _WaitingFinder.actions.setdefault(name, []).append(action)
    if _WaitingFinder not in sys.meta_path:
        sys.meta_path.insert(0, _WaitingFinder)


class _WaitingFinder:
    """Lets the other finders find a module and adds the actions to the end of its loading."""

    actions: dict[str, list[Action]] = {}

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        actions = cls.actions.pop(name, None)
        if actions is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None:
            cls.actions[name] = actions
            return None
        execute = spec.loader.exec_module

        def execute_then_act(module: ModuleType) -> None:
            execute(module)
            for action in actions:
                action(module)

        spec.loader.exec_module = execute_then_act
        return spec
