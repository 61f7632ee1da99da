"""The directions of a trained model: which languages it translates from and to."""

import copy
import difflib
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from fairseq.utils import split_paths

from smoe_fairseq.errors import UsageError

MULTILINGUAL = "translation_multi_simple_epoch"
_MOST_SHOWN = 50  # directions in a message


def task_name(task_config) -> str | None:
    return getattr(task_config, "_name", None) or getattr(task_config, "task", None)


def is_multilingual(task) -> bool:
    """Whether a task has several directions (`MULTILINGUAL`)."""
    return hasattr(task, "data_manager")


def direction_of(task) -> tuple[str, str]:
    """Source and target language of a task, see `task_for`."""
    options = task.cfg or task.args
    return options.source_lang, options.target_lang


def check_languages(run, task, given: Mapping[str, str], data: str) -> None:
    """Raise UsageError if a bilingual task has another direction, or ``data`` no dictionary of a language."""
    folder = split_paths(data)[0]
    for name, lang in given.items():
        trained = getattr(task, name, None)
        if trained and trained != lang:
            expected = f"expected {trained}, since it was trained for one direction"
            raise UsageError(f"{run}: {name}={lang!r}: no such direction; {expected}")
        if not Path(folder, f"dict.{lang}.txt").exists():
            raise UsageError(f"{name}={lang!r}: {folder} has no dictionary of this language")


def task_for(task, source: str | None, target: str | None, request: str | None = None):
    """The task for the direction from ``source`` to ``target``, which may be None if unambiguous.

    Args:
        request: the name of the request in an error message.

    Raises:
        UsageError: the direction is unknown or ambiguous.
    """
    multilingual = is_multilingual(task)
    options = task.cfg or task.args
    known = [f"{options.source_lang}-{options.target_lang}"]
    pairs = [(options.source_lang, options.target_lang)]  # codes such as zh-CN have hyphens
    languages = set()  # of any direction, trained or not
    if multilingual:
        known, languages = list(task.lang_pairs), set(task.langs)
        pairs = [tuple(pair.split("-")) for pair in known]
    matches = [p for p in pairs if source in (None, p[0]) and target in (None, p[1])]
    if not matches and source != target and {source, target} <= languages:
        matches = [(source, target)]
    if len(matches) != 1:
        request = request or f"source_lang={source!r}, target_lang={target!r}"
        problem = "several directions are possible" if matches else "no such direction"
        expected = f"one of {', '.join(known)}"
        if len(known) > _MOST_SHOWN:
            wrong = next(
                (lang for lang in (source, target) if lang and lang not in languages), None
            )
            near = difflib.get_close_matches(wrong or "", languages, 3, 0.3)
            expected = f"two of {len(languages)} languages"
            expected += f"; {wrong} is none, but {', '.join(near)}" if near else ""
        raise UsageError(f"{request}: {problem}; expected {expected}")
    if not multilingual:
        return task
    task = copy.copy(task)  # calls for other directions may run at the same time
    task.args = Namespace(**vars(options))
    task.args.source_lang, task.args.target_lang = matches[0]
    if options.fixed_dictionary:  # fairseq assigns it to the languages of the training only
        dictionaries = task.data_manager.dicts
        for language in matches[0]:
            dictionaries.setdefault(language, task.source_dictionary)
    return task
