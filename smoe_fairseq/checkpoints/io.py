"""Reading checkpoints: names, content, record of experts, and checksums of dictionaries."""

import hashlib
import inspect
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from torch import Tensor

from smoe_fairseq.checkpoints.content import MADE_OF
from smoe_fairseq.compat.checkpoint_names import rank_file, rank_of, set_name
from smoe_fairseq.compat.replacing import replaces
from smoe_fairseq.compat.safe_load import (
    InaccessibleCheckpoint,
    check_content,
    evaluate,
    is_archive,
    reading,
)
from smoe_fairseq.errors import UsageError
from smoe_fairseq.flags import flag_of
from smoe_fairseq.forms import Number, fault
from smoe_fairseq.modules.parallel import Placement
from smoe_fairseq.modules.registry import missing_plugin
from smoe_fairseq.subwords import check_sum


def open_checkpoint(path: Path | str) -> dict:
    """Load a checkpoint with memory-mapped tensors, after comparing its checksums.

    Only plain data is loaded (``weights_only=True``). Files of torch before 1.6 are read into memory.

    Raises:
        UsageError: the file is missing, or not a checkpoint of fairseq.
        UnreadableCheckpoint: it is cut off, damaged, refused, or not readable for this user; see its
            subclasses.
    """
    if Path(path).is_dir():
        raise UsageError(f"{path} is a folder; expected a checkpoint, such as checkpoint_best.pt")
    with reading(path):
        state = torch.load(path, map_location="cpu", mmap=is_archive(path), weights_only=True)
    check_content(path, state)
    return state


# A record in each file describes its experts, so that files of different sets cannot be combined.

RECORD = "smoe_experts"  # the record's key in a checkpoint
_LAYER = re.compile(r"\S+(?=\.experts\.)")
_FROM_0, _FROM_1 = Number(0, whole=True), Number(1, whole=True)
_RECORD = {
    **{"save": str, "num_updates": _FROM_0, "rank": _FROM_0, "parameters": [str]},
    **{"num_experts": _FROM_1, "world_size": _FROM_1, "other_layers?": {str: _FROM_1}},
}


@dataclass(frozen=True)
class Record:
    """The experts in a file; stored in the checkpoint under `RECORD` as a plain dictionary.

    Args:
        save: the name of the save, equal in all files of a set; names of later saves are greater.
        num_updates: the number of updates when it was saved.
        num_experts: E of the MoE layers, except for ``other_layers``.
        world_size, rank: the file has the experts of rank ``rank`` of ``world_size``.
        parameters: names of all parameters of the optimizer, in its order.
        other_layers: E of MoE layers with another number, by name (``encoder.layers.1.moe``).
    """

    save: str
    num_updates: int
    num_experts: int
    world_size: int
    rank: int
    parameters: list[str]
    other_layers: Mapping[str, int] = field(default_factory=dict)

    def placement(self, name: str, world_size: int, rank: int = 0) -> Placement:
        """The placement of the experts of the layer in a tensor's name."""
        layer = _LAYER.search(name).group()
        return Placement(self.other_layers.get(layer, self.num_experts), world_size, rank)

    @property
    def numbers_of_experts(self) -> list[int]:
        """The different numbers of experts per layer, sorted."""
        return sorted({self.num_experts, *self.other_layers.values()})

    @classmethod
    def of(cls, state: Mapping, path: Path | str = "a checkpoint") -> "Record | None":
        """The record of a checkpoint; None if it has no experts or is older than these records.

        Raises:
            UsageError: it is damaged, or of a later version; the message names ``path``.
        """
        content = state.get(RECORD)
        if content is None:
            return None
        if not fault(content, _RECORD) and content.keys() <= {f.name for f in fields(cls)}:
            record = cls(**content)
            if record.rank < record.world_size:
                return record
        raise UsageError(f"{path}: its {RECORD} is damaged, or of a later version")


def check_plugins(path: Path | str, state: Mapping) -> None:
    """Raise UsageError if the checkpoint's model has a part of a plugin that is not imported.

    Nothing is imported because a checkpoint names it.
    """
    plugins = state.get(PLUGINS)
    if isinstance(plugins, Mapping) and (sentence := missing_plugin(plugins)):
        raise UsageError(f"{path}: {sentence}")


def values_of(part) -> Mapping:
    """The settings in a part of a checkpoint's config, a mapping or a namespace; else empty."""
    return part if isinstance(part, Mapping) else getattr(part, "__dict__", {})


def record_of(path: Path | str) -> Record | None:
    """The record of a file; None if the file is missing, cut off, damaged, or has no record.

    Raises:
        InaccessibleCheckpoint: the file cannot be read now, but may be intact, so it must not be removed.
    """
    try:
        return Record.of(open_checkpoint(path), path)
    except InaccessibleCheckpoint:
        raise
    except UsageError:
        return None


def made_of(path: Path) -> dict[str, str]:
    """The fingerprints of the checkpoints that `smoe average` or `consolidate` read, by name; else empty."""
    return dict(values_of(content_of(path).get(MADE_OF))) if path.is_file() else {}


def newest_whole(saves: Sequence[Collection[str]]) -> str | None:
    """The newest save that every rank has; None if there is none."""
    return max(set.intersection(*map(set, saves)), default=None)


