"""Parts by name: the gates, and what other packages add by ``@register_gate`` and the like."""

from collections.abc import Callable
from typing import Any


class Registry(dict):
    """Parts of one kind by name, in the order in which they were registered."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind

    def register(self, name: str) -> Callable[[Any], Any]:
        """A decorator that adds a class or function under this name.

        Raises:
            ValueError: another module has registered the name.
        """

        def add(part):
            taken = self.get(name, part)
            if (taken.__module__, taken.__qualname__) != (part.__module__, part.__qualname__):
                raise ValueError(
                    f"{self.kind} {name!r} of {part.__module__}: {taken.__module__} has the name; "
                    "expected another one"
                )
            self[name] = part
            return part

        return add


GATES = Registry("gate")
register_gate = GATES.register
