"""The recipes' settings: flags, the data sets and methods in ``configs/``, and the paper's tables."""

import contextlib
import math
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import read_text
from smoe_fairseq.flags import refusing_flags
from smoe_fairseq.forms import Number, Settings, check

Flags = dict[str, Any]
FAIRSEQ_POSITIONS = 1024  # the default of --max-source-positions and --max-target-positions
MAX_VALUES = 100_000  # of a YAML file, whose nested aliases can expand to gigabytes


def arguments(flags: Flags) -> list[str]:
    """Flags as command-line words: ``true`` gives the bare flag, ``false`` and null give nothing."""
    words: list[str] = []
    for key, value in flags.items():
        if value is None or value is False:
            continue
        words.append(f"--{key}")
        if value is not True:
            words += map(str, value if isinstance(value, list) else [value])
    return words


def parse_flags(program: str, words: Sequence[str]) -> DictConfig:
    """fairseq's config of command-line words; raises UsageError for an unknown flag or an invalid value."""
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    import smoe_fairseq.models.transformer  # noqa: F401  (registers the architectures)
    from smoe_fairseq.compat.option_values import check_options

    training = program == "fairseq-train"
    parser = options.get_training_parser() if training else options.get_generation_parser()
    parser.prog = program
    if not training:
        parser.add_argument("--arch", "-a", default="wav2vec2")  # as fairseq-generate does
    parser.words = list(words)
    with refusing_flags():
        args = options.parse_args_and_arch(parser, parser.words)
        cfg = convert_namespace_to_omegaconf(args)
    check_options(cfg)
    return cfg


# Flags of fairseq-generate that the recipe for evaluation sets.
RECIPE_FLAGS = {
    *("path", "results-path", "gen-subset", "num-shards", "shard-id"),
    *("source-lang", "target-lang", "langs", "lang-pairs"),
}
_OTHER_NAMES = {
    **{"-a": "--arch", "-s": "--source-lang", "-t": "--target-lang"},
    **{"--max-sentences": "--batch-size", "--learning-rate": "--lr"},
    "--relu-dropout": "--activation-dropout",
}


def flag_values(words: Sequence[str]) -> dict[str, str]:
    """The flags among command-line words, each with its last value; several words make one string."""
    flags: dict[str, list[str]] = {}
    values: list[str] = []  # words before the first flag are dropped
    for word in words:
        if word[:1] == "-" and not is_number(word):
            name, equals, value = word.partition("=")
            name = _OTHER_NAMES.get(name, name)
            flags.pop(name, None)
            values = flags[name] = [value] if equals else []
        else:
            values.append(word)
    return {name: " ".join(values) for name, values in flags.items()}


def is_number(word: str) -> bool:
    """Whether a word is a number: a negative one is a value, not a flag."""
    try:
        float(word)
    except ValueError:
        return False
    return True


def config_folder() -> Path:
    """``CONFIG_DIR``; by default ``configs`` of the installed package, or of the checkout."""
    if variable := os.environ.get("CONFIG_DIR"):
        folder = Path(variable)
    else:
        # Next to an installed package, a folder ``configs`` is not ours.
        installed = Path(__file__).parent / "configs"
        checkout = Path(__file__).parents[2] / "configs"
        folder = installed if installed.is_dir() else checkout
    if not (folder / "datasets").is_dir():
        advice = "set CONFIG_DIR to the folder with datasets/ and methods/"
        raise UsageError(f"{folder} holds no recipes: {advice}")
    return folder


def _names(*words: str) -> re.Pattern:
    """A pattern of file names, in which ``{word}`` is a placeholder for each of ``words``."""
    return re.compile(rf"([^{{}}]|\{{({'|'.join(words)})\}})+")


