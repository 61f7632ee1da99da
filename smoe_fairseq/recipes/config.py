"""The recipes' settings: flags, the data sets and methods in ``configs/``, and the paper's tables."""

import contextlib
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
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
MOST_VALUES = 100_000  # of a YAML file: nested aliases multiply, so a few make gigabytes


def arguments(flags: Flags) -> list[str]:
    """The command-line words for flags: ``true`` gives the bare flag, ``false`` and null give nothing.

    A list gives a flag with several words behind it.
    """
    words: list[str] = []
    for key, value in flags.items():
        if value is None or value is False:
            continue
        words.append(f"--{key}")
        if value is not True:
            words += map(str, value if isinstance(value, list) else [value])
    return words


def parse_flags(program: str, words: Sequence[str]) -> DictConfig:
    """fairseq's config of the words of ``fairseq-train`` or ``fairseq-generate``.

    Raises:
        UsageError: they cannot be used.
    """
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    import smoe_fairseq.models.transformer  # noqa: F401  (registers the architectures)
    from smoe_fairseq.compat.option_values import check_options

    training = program == "fairseq-train"
    with refusing_flags():
        parser = options.get_training_parser() if training else options.get_generation_parser()
        parser.prog = program
        if not training:
            parser.add_argument("--arch", "-a", default="wav2vec2")  # as fairseq-generate does
        cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, list(words)))
    check_options(cfg)
    return cfg


# Flags of fairseq-generate that an evaluation sets.
OF_RECIPE = {"path", "results-path", "gen-subset", "source-lang", "target-lang", "langs"}
_OTHER_NAMES = {
    **{"-a": "--arch", "-s": "--source-lang", "-t": "--target-lang"},
    **{"--max-sentences": "--batch-size", "--learning-rate": "--lr"},
    "--relu-dropout": "--activation-dropout",
}


def given_flags(words: Sequence[str]) -> dict[str, str]:
    """The flags among command-line words, each with the words behind its last occurrence."""
    given: dict[str, list[str]] = {}
    values: list[str] = []  # words before the first flag are dropped
    for word in words:
        if word[:1] == "-" and not is_number(word):
            name, equals, value = word.partition("=")
            name = _OTHER_NAMES.get(name, name)
            given.pop(name, None)
            values = given[name] = [value] if equals else []
        else:
            values.append(word)
    return {name: " ".join(values) for name, values in given.items()}


def is_number(word: str) -> bool:
    """Whether a word is a number: a negative one is a value, not a flag."""
    try:
        float(word)
    except ValueError:
        return False
    return True


def config_folder() -> Path:
    """``CONFIG_DIR``; by default ``configs`` of the installed package, or of the checkout."""
    if given := os.environ.get("CONFIG_DIR"):
        folder = Path(given)
    else:
        # Beside an installed package, a folder ``configs`` belongs to something else.
        installed = Path(__file__).parent / "configs"
        checkout = Path(__file__).parents[2] / "configs"
        folder = installed if installed.is_dir() else checkout
    if not (folder / "datasets").is_dir():
        advice = "set CONFIG_DIR to the folder with datasets/ and methods/"
        raise UsageError(f"{folder} holds no recipes: {advice}")
    return folder


def _names(*words: str) -> re.Pattern:
    """Text in which ``{word}`` may stand for the name of a file's language, split and so on."""
    return re.compile(rf"([^{{}}]|\{{({'|'.join(words)})\}})+")


