"""The YAML files in ``configs/``: where they are, their form, and reading them."""

import copy
import functools
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import read_text
from smoe_fairseq.forms import Number, Settings, check, choice
from smoe_fairseq.plugins import import_plugin

_FAMILY = re.compile(r"(?P<family>.+?)-(?P<strata>((0|[1-9]\d*)-)*[1-9]\d*)")


def method_file(name: str, configs: Path) -> tuple[Path, str]:
    """The file of a method, and the sizes in its name if it is of a family; raises UsageError without one."""
    found = (configs / "methods").glob("*.yaml")
    files = {path.stem: path for path in sorted(found, key=lambda path: path.stem)}

    def is_family(stem: str) -> bool:
        return re.search(r"\{(strata|layers)\}", read_text(files[stem])) is not None

    if name in files and not is_family(name):
        return files[name], ""
    match = _FAMILY.fullmatch(name)
    if match and match["family"] in files and is_family(match["family"]):
        return files[match["family"]], match["strata"]
    known = [f"{stem}-A-B-..." if is_family(stem) else stem for stem in files]
    raise UsageError(f"unknown method {name!r}: {choice(name, known)}")


def import_plugins_of(content: Mapping, configs: Path) -> None:
    """Import the ``plugins`` of a file, which are below the folder of the configs, or modules."""
    for name in content.get("plugins", ()):
        path = configs / name
        import_plugin(str(path) if path.exists() else name)


def _names(*words: str) -> re.Pattern:
    """A pattern of file names, in which ``{word}`` is a placeholder for each of ``words``."""
    like = f"(?#a file's name, in which {', '.join(f'{{{word}}}' for word in words)} may stand)"
    return re.compile(rf"{like}([^{{}}]|\{{({'|'.join(words)})\}})+")