CHECKPOINT = re.compile(r"best|last|average:[1-9][0-9]*")  # of a run
_COUNT = Number(1, whole=True)
_SHARE = Settings(share=Number(0, 1), most=_COUNT)
_SPLITS = Settings(train=str, valid=str, test=str)
_NAME = _names("split", "pair", "sorted", "language", "code")  # of a publisher's files
_DROP = {"drop", "keep"}
# Flags of a program: a word, several, or none (`true`: the bare flag; `false`: not at all).
_WORD = (float, str)
_FLAGS = {re.compile(r"[A-Za-z][\w-]*"): (None, bool, *_WORD, [_WORD])}
_TRAINING_FLAGS = {
    **_FLAGS,
    **{f"{name}?": (None, _COUNT) for name in ("max-tokens", "batch-size", "max-update")},
    **{f"max-{side}-positions?": (None, _COUNT) for side in ("source", "target")},
    "update-freq?": (None, _COUNT, re.compile(r"\[?\d+(, ?\d+)*\]?"), [_COUNT]),
    "seed?": (None, Number(0, 2**31 - 1, whole=True)),
    "lr?": (None, Number(0), str, list),
}
# The form of a data set's file.
SCHEMA: dict[str, Any] = {
    "base": str,
    "pairs": [str],
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
        repeated=_DROP,
        equal=_DROP,
        overlap=_DROP | {"drop-all"},
    ),
    "subwords": _FLAGS,
    "task": _FLAGS,
    "train": _TRAINING_FLAGS,
    "generate": _FLAGS,
    "validate": Settings(
        {name: _COUNT for name in ("sentences", "every", "patience", "beam")},
        metric={"chrf", "bleu"},
    ),
    "checkpoint": CHECKPOINT,
    "sacrebleu": {**_FLAGS, "width?": (None, _COUNT)},
    "study": [str],
    "methods": {str: _TRAINING_FLAGS},
    "margins": Settings({name: Number(0) for name in ("loss", "chrF++", "BLEU")}),
    "statements": {str: [str, str]},
    "classes": {str: [str]},
}
# The keys that are required after merging a file with its bases.
_SPLIT = {"share": float, "most": int}
_REQUIRED = {
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

    Raises:
        UsageError: the file cannot be read, is not YAML, does not match `SCHEMA`, or has a key that is not
            in ``keys``.
    """
    text = read_text(path)
    try:
        node = yaml.compose(text)
        if not isinstance(node, yaml.MappingNode | None):
            raise UsageError(f"{path}: expected keys and values such as `pairs: [eng-nso]`")
        if (values := _count_values(node, {})) > MAX_VALUES:
            count = f"{values:,} values, with what its aliases repeat"
            raise UsageError(f"{path} has {count}: expected at most {MAX_VALUES:,}")
        for token in yaml.scan(text):
            if not isinstance(token, yaml.ScalarToken):
                continue
            line = f"{path}, line {token.start_mark.line + 1}"
            if token.plain and _ODD.fullmatch(token.value):
                expected = "expected a number without leading 0, or text in quotes"
                raise UsageError(f"{line}: {token.value}: {expected}")
            # OmegaConf takes ??? for a value that is missing; no program takes a null byte.
            if token.value == "???" or "\0" in token.value:
                raise UsageError(f"{line}: {token.value!r}: expected another value")
        content = OmegaConf.to_container(OmegaConf.create(text))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise UsageError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    check(content, Settings({key: SCHEMA[key] for key in keys}), path)
    return {key: value for key, value in content.items() if value is not None}


def _count_values(node: yaml.Node | None, known: dict[int, float]) -> float:
    """The number of values in a part of a YAML file, with aliases expanded."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        known[id(node)] = math.inf  # if it contains itself
        parts = node.value
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        known[id(node)] = 1 + sum(_count_values(part, known) for part in parts)
    return known[id(node)]


@dataclass(frozen=True)
class Dataset:
    """A file of ``configs/datasets`` merged over ``configs/common.yaml``, which explains the keys."""

    name: str
    pairs: tuple[str, ...]
    experts: int | None
    shards: int
    batch: dict[str, int]
    precision: str
    raw: dict[str, Any]
    source: dict[str, Any]
    clean: dict[str, Any]
    subwords: dict[str, Any]
    task: Flags
    train: Flags
    generate: Flags
    validate: dict[str, Any]
    checkpoint: str
    sacrebleu: Flags
    study: list[str]
    methods: dict[str, Flags]
    margins: dict[str, float]
    statements: dict[str, list[str]]
    classes: dict[str, list[str]]

    @property
    def languages(self) -> tuple[str, ...]:
        """All languages in order of appearance, which is the order of their tokens."""
        return tuple(dict.fromkeys(lang for pair in self.pairs for lang in pair.split("-")))

    @property
    def directions(self) -> tuple[str, ...]:
        """``source-target`` in the paper's order: first into the first language, then out of it."""
        return tuple(both_orders(pair)[1] for pair in self.pairs) + self.pairs

    @property
    def hub(self) -> str:
        """The language of most pairs, such as English: the first such one."""
        return Counter("-".join(self.pairs).split("-")).most_common(1)[0][0]

    def pair_of(self, direction: str) -> str:
        """The pair whose files contain a direction's text."""
        return next(pair for pair in both_orders(direction) if pair in self.pairs)


def both_orders(pair: str) -> tuple[str, str]:
    """A pair and its reverse: ``en-de`` and ``de-en``."""
    return pair, "-".join(reversed(pair.split("-")))


_KINDS = ("--arch", "--task", "--criterion", "--optimizer", "--lr-scheduler")


@contextlib.contextmanager
def naming_settings(
    dataset: Dataset, sections: Sequence[str], typed: Sequence[str] = ()
) -> Iterator[None]:
    """Add file and setting to an error about a flag that a section sets and the user did not type."""
    try:
        yield
    except UsageError as error:
        unknown = re.match(r"unrecognized arguments: ([^\s;]+)", str(error))
        named = re.search(r"--([\w-]+)", str(error))
        values = flag_values(typed)
        kinds = [f"{kind} {values[kind]}" for kind in _KINDS if unknown and kind in values]
        message = ": ".join([*kinds, str(error)])  # each kind has flags of its own
        for section in sections:
            settings = _section(vars(dataset), section)
            lists = {f: list(map(str, x)) for f, x in settings.items() if isinstance(x, list)}
            split = next((f for f, x in lists.items() if unknown and unknown[1] in x), None)
            flag = split or named and named[1]
            if flag not in settings or f"--{flag}" in values:
                continue
            file = dataset_file(dataset.name)
            while file.stem != "common":
                own = read(file, SCHEMA)
                if flag in _section(own, section):
                    break
                file = config_folder() / f"{own.get('base', 'common')}.yaml"
            advice = f" (`{flag}: false` leaves --{flag} out)" if unknown else ""
            if split:
                one_word = f"({', '.join(lists[split])})"
                advice = f" (a list is several words; one is `{flag}: '{one_word}'`)"
            raise UsageError(f"{file}: `{section}.{flag}`: {message}{advice}") from None
        if kinds:
            raise UsageError(message) from None
        raise


def _section(content: Mapping, section: str) -> Mapping:
    """A section such as ``train`` or ``methods.moe``; empty if it is missing."""
    for key in section.split("."):
        content = content.get(key) or {}
    return content


def dataset_file(name: str) -> Path:
    """The file of a data set."""
    return config_folder() / "datasets" / f"{name}.yaml"


def load_dataset(name: str) -> Dataset:
    """Read ``configs/datasets/NAME.yaml``; raises UsageError for an unknown name or key."""
    path = dataset_file(name)
    # The recipe's steps would parse a name that starts with a dash as a flag.
    files = (config_folder() / "datasets").glob("*.yaml")
    known = sorted(file.stem for file in files if file.stem[0] != "-")
    if name not in known:
        known = ", ".join(known)
        raise UsageError(f"unknown dataset {name!r}, as {path} is missing: choose one of {known}")
    empty = {key: type(form)() for key, form in SCHEMA.items() if isinstance(form, dict | list)}
    merged = empty | OmegaConf.to_container(_merge_bases(path))
    pairs = merged.get("pairs")
    if not pairs or not all(map(_is_pair, pairs)):
        value = pairs or "missing"
        expected = (
            "expected a list such as [en-de, eng-fra], of two different codes without hyphens"
        )
        raise UsageError(f"{path}: `pairs` is {value}: {expected} (docs/recipes.md)")
    check(merged, _REQUIRED, path)
    if twice := [pair for n, pair in enumerate(pairs) if {*both_orders(pair)} & {*pairs[:n]}]:
        raise UsageError(f"{path}: `pairs` has {twice[0]} twice: one entry makes both directions")
    known_languages = {language for pair in pairs for language in pair.split("-")}
    for key, languages in merged["classes"].items():
        if others := sorted(set(languages) - known_languages):
            raise UsageError(f"{path}: `classes.{key}` has {others[0]}, which none of `pairs` has")
    statements = {f"statements.{each}": both for each, both in merged["statements"].items()}
    for statement, (first, second) in statements.items():
        if first == second:
            raise UsageError(f"{path}: `{statement}` compares {first} with itself")
    named = {"study": merged["study"], "methods": merged["methods"], **statements}
    for key, methods in named.items():
        for method in methods:
            try:
                _method_file(method)
            except UsageError as error:
                raise UsageError(f"{path}: `{key}`: {error}") from None
    for key in RECIPE_FLAGS & merged["generate"].keys():
        raise UsageError(f"{path}: `generate.{key}` is set by the recipe")
    values = {key: merged.get(key) for key in SCHEMA if key != "base"}
    return Dataset(name=name, **(values | {"pairs": tuple(pairs)}))


def _is_pair(name: str) -> bool:
    """Whether a name consists of two languages."""
    match = re.fullmatch(r"([^-\s/]+)-([^-\s/]+)", name)
    return match is not None and match[1] != match[2]


def _merge_bases(path: Path, derived: tuple[Path, ...] = ()) -> DictConfig | dict:
    """Merge a file over its ``base``, and so on to ``common``; ``derived`` are the files based on it."""
    own = read(path, SCHEMA)
    base = own.pop("base", "common")
    if path.stem == "common":
        return own
    below = config_folder() / f"{base}.yaml"
    derived += (path.resolve(),)
    if below.resolve() in derived:
        raise UsageError(f"{path}: its `base` {base} stands on it in turn")
    if not below.exists():
        raise UsageError(f"{path}: its `base` {base!r}: {below} is missing")
    return OmegaConf.merge(_merge_bases(below, derived), own)


MOE_FREQ = 2  # every second layer is an MoE layer, unless the data set sets moe-freq
_FAMILY = re.compile(r"(?P<family>.+?)-(?P<strata>((0|[1-9]\d*)-)*[1-9]\d*)")


def method_flags(name: str, dataset: Dataset) -> Flags:
    """The training flags of a method, from ``NAME.yaml``, or for ``FAMILY-4-12`` from ``FAMILY.yaml``.

    In these files ``{experts}`` stands for the data set's number of experts, and ``{moe-freq}`` for its
    ``moe-freq`` (default: 2). In a family's file ``{strata}`` stands for the sizes in the method's name
    (``4-12``), and ``{layers}`` for the same with commas. The data set's ``methods`` override the file.

    Raises:
        UsageError: the method is unknown, or needs ``experts`` and the data set does not set it.
    """
    path, strata = _method_file(name)

    def fill(value):
        if not isinstance(value, str):
            return value
        value = value.replace("{strata}", strata).replace("{layers}", strata.replace("-", ","))
        value = value.replace("{moe-freq}", str(dataset.train.get("moe-freq", MOE_FREQ)))
        if "{experts}" in value and dataset.experts is None:
            needed = f"`experts` is missing, and {name} needs it; expected a number such as 8"
            raise UsageError(f"{dataset_file(dataset.name)}: {needed}")
        return value.replace("{experts}", str(dataset.experts))

    flags = read(path, {"train"}).get("train", {})
    own = dataset.methods.get(name, {})
    return {key: fill(value) for key, value in (flags | own).items()}


def _method_file(name: str) -> tuple[Path, str]:
    """The file of a method, and the sizes in its name if it is of a family; raises UsageError without one."""
    folder = config_folder() / "methods"
    files = {path.stem: path for path in sorted(folder.glob("*.yaml"), key=lambda path: path.stem)}

    def is_family(stem: str) -> bool:
        return re.search(r"\{(strata|layers)\}", read_text(files[stem])) is not None

    if name in files and not is_family(name):
        return files[name], ""
    match = _FAMILY.fullmatch(name)
    if match and match["family"] in files and is_family(match["family"]):
        return files[match["family"]], match["strata"]
    known = [f"{stem}-A-B-..." if is_family(stem) else stem for stem in files]
    raise UsageError(f"unknown method {name!r}: choose one of {', '.join(known)}")


def has_strata(flags: Flags) -> bool:
    """Whether a method's flags make a layer of several strata, so that requested capacity differs."""
    return "-" in str(flags.get("smoe-strata", "")) and not flags.get("moe-stacked")


@cache
def tables() -> dict[str, Any]:
    """The paper's tables (arXiv 2305.02176) by name; parameters and FLOPs are in millions."""
    return OmegaConf.to_container(OmegaConf.load(Path(__file__).with_name("paper_tables.yaml")))
