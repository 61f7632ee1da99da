"""Which words a checkpoint's numbers stand for: noted when it is saved, compared when it is loaded.

A dictionary of as many words in another order fits every tensor of the model, which goes on to train on, or
to translate, other words than it was taught. Of another size it fits none, and the model says so by itself.
"""

import functools
import hashlib
import inspect
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from smoe_fairseq.checkpoint.content import open_checkpoint
from smoe_fairseq.system.checkpoint_file import is_archive
from smoe_fairseq.system.errors import UsageError

KEY = "smoe_dictionaries"  # of what is noted in a checkpoint


def noted(task) -> dict[str, dict]:
    """What a checkpoint says of each of the task's dictionaries, as plain data: words and their checksum.

    They are called by language where the task has one for each, and else "source" and "target".
    """
    found = {}
    for name, dictionary in _dictionaries(task).items():
        words = "\n".join(dictionary.symbols).encode("utf-8", "surrogatepass")
        found[name] = {
            "symbols": len(dictionary.symbols),
            "sha256": hashlib.sha256(words).hexdigest(),
        }
    return found


def _dictionaries(task) -> dict[str, object]:
    by_language = getattr(getattr(task, "data_manager", task), "dicts", None)
    if not isinstance(by_language, Mapping):
        by_language = {}
        for side in ("source", "target"):
            with suppress(NotImplementedError):  # tasks without text
                by_language[side] = getattr(task, f"{side}_dictionary", None)
    return {name: d for name, d in by_language.items() if hasattr(d, "symbols")}


def difference(path: Path | str, content: Mapping, task) -> str | None:
    """One sentence where a checkpoint is of another dictionary of the same size than the task's.

    None where they agree, and where the checkpoint, older or of stock fairseq, does not say.
    """
    saved, dictionaries = content.get(KEY), _dictionaries(task)
    for name, now in noted(task).items():
        before = saved.get(name) if isinstance(saved, Mapping) else None
        if not isinstance(before, Mapping) or before.get("symbols") != now["symbols"]:
            continue
        if before.get("sha256") != now["sha256"]:
            file = getattr(dictionaries[name], "read_from", None) or f"the {name} dictionary"
            languages = ", --langs in the same order" if hasattr(task, "data_manager") else ""
            return (
                f"{path} was trained with another {name} dictionary than {file}: as many words "
                f"({now['symbols']}), but others or in another order; expected the dictionary of its "
                f"training{languages} and data made with it"
            )
    return None


def remember_file(dictionary: ModuleType) -> None:
    """A dictionary knows the file that it was read from, as ``read_from``."""
    original = dictionary.Dictionary.load.__func__

    @functools.wraps(original)
    def load(cls, f):
        loaded = original(cls, f)
        if isinstance(f, str):
            loaded.read_from = f
        return loaded

    dictionary.Dictionary.load = classmethod(load)


def compare_when_loaded(checkpoint_utils: ModuleType) -> None:
    """All commands but ``fairseq-train`` load models by one function, which now compares dictionaries.

    Raises:
        UsageError: on loading, where they differ.
    """
    original = checkpoint_utils.load_model_ensemble_and_task
    parameters = inspect.signature(original)

    @functools.wraps(original)
    def load_model_ensemble_and_task(*arguments, **options):
        models, config, task = original(*arguments, **options)
        given = parameters.bind(*arguments, **options)
        given.apply_defaults()
        given = given.arguments
        for name in given["filenames"]:
            path = checkpoint_utils.get_maybe_sharded_checkpoint_filename(
                name, given["suffix"], 0, given["num_shards"]
            )
            if sentence := difference(path, given["state"] or content_of(path), task):
                raise UsageError(sentence)
        return models, config, task

    checkpoint_utils.load_model_ensemble_and_task = load_model_ensemble_and_task


def content_of(path: Path | str) -> Mapping:
    """Of a file that fairseq loads by itself; empty where it cannot be read, or has nothing noted.

    What is wrong with a file is for whoever loads it to say.
    """
    try:
        return open_checkpoint(path) if is_archive(path) else {}  # all with a note are archives
    except (UsageError, OSError):
        return {}
