"""What a data set's file may hold: names and types of all values, checked before any work."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smoe_fairseq.errors import UsageError

# A rule is a type (or a tuple of types), a list with the rule of its values, a set of the values that are
# possible, or a mapping with the rule for each key; `ANY` stands for all other keys. None: anything.
ANY = "*"
_NUMBER = (int, float)
_SHARE = {"share": _NUMBER, "most": int}
_SPLITS = {"train": str, "valid": str, "test": str}
_DROP = {"drop", "keep"}
SCHEMA: dict[str, Any] = {
    "base": str,
    "pairs": None,  # `load_dataset` checks it
    "experts": None,
    "shards": int,
    "batch": {ANY: int},
    "precision": str,
    "raw": {
        "builtin": str,
        "url": str,
        "sha256": {ANY: str},
        "files": None,  # a pattern, or one for each split
        "splits": _SPLITS,
        "split": {"lines", "hash"},
        "codes": {ANY: str},
        "archives": [{"url": str, "file": str, "size": int, "sha256": str}],
        "parallel": {"test": int, "valid": int},
        "binarised": {"text": str, "test": str, "vocabulary": str},
        "messages": {"layout": str, "words": int, "valid": _SHARE, "test": _SHARE},
    },
    "source": {"datasets": str, "config": str, "splits": _SPLITS, "sacrebleu": str},
    "clean": {
        **{"repeated": _DROP, "equal": _DROP, "overlap": _DROP},
        **{"max-ratio": _NUMBER, "max-words": _NUMBER},
    },
    "subwords": {ANY: None},
    "task": {ANY: None},
    "train": {ANY: None},
    "generate": {ANY: None},
    "validate": {
        **{"metric": {"chrf", "bleu"}, "sentences": int, "every": int},
        **{"patience": int, "beam": int},
    },
    "checkpoint": str,
    "sacrebleu": {ANY: None},
    "study": [str],
    "methods": {ANY: None},
    "margins": {ANY: None},
    "statements": {ANY: None},
    "classes": {ANY: [str]},
}


def check(path: Path, content: Mapping[str, Any], rule: Any = SCHEMA, above: str = "") -> None:
    """Raise UsageError unless the content of a file is as the rule says; values of null are left out."""
    for key, value in content.items():
        place = f"{above}.{key}" if above else str(key)
        own = rule.get(key, rule.get(ANY, UsageError))
        if not isinstance(key, str):
            raise UsageError(f"{path}: `{above}` has the key {_misread(key)}")
        if own is UsageError:
            expected = f"expected one of {', '.join(sorted(rule))}"
            where = f" below `{above}`" if above else ""
            raise UsageError(f"{path}: unknown key `{key}`{where}: {expected}")
        if value is not None:
            _check_value(path, value, own, place)


def _check_value(path: Path, value: Any, rule: Any, place: str) -> None:
    if rule is None:
        return
    if isinstance(rule, dict):
        if not isinstance(value, dict):
            raise UsageError(f"{path}: `{place}` has to hold keys and values such as `lr: 0.001`")
        check(path, value, rule, place)
    elif isinstance(rule, list):
        if not isinstance(value, list):
            raise UsageError(f"{path}: `{place}` is {value!r}: expected a list such as [a, b]")
        for each in value:
            _check_value(path, each, rule[0], place)
    elif isinstance(rule, set):
        if value not in rule:
            raise UsageError(
                f"{path}: `{place}` is {value!r}: expected {' or '.join(sorted(rule))}"
            )
    elif rule is str and not isinstance(value, str):
        raise UsageError(f"{path}: `{place}` has {_misread(value)}")
    elif not isinstance(value, rule) or isinstance(value, bool):
        kind = "a whole number" if rule is int else "a number"
        raise UsageError(f"{path}: `{place}` is {value!r}: expected {kind}")


def _misread(value: Any) -> str:
    """What YAML made of a word without quotes, and how to write it."""
    if isinstance(value, bool):
        word = "yes" if value else "no"
        others = "yes, on and true" if value else "no, off and false"
        return f"{str(value).lower()}, as YAML reads {others}: write a name in quotes, such as '{word}'"
    if isinstance(value, (int, float)):
        return f"the number {value}: write a name in quotes, such as '{value}'"
    return f"{value!r}: expected a name"
