"""Checks the form of data from outside, and reads JSON files of that form.

A form is a type (``float`` is any finite number, ``int`` a whole one, ``bool`` neither); None; a `Number`;
a compiled pattern, which the whole text has to match; a set of the values that are possible; ``[form]``, a
list; ``[form, form]``, a list of two; a tuple of forms, any of them; or a dictionary, which means an object:
by key, the form of its value. Keys that end in "?" may be missing, others may be there too; the key ``str``
stands for all keys. Of `Settings` all keys may be missing or null, and no others may be there.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import read_text

Form = Any


@dataclass(frozen=True)
class Number:
    """A finite number of at least ``least`` and at most ``most``."""

    least: float
    most: float = math.nextafter(math.inf, 0)  # the largest number of 64 bits
    whole: bool = False


class Settings(dict):
    """The form of an object whose keys are all optional, and the only ones."""


_FLOAT = Number(-math.nextafter(math.inf, 0))
_NAMES = {
    str: "text",
    **{int: "a whole number", float: "a finite number", bool: "true or false"},
    **{dict: "an object", list: "a list", None: "null", Real: "a number"},
}


def read_json(file: Path | str, form: Form = dict, advice: str = "") -> Any:
    """The content of a JSON file.

    Args:
        form: what it has to be.
        advice: the end of the sentence in an error, what to do about it.

    Raises:
        UsageError: the file cannot be read, is too large or no JSON, or has another form.
    """
    end = f"; {advice}" if advice else ""
    try:
        content = json.loads(read_text(file))
    except (ValueError, RecursionError):
        raise UsageError(f"{file} is not valid JSON{end}") from None
    if found := fault(content, form):
        raise UsageError(f"{file}: {found}{end}")
    return content


def check(value: Any, form: Form, where: object) -> None:
    """Raise UsageError, beginning with ``where``, if a value has not this form."""
    if found := fault(value, form):
        raise UsageError(f"{where}: {found}")


def fault(value: Any, form: Form, name: str = "") -> str | None:
    """What about ``value``, called ``name``, is not of this form; None if nothing is."""
    if isinstance(form, tuple):
        if any(fault(value, each) is None for each in form):
            return None
        kind = dict if isinstance(value, Mapping) else list
        alike = [each for each in form if isinstance(value, kind) and isinstance(each, kind)]
        return fault(value, alike[0], name) if alike else _unlike(value, form, name)
    if isinstance(form, Settings) and isinstance(value, Mapping):
        if unknown := [key for key in value if key not in form]:
            expected = " or ".join(form)
            return f"{f'{name}.{unknown[0]}'.strip('.')} is unknown; expected {expected}"
        value = {key: each for key, each in value.items() if each is not None}
        form = {f"{key}?": each for key, each in form.items()}
    if isinstance(form, dict) and isinstance(value, Mapping):
        forms = [(key, form[str]) for key in value] if str in form else []
        for key, inner in [*forms, *((k, f) for k, f in form.items() if k is not str)]:
            if not isinstance(key, str):
                return fault(key, str, f"a key of {name}")
            called = f"{name}.{key}".strip(".").removesuffix("?")
            if key.removesuffix("?") in value:
                if found := fault(value[key.removesuffix("?")], inner, called):
                    return found
            elif not key.endswith("?"):
                return f"{called} is missing"
        return None
    if isinstance(form, list) and isinstance(value, list):
        forms = form * len(value) if len(form) == 1 else form
        if len(forms) == len(value):
            found = (fault(*pair, f"{name}[{i}]") for i, pair in enumerate(zip(value, forms)))
            return next(filter(None, found), None)
    return None if _is(value, form) else _unlike(value, form, name)


def _is(value: Any, form: Form) -> bool:
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


def _unlike(value: Any, form: Form, name: str) -> str:
    given = json.dumps(value) if isinstance(value, bool | None) else repr(value)
    # What a file in YAML or JSON has without quotes may be no text.
    quotes = form is str and not isinstance(value, Mapping | list | None)
    end = ", in quotes" * quotes
    return f"{name or 'the content'} is {given:.60}; expected {_named(form)}{end}"


def _named(form: Form) -> str:
    if isinstance(form, tuple):
        return " or ".join(map(_named, form))
    if isinstance(form, re.Pattern):
        return f"text like {form.pattern}"
    if isinstance(form, Number):
        most = f" to {form.most:g}" if form.most < _FLOAT.most else ""
        return f"a {'whole ' * form.whole}number from {form.least:g}{most}"
    if isinstance(form, set):
        return " or ".join(sorted(form))
    if isinstance(form, list):
        return "a list" if len(form) == 1 else f"a list of {len(form)}"
    return _NAMES[dict if isinstance(form, dict) else form]


# Files of a run's folder that several parts read.

SCORES = {
    "checkpoint?": str,
    "generate?": str,
    "scores": {
        str: {
            "bleu": Number(0, 1000),  # a perfect one is a little above 100
            "signature": str,
            "sentences": Number(0, whole=True),
            "length_ratio?": (None, Number(0, 1e6)),
            "others?": (None, {str: [Number(-1000, 1000), str]}),  # COMET may be below 0
        }
    },
}
IDENTITY = {"method": str, "dictionary": str, "flags": {str: str}}