def check_set(records: Mapping[Path, Record | None]) -> None:
    """Check that files, in the order of ranks, are one complete set.

    Raises:
        UsageError: they are not; the message names the first file of another set, or a missing one.
    """
    first_path, first = next(iter(records.items()))
    for rank, (path, record) in enumerate(records.items()):
        if record is None:
            raise UsageError(f"{path} has no record of its experts ({RECORD})")
        if record.rank != rank or (rank_of(path) or 0) != rank:
            raise UsageError(f"{path} has rank {record.rank}'s experts: it was moved or copied")
        if record.world_size != first.world_size:
            raise UsageError(f"{path} belongs to {record.world_size} files, unlike {first_path}")
        if record.save != first.save:
            updates = f"update {record.num_updates}, not {first.num_updates}"
            raise UsageError(f"{path} was saved at another time than {first_path} ({updates})")
    if len(records) < first.world_size:  # not more, since each rank is below the world size
        missing = rank_file(set_name(first_path), len(records))
        raise UsageError(f"{missing} is missing: the set has {first.world_size} files")


# Checksums of the dictionaries are saved in a checkpoint and compared when it is loaded.
#
# A dictionary of the same size with other words, or in another order, fits all tensors: without this check
# the model would silently process the wrong words. With another size, loading fails anyway.

PLUGINS = "smoe_plugins"  # key of a result of `plugins_of`
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
    for path, content in zip(paths, contents):
        check_plugins(path, content)
    others = other_flags(contents[0], bound["task"])
    overrides = bound["arg_overrides"] or {}
    # fairseq-validate overrides settings by all its flags; other commands by --model-overrides alone.
    if bound["task"] is None:
        overrides = evaluate(overrides.get("model_overrides") or "{}")
    if contents[0]:
        saved = contents[0].get("cfg") or {"args": contents[0].get("args")}
        check_names(saved, overrides, "--model-overrides ")
    message = f"{paths[0]}: its training had {' '.join(others.values())}; expected the same here"
    if others.keys() & LANGUAGE_TOKENS:
        raise UsageError(message)
    try:
        with as_loaded():
            models, config, task = original(*arguments, **options)
    except UsageError as error:
        raise (UsageError(message) if others else error) from error
    for path, content, model in zip(paths, contents, models):
        if mismatch := dictionary_mismatch(path, content, task):
            raise UsageError(mismatch)
        check_finite(path, model.named_parameters())
    return models, config, task


# Task options that add a language's token to the text: with other values, a model silently translates badly.
LANGUAGE_TOKENS = {
    *("encoder_langtok", "decoder_langtok", "langtoks", "lang_tok_style"),
    "lang_tok_replacing_bos_eos",
}


def other_flags(content: Mapping, task) -> dict[str, str]:
    """The flags of a checkpoint's task, by option, that differ from those of the command line's ``task``.

    Empty if there is no task yet, or the checkpoint has none.
    """
    config = content.get("cfg")
    saved = values_of(content.get("args") if config is None else config.get("task"))
    current = values_of(getattr(task, "cfg", None) or getattr(task, "args", None))
    flags = {}
    if not saved or not current:
        return flags
    for name in ("task", "langs", *sorted(LANGUAGE_TOKENS)):
        before, now = (
            (each.get("_name") or each.get(name)) if name == "task" else each.get(name)
            for each in (saved, current)
        )
        if (before or None) != (now or None):
            flags[name] = _as_flag(name, before)
    if flags.keys() & {"encoder_langtok", "decoder_langtok"} or not saved.get("langtoks"):
        flags.pop("langtoks", None)  # fairseq sets it by these
    return flags


def _as_flag(name: str, value) -> str:
    """The flag that sets an option to a value."""
    flag, shown = flag_of(name), ",".join(value) if isinstance(value, list) else value
    return flag if value is True else f"{flag} {shown}" if value else f"no {flag}"


_GROUPS = ("criterion", "optimizer", "lr_scheduler")
_SWITCHES = {
    "model": ("share_all_embeddings", "share_decoder_input_output_embed"),
    "common": ("bf16", "fp16", "amp", "memory_efficient_bf16", "memory_efficient_fp16"),
}


def flags_of_other_state(content: Mapping, config: Mapping) -> list[str]:
    """The flags of a checkpoint's training that decide what its optimizer's state is, and differ here.

    Args:
        config: fairseq's ``FairseqConfig`` of a run.
    """
    flags, both = [], (content.get("cfg") or {}, config)
    for group in _GROUPS:
        before, now = (values_of(each.get(group)).get("_name") for each in both)
        if before and before != now:
            flags.append(_as_flag(group, before))
    for group, names in _SWITCHES.items() if both[0] else ():
        for name in names:
            before, now = (values_of(each.get(group)).get(name) for each in both)
            if bool(before) != bool(now):
                flags.append(_as_flag(name, bool(before)))
    return flags


def check_finite(path: Path | str, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raise UsageError if a weight is NaN or infinite; torch loads such weights silently."""
    for name, weight in weights:
        if not weight.isfinite().all():
            raise UsageError(
                f"{path}: {name} has NaN or infinite values: training has diverged; use an earlier one"
            )


def content_of(path: Path | str) -> Mapping:
    """The content of a checkpoint; empty if it is too old or cannot be read, which its loader reports."""
    try:
        return open_checkpoint(path) if is_archive(path) else {}  # older files have no checksums
    except (UsageError, OSError):
        return {}
