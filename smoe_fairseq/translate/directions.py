"""The directions of a trained model: which languages it translates from and to, and how it is told them."""

import copy
from collections.abc import Mapping
from pathlib import Path

from fairseq.utils import split_paths

from smoe_fairseq.errors import UsageError
from smoe_fairseq.flags import differing_flags, values_of, with_value
from smoe_fairseq.languages import meant

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


def check_languages(run, task, given: Mapping[str, str], data: str) -> dict[str, str]:
    """The languages that are meant, by ``source_lang`` and ``target_lang``, of a bilingual task.

    Raises UsageError if it has another direction, or ``data`` no dictionary of a language.
    """
    folder, found = Path(split_paths(data)[0]), {}
    languages = sorted(file.name[len("dict.") : -len(".txt")] for file in folder.glob("dict.*.txt"))
    pairs = {file.name.split(".")[1] for file in folder.glob("*.*-*.*.idx")}  # train.en-de.en.idx
    pair = pairs.pop().split("-") if len(pairs) == 1 else ()  # fairseq infers it likewise
    inferred = dict(zip(_DIRECTION, pair)) if len(pair) == 2 else {}
    direction = {n: getattr(task, n, None) or inferred.get(n) for n in _DIRECTION}
    for name, lang in given.items():
        trained = direction[name]
        names = _meant(lang, [trained] if trained else languages)
        if not names and all(direction.values()):
            expected = f"no such direction; expected {'-'.join(direction.values())}"
            raise UsageError(f"{run}: language {lang!r}: {expected}")
        if len(names) != 1 or names[0] not in languages:
            expected = trained or ", ".join(names or languages)
            raise UsageError(f"{run}: language {lang!r}: expected {expected}, with its dict.*.txt")
        found[name] = names[0]
    return found


def _meant(lang: str, known) -> list[str]:
    if not isinstance(lang, str):
        raise UsageError(f"language {lang!r:.60}: expected one code or name")
    return meant(lang, known)


def task_for(task, source: str | None, target: str | None, request: str | None = None):
    """The task for the direction from ``source`` to ``target``, which may be None if unambiguous.

    Languages match by meaning: ``ig``, ``ibo`` and ``Igbo`` are ``ibo_Latn``.

    Args:
        request: the name of the request in an error message.

    Raises:
        UsageError: the direction is unknown or ambiguous.
    """
    multilingual = is_multilingual(task)
    request = request or f"source_lang={source!r}, target_lang={target!r}"
    pairs = [direction_of(task)]  # codes such as zh-CN have hyphens
    if multilingual:
        pairs = [tuple(pair.split("-")) for pair in task.lang_pairs]
    sides = [(*dict.fromkeys(side),) for side in zip(*pairs)]
    given = []
    for lang, side in zip((source, target), sides, strict=True):
        known = task.langs if multilingual else side  # of any direction, trained or not
        names = _meant(lang, known) if lang else [None]
        if len(names) != 1 and multilingual:
            expected = f"expected {', '.join(sorted(names or known))}"
            raise UsageError(f"{request}: {lang} is not one of the model's languages: {expected}")
        given += names or [lang]
    matches = [p for p in pairs if all(name in (None, own) for name, own in zip(given, p))]
    if multilingual and not matches and None not in given and given[0] != given[1]:
        matches = [(*given,)]
    if len(matches) != 1:
        problem = "several directions are possible" if matches else "no such direction"
        few = len(pairs) <= _MOST_SHOWN
        expected = f"one of {', '.join(map('-'.join, pairs))}" if few else "a source and a target"
        raise UsageError(f"{request}: {problem}; expected {expected}")
    if not multilingual:
        return task
    task = copy.copy(task)  # calls for other directions may run at the same time
    task.args = copy.copy(task.args)
    task.args.source_lang, task.args.target_lang = matches[0]
    dictionaries = task.data_manager.dicts  # of the languages of the training only
    by_side = (task.source_dictionary, task.target_dictionary)
    for language, dictionary in zip(matches[0], by_side, strict=True):
        dictionaries.setdefault(language, dictionary)
    return task


# Task options that add a language's token to the text: with other values, a model silently translates badly.
TOKEN_FLAGS = {
    *("encoder_langtok", "decoder_langtok", "lang_tok_style", "lang_tok_replacing_bos_eos")
}
LANGUAGE_TOKENS = TOKEN_FLAGS | {"langtoks"}
_DIRECTION = ("source_lang", "target_lang")
READING = {*LANGUAGE_TOKENS, *_DIRECTION}  # where all tensors fit that differ


def other_flags(saved, current) -> dict[str, str]:
    """The flags of a task's settings, by option, that differ from the ``current`` ones.

    Empty if one of them is unknown.
    """
    saved, current = map(values_of, (saved, current))
    if not saved or not current:
        return {}
    names = ("langs", *sorted(LANGUAGE_TOKENS))
    before, now = (
        {"task": each.get("_name") or each.get("task"), **{name: each.get(name) for name in names}}
        for each in (saved, current)
    )
    flags = differing_flags(before, now)
    if any(each.get("lang_dict") for each in (saved, current)):  # a list in a file
        flags.pop("langs", None)
    has_both = all(each.get("langtoks") for each in (saved, current))
    if flags.keys() & {"encoder_langtok", "decoder_langtok"} or not has_both:
        flags.pop("langtoks", None)  # fairseq sets it by these, when training starts
    direction, asked = ([each.get(name) for name in _DIRECTION] for each in (saved, current))
    if direction == asked[::-1] != asked:  # of a joint dictionary, all tensors would fit
        flags |= {name: with_value(name, saved[name]) for name in _DIRECTION}
    return flags