CHECKPOINT = re.compile(r"(?#best, last or average:N)best|last|average:[1-9][0-9]*")  # of a run
_COUNT = Number(1, whole=True)
_SHARE = Settings(share=Number(0, 1), most=_COUNT)
_SPLITS = Settings(train=str, valid=str, test=str)
# Of a publisher's files.
_NAME = _names("split", "pair", "first", "second", "sorted", "language", "code")
_DROP = {"drop", "keep"}
# Flags of a program: a word, several, or none (`true`: the bare flag; `false`: not at all).
_WORD = (float, str)
_FLAGS = {re.compile(r"(?#a flag's name without --)[A-Za-z][\w-]*"): (None, bool, *_WORD, [_WORD])}
_TRAINING_FLAGS = {
    **_FLAGS,
    **{f"{name}?": (None, _COUNT) for name in ("max-tokens", "batch-size", "max-update")},
    **{f"max-{side}-positions?": (None, _COUNT) for side in ("source", "target")},
    "update-freq?": (None, _COUNT, re.compile(r"(?#text such as 2,1)\[?\d+(, ?\d+)*\]?"), [_COUNT]),
    "seed?": (None, Number(0, 2**31 - 1, whole=True)),
    "lr?": (None, Number(0), str, list),
}
# The form of a data set's file.
SCHEMA: dict[str, Any] = {
    "base": str,
    "plugins": [str],
    "pairs": [str],
    "pretrained": str,
    "languages": {str: str},
    "new-languages": {str: Settings(like=str)},
    "add-subwords": _COUNT,
    "trim": bool,
    "keep": [str],
    "one-way": bool,
    "experts": _COUNT,
    "shards": Number(1, 1000, whole=True),  # whose files are all open at once
    "batch": {str: _COUNT},
    "precision": str,
    "raw": Settings(
        builtin=str,
        url=_names("file"),
        sha256={str: str},
        files=(_NAME, Settings(train=_NAME, valid=_NAME, test=_NAME)),
        splits=_SPLITS,
        split={"lines", "hash"},
        codes={str: str},
        archives=[Settings(url=str, file=str, size=int, sha256=str)],
        parallel=Settings(test=_COUNT, valid=_COUNT),
        binarised=Settings(text=str, test=_names("pair", "language"), vocabulary=str),
        messages=Settings(layout=_names("language"), words=int, valid=_SHARE, test=_SHARE),
    ),
    "source": Settings(datasets=str, config=str, splits=_SPLITS, sacrebleu=str),
    "clean": Settings(
        {"max-ratio": Number(1), "max-words": Number(1)},
        empty=_DROP,
        repeated=_DROP,
        equal=_DROP,
        overlap=_DROP | {"drop-all"},
        quotes={"strip", "keep"},
    ),
    "subwords": _FLAGS,
    "task": _FLAGS,
    "train": _TRAINING_FLAGS,
    "generate": _FLAGS,
    "validate": Settings(
        {name: _COUNT for name in ("sentences", "every", "patience", "beam")},
        metric={"chrf", "bleu", "ter", "loss"},
    ),
    "checkpoint": CHECKPOINT,
    "sacrebleu": {**_FLAGS, "width?": (None, _COUNT)},
    "metrics": {
        re.compile(
            r"(?#a name of letters, digits, + and - that sacreBLEU and COMET have not)"
            r"(?i:(?!(?:(?:sp)?bleu|chrf2?(?:\+\+)?|ter|comet)$))[\w+-]+"
        ): (None, str)
    },
    "study": [str],
    "methods": {str: _TRAINING_FLAGS},
    "parts": [str],
    "margins": Settings({name: Number(0) for name in ("loss", "chrF++", "BLEU", "kept loss")}),
    "statements": {str: (None, [str, str])},
    "classes": {str: (None, [str])},
}
# The keys that are required after merging a file with its bases.
_SPLIT = {"share": float, "most": int}
REQUIRED = {
    "shards": int,
    "precision": str,
    "checkpoint": str,
    "subwords": {"vocab-size": int},
    "raw": {
        "archives?": [{"url": str}],
        "files?": (str, {"train": str, "valid": str, "test": str}),
        "messages?": {"layout": str, "words": int, "valid": _SPLIT, "test": _SPLIT},
        "binarised?": {"text": str, "test": str, "vocabulary": str},
        "parallel": {"valid": int, "test": int},
    },
}


# What YAML 1.1 reads as numbers to the bases 8 and 60: 0100 is 64, and 1:30 is 90.
_ODD = re.compile(r"[-+]?0[0-7_]+|[-+]?[1-9][\d_]*(:[0-5]?\d)+")


def read(path: Path, keys: Collection[str]) -> dict[str, Any]:
    """The content of a YAML file; keys without a value are left out.

    Raises UsageError if it cannot be read, is no YAML, does not match `SCHEMA`, or has a key not in ``keys``.
    """
    content = copy.deepcopy(_parsed(path, read_text(path)))
    check(content, Settings({key: SCHEMA[key] for key in keys}), path)
    return {key: value for key, value in content.items() if value is not None}


@functools.cache  # a command asks for sections of the same files many times
def _parsed(path: Path, text: str) -> dict[str, Any]:
    try:
        if not isinstance(yaml.compose(text), yaml.MappingNode | None):
            raise UsageError(f"{path}: expected keys and values such as `pairs: [eng-nso]`")
        for token in yaml.scan(text):
            if not isinstance(token, yaml.ScalarToken):
                continue
            line = f"{path}, line {token.start_mark.line + 1}"
            if token.plain and _ODD.fullmatch(token.value):
                raise UsageError(f"{line}: {token.value}: expected no leading 0, or quotes")
            # OmegaConf takes ??? for a value that is missing; no program takes a null byte.
            if token.value == "???" or "\0" in token.value:
                raise UsageError(f"{line}: {token.value!r}: expected another value")
        return OmegaConf.to_container(OmegaConf.create(text))
    except (yaml.YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise UsageError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
