"""What a checkpoint was trained with, dictionaries and flags, is compared with what loads it."""

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from smoe_fairseq.checkpoints.reading import check_finite, check_plugins, content_of, saved_task
from smoe_fairseq.compat.replacing import replaces
from smoe_fairseq.compat.safe_load import evaluate
from smoe_fairseq.errors import UsageError
from smoe_fairseq.flags import differing_flags, values_of
from smoe_fairseq.subwords import check_sum
from smoe_fairseq.translate.directions import READING, other_flags

# Checksums of the dictionaries are saved in a checkpoint and compared when it is loaded.
#
# A dictionary of the same size with other words, or in another order, fits all tensors: without this check
# the model would silently process the wrong words. With another size, loading fails anyway.

DICTIONARIES = "smoe_dictionaries"  # their key in a checkpoint


def dictionary_checksums(task) -> dict[str, dict]:
    """Size and checksum of each dictionary of a task, as plain data for a checkpoint.

    The keys are languages if the task has a dictionary per language, else "source" and "target".
    """
    dictionaries = _dictionaries(task)  # languages may share one
    by_id = {id(d): checksum(d.symbols) for d in {id(d): d for d in dictionaries.values()}.values()}
    return {name: by_id[id(d)] for name, d in dictionaries.items()}


def checksum(symbols: Sequence[str]) -> dict:
    """Size and checksum of a dictionary's words, as plain data."""
    words = "\n".join(symbols).encode("utf-8", "surrogatepass")
    return {"symbols": len(symbols), "sha256": hashlib.sha256(words).hexdigest()}


def _dictionaries(task) -> dict[str, object]:
    by_language = getattr(getattr(task, "data_manager", task), "dicts", None)
    if not isinstance(by_language, Mapping):
        by_language = {}
        for side in ("source", "target"):
            with suppress(NotImplementedError):  # a task without text
                by_language[side] = getattr(task, f"{side}_dictionary", None)
    return {name: d for name, d in by_language.items() if hasattr(d, "symbols")}


def dictionary_mismatch(path: Path | str, content: Mapping, task) -> str | None:
    """A message if the checkpoint's dictionaries have the same size as the task's but other words.

    None if they agree, or if the checkpoint, such as an older one or one of stock fairseq, has no checksums.
    """
    saved, dictionaries = content.get(DICTIONARIES), _dictionaries(task)
    for name, now in dictionary_checksums(task).items():
        before = saved.get(name) if isinstance(saved, Mapping) else None
        if not isinstance(before, Mapping) or before.get("symbols") != now["symbols"]:
            continue
        if before.get("sha256") != now["sha256"]:
            file = getattr(dictionaries[name], "read_from", None) or f"the {name} dictionary"
            languages = ", --langs in the same order" if hasattr(task, "data_manager") else ""
            return (
                f"{path} was trained with another {name} dictionary than {file}: both have "
                f"{now['symbols']} words, but different ones or in another order; expected the dictionary "
                f"of its training{languages} and data made with it"
            )
    return None


@replaces("fairseq.data.dictionary:Dictionary.load")
def remember_file(original, cls, f):
    """Store the file's name as ``read_from``, after comparing its checksum."""
    loaded = original(cls, f)
    if isinstance(f, str):
        check_sum(Path(f))
        loaded.read_from = f
    return loaded


@replaces("fairseq.checkpoint_utils:load_model_ensemble_and_task")
def compare_when_loaded(original, *arguments, **options):
    """Check models that commands other than ``fairseq-train`` load.

    Raises:
        UsageError: the settings of a checkpoint do not define a task and a model, its dictionaries differ
            from the task's, or a weight is NaN or infinite.
    """
    from fairseq.checkpoint_utils import get_maybe_sharded_checkpoint_filename

    # They import fairseq's models, which import the module that is replaced here.
    from smoe_fairseq.models.checks import as_loaded
    from smoe_fairseq.translate.load import check_names

    bound = inspect.signature(original).bind(*arguments, **options)
    bound.apply_defaults()
    bound = bound.arguments
    paths = [
        get_maybe_sharded_checkpoint_filename(name, bound["suffix"], 0, bound["num_shards"])
        for name in bound["filenames"]
    ]
    contents = [bound["state"] or content_of(path) for path in paths]
    task = bound["task"]
    current = getattr(task, "cfg", None) or getattr(task, "args", None)
    current = current or saved_task(contents[0])[0]
    messages = []
    for path, content in zip(paths, contents):
        check_plugins(path, content)
        if others := other_flags(saved_task(content)[0], current):
            had = " ".join(others.values())
            messages.append(f"{path}: its training had {had}; expected the same here")
            if others.keys() & READING:
                raise UsageError(messages[-1])
    overrides = bound["arg_overrides"] or {}
    # fairseq-validate overrides settings by all its flags; other commands by --model-overrides alone.
    if bound["task"] is None:
        overrides = evaluate(overrides.get("model_overrides") or "{}")
    if contents[0]:
        saved = contents[0].get("cfg") or {"args": contents[0].get("args")}
        check_names(saved, overrides, "--model-overrides ")
    try:
        with as_loaded():
            models, config, task = original(*arguments, **options)
    except UsageError as error:
        raise (UsageError(messages[0]) if messages else error) from error
    for path, content, model in zip(paths, contents, models):
        if mismatch := dictionary_mismatch(path, content, task):
            raise UsageError(mismatch)
        check_finite(path, model.named_parameters())
    return models, config, task


_GROUPS = ("criterion", "optimizer", "lr_scheduler")
_SWITCHES = {
    "model": ("share_all_embeddings", "share_decoder_input_output_embed", "freeze"),
    "common": ("bf16", "fp16", "amp", "memory_efficient_bf16", "memory_efficient_fp16"),
}


def flags_of_other_state(content: Mapping, config: Mapping) -> list[str]:
    """The flags of a checkpoint's training that decide what its optimizer's state is, and differ here.

    Args:
        config: fairseq's ``FairseqConfig`` of a run.
    """
    both = (content.get("cfg") or {}, config)
    if not both[0]:
        return []
    before, now = (
        {group: values_of(each.get(group)).get("_name") for group in _GROUPS}
        | {n: values_of(each.get(g)).get(n) for g, names in _SWITCHES.items() for n in names}
        for each in both
    )
    return [
        f for name, f in differing_flags(before, now).items() if before[name] or name not in _GROUPS
    ]