_COUNT = Number(1, whole=True)
_SHARE = Settings(share=Number(0, 1), most=_COUNT)
_SPLITS = Settings(train=str, valid=str, test=str)
_NAME = _names("split", "pair", "sorted", "language", "code")  # of a publisher's file
_DROP = {"drop", "keep"}
# Flags of a program: a word, several, or none (`true`: the bare flag; `false`: not at all).
_WORD = (float, str)
_FLAGS = {str: (None, bool, *_WORD, [_WORD])}
_OF_TRAINING = {
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
    "shards": Number(1, 1000, whole=True),  # whose files are open at the same time
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
    "train": _OF_TRAINING,
    "generate": _FLAGS,
    "validate": Settings(
        {name: _COUNT for name in ("sentences", "every", "patience", "beam")},
        metric={"chrf", "bleu"},
    ),
    "checkpoint": re.compile(r"best|last|average:[1-9]\d*"),
    "sacrebleu": {**_FLAGS, "width?": (None, _COUNT)},
    "study": [str],
    "methods": {str: _OF_TRAINING},
    "margins": Settings({name: Number(0) for name in ("loss", "chrF++", "BLEU")}),
    "statements": {str: [str, str]},
    "classes": {str: [str]},
}
# What it needs, with its bases.
_SPLIT = {"share": float, "most": int}
_WHOLE = {
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


def read(path: Path, keys: Collection[str]) -> dict[str, Any]:
    """The content of a YAML file; keys without a value are left out.

    Raises:
        UsageError: the file cannot be read, is not YAML, or has not the form of `SCHEMA`, or others of its
            keys than ``keys``.
    """
    text = read_text(path)
    try:
        node = yaml.compose(text)
        if not isinstance(node, yaml.MappingNode | None):
            raise UsageError(f"{path}: expected keys and values such as `pairs: [eng-nso]`")
        if (values := _values(node, {})) > MOST_VALUES:
            found = f"{values:,} values, with what its aliases repeat"
            raise UsageError(f"{path} has {found}: expected at most {MOST_VALUES:,}")
        content = OmegaConf.to_container(OmegaConf.create(text))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise UsageError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    check(content, Settings({key: SCHEMA[key] for key in keys}), path)
    return {key: value for key, value in content.items() if value is not None}


def _values(node: yaml.Node | None, known: dict[int, float]) -> float:
    """How many values a part of a YAML file has, each alias counted as what it stands for."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        known[id(node)] = math.inf  # of one that holds itself
        parts = node.value
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        known[id(node)] = 1 + sum(_values(part, known) for part in parts)
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
        """Names ``source-target`` in the paper's order: into the first language, then out of it."""
        return tuple(orders(pair)[1] for pair in self.pairs) + self.pairs

    def pair_of(self, direction: str) -> str:
        """The pair whose files have a direction's text."""
        return next(pair for pair in orders(direction) if pair in self.pairs)


def orders(pair: str) -> tuple[str, str]:
    """A pair, and the same two languages the other way round."""
    return pair, "-".join(reversed(pair.split("-")))


@contextlib.contextmanager
def naming_settings(
    dataset: Dataset, sections: Sequence[str], typed: Sequence[str] = ()
) -> Iterator[None]:
    """An error about a flag that one of the sections sets, and no typed word, names file and setting."""
    try:
        yield
    except UsageError as error:
        for flag in re.findall(r"(?<=--)[\w-]+", str(error))[:1]:
            for section in sections:
                if f"--{flag}" in given_flags(typed) or flag not in _part(vars(dataset), section):
                    continue
                file = dataset_file(dataset.name)
                while file.stem != "common" and flag not in _part(
                    own := read(file, SCHEMA), section
                ):
                    file = config_folder() / f"{own.get('base', 'common')}.yaml"
                raise UsageError(f"{file}: `{section}.{flag}`: {error}") from None
        raise


def _part(content: Mapping, section: str) -> Mapping:
    """Of a data set's content: ``train``, or ``methods.moe``."""
    for key in section.split("."):
        content = content.get(key) or {}
    return content


def dataset_file(name: str) -> Path:
    """The file of a data set."""
    return config_folder() / "datasets" / f"{name}.yaml"


def load_dataset(name: str) -> Dataset:
    """Read ``configs/datasets/NAME.yaml``; raises UsageError for an unknown name or key."""
    path = dataset_file(name)
    # A name with a dash in front would be taken for a flag by the recipe's steps.
    files = (config_folder() / "datasets").glob("*.yaml")
    known = sorted(file.stem for file in files if file.stem[0] != "-")
    if name not in known:
        raise UsageError(f"unknown dataset {name!r}: choose one of {', '.join(known)}")
    empty = {key: type(form)() for key, form in SCHEMA.items() if isinstance(form, dict | list)}
    merged = empty | OmegaConf.to_container(_with_bases(path))
    pairs = merged.get("pairs")
    if not pairs or not all(map(_is_pair, pairs)):
        given = pairs or "missing"
        expected = "expected a list such as [eng-nso, eng-fra], of codes without hyphens"
        raise UsageError(f"{path}: `pairs` is {given}: {expected} (docs/recipes.md)")
    check(merged, _WHOLE, path)
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
    for key in OF_RECIPE & merged["generate"].keys():
        raise UsageError(f"{path}: `generate.{key}` is set by the recipe")
    values = {key: merged.get(key) for key in SCHEMA if key != "base"}
    return Dataset(name=name, **(values | {"pairs": tuple(pairs)}))


def _is_pair(name: str) -> bool:
    """Whether it names two languages."""
    found = re.fullmatch(r"([^-\s]+)-([^-\s]+)", name)
    return found is not None and found[1] != found[2]


def _with_bases(path: Path, above: tuple[str, ...] = ()) -> DictConfig | dict:
    """A file's content merged over its ``base``, and so on to ``common``; ``above`` are based on it."""
    own = read(path, SCHEMA)
    base = own.pop("base", "common")
    if path.stem == "common":
        return own
    above += (path.stem,)
    if base in above:
        raise UsageError(f"{path}: its `base` {base} stands on it in turn")
    return OmegaConf.merge(_with_bases(config_folder() / f"{base}.yaml", above), own)


MOE_FREQ = 2  # every second layer is an MoE layer, unless the data set says otherwise
_METHOD_KEYS = {"train"}
_FAMILY = re.compile(r"(?P<family>.+?)-(?P<strata>((0|[1-9]\d*)-)*[1-9]\d*)")


def method_flags(name: str, dataset: Dataset) -> Flags:
    """The training flags of a method, from ``NAME.yaml``, or for ``FAMILY-4-12`` from ``FAMILY.yaml``.

    In these files ``{experts}`` stands for the data set's number of experts, and ``{moe-freq}`` for its
    ``moe-freq`` (default: 2). In a family's file ``{strata}`` stands for the sizes behind the family's name
    (``4-12``), and ``{layers}`` for the same with commas. What the data set's ``methods`` say of it counts
    more.

    Raises:
        UsageError: there is no such method, or it needs ``experts`` and the data set has none.
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

    flags = read(path, _METHOD_KEYS).get("train", {})
    own = dataset.methods.get(name, {})
    return {key: fill(value) for key, value in (flags | own).items()}


def _method_file(name: str) -> tuple[Path, str]:
    """The file of a method, and the sizes behind the name of a family; raises UsageError without one."""
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
    """Whether a method's flags make several strata at which tokens may stop."""
    return "-" in str(flags.get("smoe-strata", "")) and not flags.get("moe-stacked")


@cache
def tables() -> dict[str, Any]:
    """The paper's tables (arXiv 2305.02176) by name; parameters and FLOPs are in millions."""
    with resources.as_file(resources.files(__package__).joinpath("paper_tables.yaml")) as file:
        return OmegaConf.to_container(OmegaConf.load(file))


def resource_classes(
    table: str, counted: Mapping[str, int] | None = None
) -> dict[str, list[str] | None]:
    """The languages in each of a table's classes, which are ranges of training sentence pairs.

    Args:
        counted: sentence pairs by language, for a table without sizes.

    Returns:
        Languages by class, in the paper's order; None for languages if no sizes are known. Empty if the
        table has no classes.
    """
    content = tables().get(table, {})
    sizes = content.get("sizes", counted)
    if sizes is None:
        return dict.fromkeys(content.get("classes", {}))
    found = {}
    for name, bounds in content.get("classes", {}).items():
        least, most = bounds.get("least", 0), bounds.get("most", math.inf)
        found[name] = [language for language, size in sizes.items() if least <= size <= most]
    return found
