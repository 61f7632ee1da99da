"""Checks the form of external data, and reads JSON files of a form.

A form is one of:

- a type: ``float`` is any finite number, ``int`` a whole one; a ``bool`` is neither; or None, or a `Number`;
- a compiled pattern that matches the whole text, perhaps with a comment ``(?#...)`` at its beginning that
  says in words what it matches; or a set of the possible texts;
- ``[form]``, a list, or ``[form, form]``, a list of two;
- a tuple of alternative forms;
- a dictionary from the keys of an object to the forms of their values. Keys that end in "?" are optional,
  further keys are allowed, and the key ``str``, or a compiled pattern, stands for all keys;
- `Settings`, an object whose keys are all optional and may be null; further keys are not allowed.
"""

import json
import math
import re
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from smoe_fairseq.errors import UsageError, nearest
from smoe_fairseq.files import read_text

Form = Any


@dataclass(frozen=True)
class Number:
    """A finite number of at least ``least`` and at most ``most``."""

    least: float
    most: float = math.nextafter(math.inf, 0)  # the largest number of 64 bits
    whole: bool = False


class Settings(dict):
    """The form of an object whose keys are all optional; further keys are not allowed."""


_FLOAT = Number(-math.nextafter(math.inf, 0))
_NAMES = {
    str: "text",
    **{int: "a whole number", float: "a finite number", bool: "true or false"},
    **{dict: "an object", list: "a list", None: "null", Real: "a number"},
}


def read_json(file: Path | str, form: Form = dict, advice: str = "") -> Any:
    """The content of a JSON file.

    Args:
        form: of the content.
        advice: ends the error message; what to do.

    Raises:
        UsageError: the file cannot be read, is too large or not JSON, or has another form.
    """
    end = f"; {advice}" if advice else ""
    try:
        content = json.loads(read_text(file).removeprefix("\ufeff"))  # of Windows' editors
    except (ValueError, RecursionError):
        raise UsageError(f"{file} is not valid JSON{end}") from None
    if message := fault(content, form):
        raise UsageError(f"{file}: {message}{end}")
    return content


def check(value: Any, form: Form, where: object) -> None:
    """Raise UsageError, beginning with ``where``, unless a value has this form."""
    if message := fault(value, form):
        raise UsageError(f"{where}: {message}")


def fault(value: Any, form: Form, name: str = "") -> str | None:
    """A message on how ``value``, called ``name``, differs from the form; None if it has the form."""
    if isinstance(form, tuple):
        if any(fault(value, each) is None for each in form):
            return None
        kind = dict if isinstance(value, Mapping) else list
        alike = [each for each in form if isinstance(value, kind) and isinstance(each, kind)]
        return fault(value, alike[0], name) if alike else _mismatch(value, form, name)
    if isinstance(form, Settings) and isinstance(value, Mapping):
        if unknown := [key for key in value if key not in form]:
            called = f"{name}.{unknown[0]}".strip(".")
            return f"{called} is unknown; {choice(str(unknown[0]), form)}"
        value = {key: each for key, each in value.items() if each is not None}
        form = {f"{key}?": each for key, each in form.items()}
    if isinstance(form, dict) and isinstance(value, Mapping):
        every = next((key for key in form if not isinstance(key, str)), None)
        for key in value if every else ():
            if message := fault(key, every, f"a key of {name}"):
                return message
        forms = [(key, form[every]) for key in value] if every else []
        for key, inner in [*forms, *((k, f) for k, f in form.items() if k is not every)]:
            called = f"{name}.{key}".strip(".").removesuffix("?")
            if key.removesuffix("?") in value:
                if message := fault(value[key.removesuffix("?")], inner, called):
                    return message
            elif not key.endswith("?"):
                return f"{called} is missing"
        return None
    if isinstance(form, list) and isinstance(value, list):
        forms = form * len(value) if len(form) == 1 else form
        if len(forms) == len(value):
            faults = (fault(*pair, f"{name}[{i}]") for i, pair in enumerate(zip(value, forms)))
            return next(filter(None, faults), None)
    return None if _matches(value, form) else _mismatch(value, form, name)


def choice(name: str, known: Iterable[str]) -> str:
    """What to write in place of an unknown name, for an error message; ``A-B-...`` stands for sizes."""
    names = {
        each.replace("A-B-...", name.lstrip(string.ascii_letters + "-")): each for each in known
    }
    near = names.get(nearest(name, names, 0.6))
    return f"did you mean {near}? " * bool(near) + f"choose one of {', '.join(known)}"


def _matches(value: Any, form: Form) -> bool:
    if isinstance(form, re.Pattern):
        return isinstance(value, str) and form.fullmatch(value) is not None
    if isinstance(form, set):
        return isinstance(value, str) and value in form
    form = _FLOAT if form is float else form
    if isinstance(form, Number):
        kinds = (int,) if form.whole else (int, float)
        return type(value) in kinds and form.least <= value <= form.most
    if form is int:
        return type(value) is int
    return value is None if form is None else isinstance(form, type) and isinstance(value, form)


def _mismatch(value: Any, form: Form, name: str) -> str:
    shown = json.dumps(value) if isinstance(value, bool | None) else repr(value)
    # Without quotes, YAML and JSON read some text as a number or as true or false.
    quotes = form is str and not isinstance(value, Mapping | list | None)
    end = ", in quotes" * quotes
    return f"{name or 'the content'} is {shown:.60}; expected {_describe(form)}{end}"


def _describe(form: Form) -> str:
    if isinstance(form, tuple):
        return " or ".join(map(_describe, form))
    if isinstance(form, re.Pattern):
        words = re.match(r"\(\?#(.*?)\)", form.pattern)
        return words[1] if words else f"text like {form.pattern}"
    if isinstance(form, Number):
        most = f" to {form.most:g}" if form.most < _FLOAT.most else ""
        return f"a {'whole ' * form.whole}number from {form.least:g}{most}"
    if isinstance(form, set):
        return " or ".join(sorted(form))
    if isinstance(form, list):
        return "a list" if len(form) == 1 else f"a list of {len(form)}"
    return _NAMES[dict if isinstance(form, dict) else form]


# Files in the folder of a run.

SCORES = {
    "checkpoint?": str,
    # Fingerprints of the checkpoint, or of those that it was made of, by name.
    "contents?": {str: str},
    "generate?": str,
    "scores": {
        str: {
            "bleu": Number(0, 1000),  # rounding errors can exceed 100
            "signature": str,
            "sentences": Number(0, whole=True),
            "length_ratio?": (None, Number(0, 1e6)),
            "others?": (None, {str: [Number(-1e300, 1e300), str]}),  # on their own scales
            "test_checksum?": (None, str),
            "checksum?": (None, str),
        }
    },
}
IDENTITY = {"method": str, "dictionary": str, "flags": {str: str}}
