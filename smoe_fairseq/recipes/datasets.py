"""Data sets: the files of ``configs/datasets`` merged over what they are based on."""

import contextlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from smoe_fairseq.errors import UsageError
from smoe_fairseq.forms import check, choice
from smoe_fairseq.recipes.config_files import REQUIRED, SCHEMA, import_plugins_of, method_file, read
from smoe_fairseq.recipes.program_flags import (
    OF_METHODS,
    RECIPE_FLAGS,
    TRAIN_FLAGS,
    Flags,
    flag_values,
    refuse_keys,
)
from smoe_fairseq.recipes.settings import Settings


@dataclass(frozen=True)
class Dataset:
    """A file of ``configs/datasets`` merged over ``configs/common.yaml``, which explains the keys."""

    name: str
    pairs: tuple[str, ...]  # in the codes of a pretrained model
    plugins: list[str]
    pretrained: str | None
    codes: dict[str, str]  # `languages`: the pretrained model's code of each code of the text
    new_languages: dict[str, dict[str, str]]
    add_subwords: int | None
    trim: bool | None
    keep: tuple[str, ...]  # pairs that are scored and not trained
    one_way: bool | None  # whether a pair is one direction, as it is written
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
    metrics: dict[str, str]
    study: list[str]
    methods: dict[str, Flags]
    margins: dict[str, float]
    statements: dict[str, list[str]]
    parts: list[str]  # data sets whose mean the statements are about
    classes: dict[str, list[str]]
    start: dict[str, Any] | None = None  # the pretrained model's record; see `with_pretrained`
    settings: Settings = field(default=Settings(), compare=False)  # of the command that uses it

    def __str__(self) -> str:
        return self.name

    @property
    def file(self) -> Path:
        return self.settings.config_dir / "datasets" / f"{self.name}.yaml"

    def own(self, section: str) -> Mapping[str, Any]:
        """A section of the data set's file, without the files on which it is based."""
        return read(self.file, SCHEMA).get(section, {})

    @property
    def validation(self) -> dict[str, Any]:
        """``validate`` with its defaults; empty if fairseq's flags alone decide."""
        given = {key: value for key, value in self.validate.items() if value is not None}
        by_loss = not given or given.get("metric") == "loss"
        return given if by_loss else {"sentences": 200, "metric": "chrf"} | given

    @property
    def all_pairs(self) -> tuple[str, ...]:
        """Those that are trained, then those that are only scored."""
        return (*self.pairs, *self.keep)

    @property
    def languages(self) -> tuple[str, ...]:
        """All languages in order of appearance, which is the order of their tokens."""
        return languages_of(self.all_pairs)

    @property
    def directions(self) -> tuple[str, ...]:
        """``source-target`` in the paper's order: first into the first language, then out of it."""
        back = () if self.one_way else tuple(both_orders(pair)[1] for pair in self.pairs)
        return back + self.pairs

    @property
    def kept_directions(self) -> tuple[str, ...]:
        """The directions that are scored and not trained."""
        if self.one_way:
            return self.keep
        return tuple(order for pair in self.keep for order in both_orders(pair))

    @property
    def all_directions(self) -> tuple[str, ...]:
        """Those that are trained, then those that are only scored."""
        return self.directions + self.kept_directions

    @property
    def hub(self) -> str:
        """The language of most pairs, such as English: the first such one."""
        return Counter("-".join(self.pairs).split("-")).most_common(1)[0][0]

    @property
    def in_text(self) -> "Dataset":
        """The data set with the codes of its text, in place of those of a pretrained model."""
        codes = {model: code for code, model in self.codes.items()}
        pairs, keep = ([translated(p, codes) for p in own] for own in (self.pairs, self.keep))
        return replace(self, pairs=tuple(pairs), keep=tuple(keep))

    def pair_of(self, direction: str) -> str:
        """The pair whose files contain a direction's text."""
        return next(pair for pair in both_orders(direction) if pair in self.all_pairs)


def languages_of(pairs: Iterable[str]) -> tuple[str, ...]:
    """The languages in order of appearance."""
    return tuple(dict.fromkeys(language for pair in pairs for language in pair.split("-")))


def translated(pair: str, codes: Mapping[str, str]) -> str:
    """A pair with other codes of its languages."""
    return "-".join(codes.get(code, code) for code in pair.split("-"))


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
            file = dataset.file
            while file.stem != "common":
                own = read(file, SCHEMA)
                if flag in _section(own, section):
                    break
                file = dataset.settings.config_dir / f"{own.get('base', 'common')}.yaml"
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


