"""Flags of fairseq's programs: as settings, as words of a command line, and as fairseq's config."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig

from smoe_fairseq.ending import deferring_signals
from smoe_fairseq.errors import UsageError
from smoe_fairseq.flags import refusing_flags

Flags = dict[str, Any]
FAIRSEQ_POSITIONS = 1024  # the default of --max-source-positions and --max-target-positions


def arguments(flags: Flags) -> list[str]:
    """Flags as command-line words: ``true`` gives the bare flag, ``false`` and null give nothing.

    A list gives several words, but of numbers, such as learning rates by epoch, one.
    """
    words: list[str] = []
    for key, value in flags.items():
        if value is None or value is False:
            continue
        words.append(f"--{key}")
        if value is not True:
            several = value if isinstance(value, list) else [value]
            are_numbers = several and all(isinstance(each, int | float) for each in several)
            shown = [*map(str, several)]
            words += [",".join(shown)] if are_numbers else shown
    return words


def value_of(flags: Flags, name: str, default: Any) -> Any:
    """The value of a flag, or ``default`` if it is missing or null."""
    value = flags.get(name)
    return default if value is None else value


def parse_flags(program: str, words: Sequence[str]) -> DictConfig:
    """fairseq's config of command-line words; raises UsageError for an unknown flag or an invalid value."""
    from fairseq import options  # slow
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    import smoe_fairseq.models.transformer  # noqa: F401  (registers the architectures)
    from smoe_fairseq.compat.option_values import check_options

    training = program == "fairseq-train"
    parser = options.get_training_parser() if training else options.get_generation_parser()
    parser.prog = program
    if not training:
        parser.add_argument("--arch", "-a", default="wav2vec2")  # as fairseq-generate does
    parser.words = list(words)
    with refusing_flags(), deferring_signals():  # of a signal, fairseq would log all flags
        args = options.parse_args_and_arch(parser, parser.words)
        cfg = convert_namespace_to_omegaconf(args)
    check_options(cfg)
    return cfg


# Flags of fairseq-generate that the recipe for evaluation sets.
RECIPE_FLAGS = {
    *("path", "results-path", "gen-subset", "num-shards", "shard-id", "nbest"),
    *("source-lang", "target-lang", "langs", "lang-pairs"),
}
TRAIN_FLAGS = {"save-dir", "log-file", "user-dir"}  # and those of fairseq-train
OF_METHODS = TRAIN_FLAGS | {"seed"}  # which a method may not set
OTHER_NAMES = {
    **{"-a": "--arch", "-s": "--source-lang", "-t": "--target-lang"},
    **{"--max-sentences": "--batch-size", "--learning-rate": "--lr"},
    "--relu-dropout": "--activation-dropout",
}


def refuse_keys(section: str, flags: Flags, by_recipe: Collection[str]) -> None:
    """Raise UsageError for a flag of a file's section that the recipe sets, or by its second name."""
    for key in flags:
        if key in by_recipe:
            raise UsageError(f"{section}.{key}` is set by the recipe")
        if other := OTHER_NAMES.get(f"--{key}"):
            raise UsageError(f"{section}.{key}`: expected its other name, `{other.lstrip('-')}`")


def flag_values(words: Sequence[str]) -> dict[str, str]:
    """The flags among command-line words, each with its last value; several words make one string."""
    flags: dict[str, list[str]] = {}
    values: list[str] = []  # words before the first flag are dropped
    for word in words:
        if word[:1] == "-" and not is_number(word):
            name, equals, value = word.partition("=")
            name = OTHER_NAMES.get(name, name)
            flags.pop(name, None)
            values = flags[name] = [value] if equals else []
        else:
            values.append(word)
    return {name: " ".join(values) for name, values in flags.items()}


def words_of(flags: Mapping[str, str]) -> list[str]:
    """The inverse of `flag_values`: flags and values as command-line words."""
    return [word for flag, value in flags.items() for word in (flag, *value.split())]


def is_number(word: str) -> bool:
    """Whether a word is a number: a negative one is a value, not a flag."""
    try:
        float(word)
    except ValueError:
        return False
    return True
