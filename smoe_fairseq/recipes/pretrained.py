"""Fine-tuning: data sets whose subwords and first weights are a trained model's (docs/finetune.md)."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from smoe_fairseq.errors import UsageError, quietly
from smoe_fairseq.flags import flag_of, with_value
from smoe_fairseq.forms import read_json
from smoe_fairseq.recipes.datasets import Dataset
from smoe_fairseq.recipes.folders import Folders
from smoe_fairseq.recipes.program_flags import Flags, arguments, flag_values, value_of

MODEL, RECORD = "pretrained.pt", "pretrained.json"  # beside the binarised text
STARTED = "--pretrained"  # in a run's identity: the fingerprint of the model that it starts from
UPCYCLED = "upcycled.pt"  # in a run's folder: the model with experts, until it is trained
_FORM = {
    "source": str,
    "named": (None, str),  # by the data set's file, when a flag may have named another
    "fingerprint": str,
    "rows": int,
    "languages": [str],
    **{name: dict for name in ("task", "train", "model", "experts", "options")},
}
DENSE: Flags = {"moe-freq": 0}
# Where a data set says nothing else.
TRAIN: Flags = {"lr": 0.0001, "warmup-updates": 500, "max-update": 10000, "max-tokens": 4096}
VALIDATE = {"metric": "chrf", "sentences": 200, "every": 500, "patience": 5}


def source_of(dataset: Dataset) -> str | None:
    """The run, checkpoint or folder of transformers to fine-tune: ``PRETRAINED``, else the data set's."""
    return plain_path(dataset.settings.pretrained or dataset.pretrained)


def plain_path(path: str | None) -> str | None:
    """The path without ``~``, ``./`` and a ``/`` at its end, by which it is compared."""
    return path and os.path.normpath(os.path.expanduser(path))


def is_foreign(source: Path) -> bool:
    """Whether ``smoe import`` has to convert it: a folder of transformers."""
    return (source / "config.json").is_file()


def with_pretrained(dataset: Dataset, binary: Path | None = None) -> Dataset:
    """The data set with the settings of the model that its text in ``binary`` was prepared with, if any.

    Raises:
        UsageError: it was prepared without the given model or with another, or its file sets an architecture
            or other language tokens than the model's.
    """
    binary = binary or Folders(dataset).binary
    if not (binary / RECORD).exists():
        if dataset.pretrained and binary.exists():
            advice = "delete it to prepare it again"
            raise UsageError(f"{binary} was prepared without `pretrained`: {advice}")
        return dataset
    record, given = read_json(binary / RECORD, _FORM), source_of(dataset)
    before = record["source" if dataset.settings.pretrained else "named"]
    if given != plain_path(before):
        was = record["source"] if given else before
        fault = f"{binary} was prepared with `pretrained: {was}`"
        now = f"not {given}" if given else f"which {dataset.file} lacks now"
        raise UsageError(f"{fault}, {now}: delete it to prepare it again")
    if value_of(dataset.train, "arch", "smoe_transformer") != "smoe_transformer":
        raise UsageError(f"{dataset.file}: `train.arch`: leave it out; {record['source']} has one")
    for name, value in dataset.own("task").items():
        if (value or None) != (kept := record["task"].get(name, value) or None):
            fault = f"{dataset.file}: `task.{name}`: {record['source']} has {kept or 'none'}"
            raise UsageError(f"{fault}, not {value}; leave it out")
    places = {} if record["experts"] == DENSE else record["experts"]  # which layers have experts
    places = {name: freq for name, freq in places.items() if name.endswith("moe-freq")}
    # Others than the model's are refused in training (`check_options`).
    sizes = {n: value for n, value in record["model"].items() if dataset.train.get(n) is None}
    train = {"arch": "smoe_transformer", **TRAIN, **record["train"], **places, **dataset.train}
    return replace(
        dataset,
        start=record,
        task=dataset.task | record["task"],
        train=train | sizes,
        validate=VALIDATE | dataset.validate,
    )


def started(dataset: Dataset, words: Sequence[str]) -> list[str]:
    """The flag in a run's identity for the model that it starts from; none if ``words`` restore another."""
    restored = flag_values(words).keys() & {"--restore-file", "--finetune-from-model"}
    return [] if restored or not dataset.start else [STARTED, dataset.start["fingerprint"]]


def check_options(dataset: Dataset, words: Sequence[str]) -> None:
    """Raise UsageError if the words of ``fairseq-train`` describe another model than the pretrained one."""
    with quietly():
        from smoe_fairseq.analysis.cost import config_of, parse_model  # imports fairseq
        from smoe_fairseq.checkpoints.model import is_moe_option
    own = config_of(parse_model(words))
    for name, value in dataset.start["options"].items():
        if (given := getattr(own, name)) != value:
            has = f"{dataset.start['source']} has {value or 'none'}"
            advice = "leave it out"
            if is_moe_option(name):  # pruning changes them
                advice = f"expected its training's method, or {with_value(name, value)} added to it"
            raise UsageError(f"{with_value(name, given).strip()}: {has}; {advice}")


def upcycled_flags(dataset: Dataset, words: Sequence[str]) -> list[str] | None:
    """The flags of ``smoe upcycle`` among the words of ``fairseq-train``; None if it gives no experts."""
    if dataset.start["experts"] != DENSE:  # the pretrained model has them
        return None
    from smoe_fairseq.checkpoints.model import is_moe_option  # imports fairseq
    from smoe_fairseq.models.options import SMoETransformerConfig

    flags = flag_values(words)
    names = filter(is_moe_option, SMoETransformerConfig.names())
    moe = {name: flags[f] for name in names if (f := flag_of(name)) in flags}
    moe.pop("expert_parallel", None)
    layers = {name: int(value) for name, value in moe.items() if name.endswith("moe_freq")}
    config = SMoETransformerConfig(**layers)
    if not any(map(config.moe_freq_of, config.SIDES)):
        return None
    return arguments({flag_of(name)[2:]: value or True for name, value in moe.items()})