def load_dataset(name: str, settings: Settings | None = None) -> Dataset:
    """Read ``configs/datasets/NAME.yaml``; raises UsageError for an unknown name or key."""
    settings = settings or Settings.read()  # by default the environment's
    configs = settings.config_dir
    path = configs / "datasets" / f"{name}.yaml"
    # The recipe's steps would parse a name that starts with a dash as a flag.
    files = (configs / "datasets").glob("*.yaml")
    known = sorted(file.stem for file in files if file.stem[0] not in "-.")
    if name not in known:
        own = Path(name).name.removesuffix(".yaml")  # of a path
        cause = f"expected a file of {configs}/datasets, by its name without .yaml"
        raise UsageError(f"unknown dataset {name!r}: {cause}; {choice(own, known)}")
    empty = {key: type(form)() for key, form in SCHEMA.items() if isinstance(form, dict | list)}
    merged = empty | OmegaConf.to_container(_merge_bases(path, configs))
    for key in ("metrics", "statements", "classes"):  # without those of a base that are taken away
        merged[key] = {name: value for name, value in merged[key].items() if value is not None}
    # Classes of a base may have other languages.
    own = read(path, SCHEMA).get("classes", ())
    known = languages_of(merged["pairs"] + merged["keep"])
    classes = {
        name: [each for each in languages if name in own or each in known]
        for name, languages in merged["classes"].items()
    }
    merged["classes"] = {name: languages for name, languages in classes.items() if languages}
    _check(merged, path, configs)
    import_plugins_of(merged, configs)
    values = {key.replace("-", "_"): merged.get(key) for key in SCHEMA if key != "base"}
    codes = values["codes"] = values.pop("languages")
    for key in ("pairs", "keep"):
        values[key] = tuple(translated(pair, codes) for pair in merged[key])
    if wrong := [pair for pair in values["pairs"] if not _is_pair(pair)]:
        raise UsageError(f"{path}: `languages` makes the pair {wrong[0]}; expected two codes")
    for key, languages in merged["classes"].items():
        values["classes"][key] = [codes.get(code, code) for code in languages]
    return Dataset(name=name, settings=settings, **values)


def _check(merged: Mapping[str, Any], path: Path, configs: Path) -> None:
    """Raise UsageError if a file that is merged over its bases does not describe a data set."""
    pairs, keep = merged.get("pairs"), merged["keep"]
    if not pairs or not all(map(_is_pair, pairs)):
        expected = "expected a list such as [en-de, eng-fra], of codes without hyphens"
        raise UsageError(f"{path}: `pairs` is {pairs or 'missing'}: {expected} (docs/recipes.md)")
    check(merged, REQUIRED, path)
    if twice := [pair for n, pair in enumerate(pairs) if {*both_orders(pair)} & {*pairs[:n]}]:
        both = "a pair is in it once; without `one-way` it makes both directions"
        raise UsageError(f"{path}: `pairs` has {twice[0]} twice, in some order: {both}")
    for n, pair in enumerate(keep):
        if not _is_pair(pair) or {*both_orders(pair)} & {*pairs, *keep[:n]}:
            raise UsageError(f"{path}: `keep` has {pair}: expected pairs that `pairs` lacks, once")
    known = {*languages_of(pairs + keep)}
    lists = {f"classes.{key}": languages for key, languages in merged["classes"].items()}
    for key, languages in (lists | {"languages": merged["languages"]}).items():
        if others := sorted(set(languages) - known):
            raise UsageError(f"{path}: `{key}` has {others[0]}, which none of `pairs` has")
    by_code = defaultdict(list)
    for own in sorted(known):
        by_code[merged["languages"].get(own, own)].append(own)
    if twice := next((code for code, own in by_code.items() if len(own) > 1), None):
        raise UsageError(f"{path}: `languages`: {' and '.join(by_code[twice])} are both {twice}")
    if "all" in merged["classes"]:
        raise UsageError(f"{path}: `classes.all`: that is the name of the mean of all languages")
    names = [name.lower() for name in merged["metrics"]]
    if twice := [name for n, name in enumerate(names) if name in names[:n]]:
        raise UsageError(f"{path}: `metrics.{twice[0]}` is there twice; case does not count")
    statements = {f"statements.{each}": both for each, both in merged["statements"].items()}
    for statement, (first, second) in statements.items():
        if first == second:
            raise UsageError(f"{path}: `{statement}` compares {first} with itself")
    named = {"study": merged["study"], "methods": merged["methods"], **statements}
    for key, methods in named.items():
        for method in methods:
            try:
                method_file(method, configs)
            except UsageError as error:
                raise UsageError(f"{path}: `{key}`: {error}") from None
    if len(merged["parts"]) > len({*merged["parts"]}):
        raise UsageError(f"{path}: `parts` has one data set twice")
    by_recipe = {"generate": RECIPE_FLAGS, "train": TRAIN_FLAGS}
    by_recipe |= {f"methods.{method}": OF_METHODS for method in merged["methods"]}
    for section, names in by_recipe.items():
        refuse_keys(f"{path}: `{section}", _section(merged, section), names)
    if merged.get("add-subwords") and not merged["new-languages"]:
        raise UsageError(f"{path}: `add-subwords`: expected it with `new-languages`")


def _is_pair(name: str) -> bool:
    """Whether a name consists of two languages."""
    match = re.fullmatch(r"([^-\s/]+)-([^-\s/]+)", name)
    return match is not None and match[1] != match[2]


def _merge_bases(path: Path, configs: Path, derived: tuple[Path, ...] = ()) -> DictConfig | dict:
    """Merge a file over its ``base``, and so on to ``common``; ``derived`` are the files based on it."""
    own = read(path, SCHEMA)
    base = own.pop("base", "common")
    if path.stem == "common":
        return own
    below = configs / f"{base}.yaml"
    derived += (path.resolve(),)
    if below.resolve() in derived:
        raise UsageError(f"{path}: its `base` {base} is in turn based on it")
    if not below.exists():
        raise UsageError(f"{path}: its `base` {base!r}: {below} is missing")
    return OmegaConf.merge(_merge_bases(below, configs, derived), own)
