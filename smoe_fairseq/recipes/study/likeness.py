"""Whether runs that are compared were trained alike, but for what their methods and seeds are."""

from collections import Counter
from collections.abc import Mapping, Sequence

from smoe_fairseq.recipes.seeds import method_of
from smoe_fairseq.recipes.study.kept import Result
from smoe_fairseq.settings.dataset import Dataset
from smoe_fairseq.settings.method import method_flags
from smoe_fairseq.system.errors import UsageError

UPDATES = "updates"


def unlike(dataset: Dataset, results: Sequence[Result]) -> list[str]:
    """A sentence for each run that has another value of something than most.

    That is a flag which is none of a method's, or how many updates were made.
    """
    of_methods = {flag for result in results for flag in _own(dataset, result)} | {"--seed"}
    runs = {result.name: _settings(result) for result in results if "flags" in result.about}
    flags = dict.fromkeys(flag for settings in runs.values() for flag in settings)
    usual = {
        flag: Counter(settings.get(flag) for settings in runs.values()).most_common(1)[0][0]
        for flag in flags
        if flag not in of_methods
    }
    return [
        f"Not trained as most were: {name}, {_said(flag, settings.get(flag))}, not {_said(flag, most)}."
        for name, settings in runs.items()
        for flag, most in usual.items()
        if settings.get(flag) != most
    ]


def _own(dataset: Dataset, result: Result) -> set[str]:
    try:
        return {f"--{flag}" for flag in method_flags(method_of(result.name), dataset)}
    except UsageError:  # a folder that is no method's, such as a copy
        return set()


def _settings(result: Result) -> Mapping[str, str]:
    return {**result.about["flags"], UPDATES: f"{result.about['updates']:,}"}


def _said(flag: str, value: str | None) -> str:
    if flag == UPDATES:
        return f"{value} updates"
    return f"without {flag}" if value is None else f"with {flag} {value}".strip()
