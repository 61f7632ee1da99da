"""Parts by name: the gates, and what other packages add by ``@register_gate`` and the like."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any


class Registry(dict):
    """Parts of one kind by name, in the order in which they were registered."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.base: type | None = None  # of which all parts are subclasses

    def register(self, name: str) -> Callable[[Any], Any]:
        """A decorator that adds a class or function under this name.

        Raises:
            ValueError: another module has registered the name, no flag could hold it, or the part is not of
                the kind's class.
        """

        def add(part):
            if not re.fullmatch(r"[\w.-]+", name):  # it stands in lists and in NAME=NUMBER
                expected = "expected letters, digits and any of _ . -"
                raise ValueError(f"{self.kind} {name!r} of {part.__module__}: {expected}")
            if self.base and not (isinstance(part, type) and issubclass(part, self.base)):
                expected = f"expected a subclass of {self.base.__module__}.{self.base.__name__}"
                raise ValueError(f"{self.kind} {name!r} of {part.__module__}: {expected}")
            taken = self.get(name, part)
            if (taken.__module__, taken.__qualname__) != (part.__module__, part.__qualname__):
                raise ValueError(
                    f"{self.kind} {name!r} of {part.__module__}: {taken.__module__} has the name; "
                    "expected another one"
                )
            self[name] = part
            return part

        return add


GATES, BRANCHES, LOSSES = Registry("gate"), Registry("branch"), Registry("loss")
REGISTRIES = {registry.kind: registry for registry in (GATES, BRANCHES, LOSSES)}
register_gate, register_branch = GATES.register, BRANCHES.register
OURS = __name__.partition(".")[0]


def parse_numbers(text: str, known: Collection[str]) -> dict[str, float]:
    """The numbers of ``NAME=NUMBER,NAME=NUMBER``.

    Raises:
        ValueError: a name is not known, or there twice, or a number is none, or not finite; one sentence.
    """
    numbers = {}
    for item in filter(None, text.split(",")):
        name, _, number = item.partition("=")
        if name in numbers:
            raise ValueError(f"{item}: expected {name} once")
        if name not in known:
            expected = f"names of {', '.join(known)}" if known else "none"
            raise ValueError(f"{item}: expected {expected}")
        try:
            numbers[name] = float(number)
        except ValueError:
            numbers[name] = math.nan
        if not math.isfinite(numbers[name]):
            raise ValueError(f"{item}: expected a number, such as {name}=0.01")
    return numbers


def number_text(numbers: Mapping[str, float]) -> str:
    """What `parse_numbers` reads."""
    return ",".join(
        f"{name}={float(number)!r}".removesuffix(".0") for name, number in numbers.items()
    )


def plugins_of(parts: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The module of each part that is not ours, by ``KIND NAME``; plain data for a checkpoint.

    Args:
        parts: their kinds and names.
    """
    found = {part: REGISTRIES[part[0]][part[1]].__module__ for part in sorted(parts)}
    return {" ".join(p): module for p, module in found.items() if module.partition(".")[0] != OURS}


def missing_plugin(plugins: Mapping) -> str | None:
    """A sentence about the first part in a result of `plugins_of` that is not registered here."""
    for part, module in plugins.items():
        kind, _, name = str(part).partition(" ")
        if name not in REGISTRIES.get(kind, ()):
            return (
                f"its {kind} {name} is of the module {module}: name that by --user-dir (fairseq's commands), "
                "SMOE_PLUGINS (smoe) or `plugins` of a data set (recipes), or import it in Python"
            )
    return None
