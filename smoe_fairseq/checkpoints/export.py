"""``smoe export``: checkpoints for stock fairseq, models for CTranslate2, and safetensors."""

import importlib.util
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import torch
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from fairseq.models import ARCH_CONFIG_REGISTRY

from smoe_fairseq.checkpoints import sets
from smoe_fairseq.checkpoints.huggingface import FILES, is_export, task_of, write_huggingface
from smoe_fairseq.checkpoints.model import STOCK, model_values, transformer_options
from smoe_fairseq.checkpoints.tensors import config_file, write_safetensors
from smoe_fairseq.compat.checkpoint_names import files_read
from smoe_fairseq.errors import UsageError, quietly
from smoe_fairseq.files import whole_folder
from smoe_fairseq.flags import values_of
from smoe_fairseq.modules.activation import GATED
from smoe_fairseq.translate.load import data_of, text_settings

_CRITERION = "label_smoothed_cross_entropy"


def as_stock(path: Path) -> dict:
    """The content of a checkpoint of ``transformer``, without optimizer state.

    Args:
        path: a checkpoint of a dense ``smoe_transformer``, pre-norm or post-norm.

    Raises:
        UsageError: it is another model, has experts, or cannot be read.
    """
    state = sets.weights_of(path)
    if model_values(path, state)[0] == STOCK:
        raise UsageError(f"{path} holds fairseq's transformer already; expected a smoe_transformer")
    if not state.get("cfg"):
        raise UsageError(f"{path} has no cfg, where fairseq 0.12.2 keeps the options")
    options = transformer_options(path, state)
    if options.get("activation_fn") in GATED:
        raise UsageError(f"{path}: --activation-fn {options['activation_fn']}: fairseq has none")
    model = Namespace(**options, arch=STOCK, _name=STOCK)
    ARCH_CONFIG_REGISTRY[STOCK](model)
    state["cfg"] = _plain_config(state, model)
    state["args"] = None
    for entry in state.get("optimizer_history", []):
        entry["criterion_name"] = LabelSmoothedCrossEntropyCriterion.__name__
    return state


def _plain_config(state: Mapping, model: Namespace) -> dict:
    """All parts of the config, without references to the plugin."""
    cfg = {name: _without_plugin(part) for name, part in state["cfg"].items()}
    # fairseq keeps the whole command line as the model; CTranslate2 reads the task's options there.
    task = dict(values_of(cfg.get("task")))
    model = Namespace(**{"task": task.pop("_name", None), **task, **vars(model)})
    known = {f.name for f in fields(LabelSmoothedCrossEntropyCriterionConfig)}
    values = values_of(cfg.get("criterion"))
    criterion = {name: value for name, value in values.items() if name in known}
    return {**cfg, "model": model, "criterion": {**criterion, "_name": _CRITERION}}


def _without_plugin(part):
    """A part of the config without our flags; tasks older than hydra hold the whole command line."""
    values = vars(part) if isinstance(part, Namespace) else part
    if not isinstance(values, Mapping):
        return part
    replaced = {"user_dir": None, "arch": STOCK, "criterion": _CRITERION}
    values = {
        name: replaced.get(name, value)
        for name, value in values.items()
        if not name.startswith(("moe_", "smoe_", "cmr_", "encoder_moe", "decoder_moe"))
    }
    return Namespace(**values) if isinstance(part, Namespace) else values


def write_ctranslate2(path: Path, output: Path, force: bool, data: Path | None) -> None:
    """Write the folder ``output``, by CTranslate2's converter: a dense model in float32, and vocabularies.

    Args:
        path: see `as_stock`.
        force: whether an existing folder is replaced.
        data: folder of the dictionaries; by default that of the checkpoint, or of the training data.

    Raises:
        UsageError: as `as_stock`; or the dictionaries are missing, ctranslate2 cannot convert the model,
            or the folder cannot be written.
    """
    state = as_stock(path)
    options = state["cfg"]["model"]
    folder = data_of(path, options, data)
    task_of(path, state, data)  # compares the dictionaries
    from ctranslate2.converters import FairseqConverter

    with whole_folder(output, force, f"--output {output}") as partial:
        stock = partial.with_name(f"{partial.name}.pt")
        try:
            torch.save({"args": options, "model": state["model"]}, stock)
            fixed = text_settings(folder, options).get("fixed_dictionary")
            converter = FairseqConverter(str(stock), folder, fixed_dictionary=fixed)
            converter.convert(str(partial), force=True)
        except (ValueError, NotImplementedError) as error:
            reason = " ".join(str(error).split())
            raise UsageError(f"{path}: CTranslate2 does not convert this model: {reason}") from None
        finally:
            stock.unlink(missing_ok=True)


_PACKAGES = {  # for each format: the package that it needs, and pip's arguments
    "ctranslate2": ("ctranslate2", "ctranslate2"),
    "huggingface": ("transformers", "'transformers>=5,<6' safetensors"),
    "safetensors": ("safetensors", "safetensors"),
}
_VOCABULARIES = {f"{kind}_vocabulary" for kind in ("shared", "source", "target")}
_FOLDERS = {  # formats that are folders: how to recognise one, and its files
    "ctranslate2": (
        lambda folder: (folder / "model.bin").is_file(),
        {"config.json", "model.bin"} | {f"{v}.{e}" for v in _VOCABULARIES for e in ("json", "txt")},
    ),
    "huggingface": (is_export, FILES),
}
_WRITTEN = {
    "fairseq": "fairseq's transformer, for its commands without --user-dir",
    "ctranslate2": "a model for CTranslate2, with its vocabularies",
    "huggingface": "a model for transformers, with its tokenizer",
    "safetensors": "weights, with all options in {options}",
}


def add_export_arguments(parser: ArgumentParser) -> None:
    sets.add_file_arguments(
        parser,
        "a checkpoint, one of --expert-parallel by its name without -rank-N; or a run, for huggingface",
        "file to write; a folder for ctranslate2 and huggingface",
    )
    parser.add_argument(
        "--to",
        required=True,
        choices=tuple(_WRITTEN),
        help="fairseq: a checkpoint of its own transformer (dense models only); ctranslate2: a folder for "
        "CTranslate2 (dense models only); huggingface: a folder for transformers' from_pretrained; "
        "safetensors: the weights, and a JSON file of all options",
    )
    words = "dict.*.txt and spm.model for ctranslate2 and huggingface; default: the run's"
    parser.add_argument("--data", type=Path, metavar="DIR", help=f"folder with {words}")
    words = "write weights in float16, half the size; with --to huggingface or safetensors"
    parser.add_argument("--fp16", action="store_true", help=words)


def run_export(args: Namespace) -> None:
    path, output, read = args.path, args.output, files_read(args.path)
    if args.fp16 and args.to not in ("huggingface", "safetensors"):
        raise UsageError(f"--fp16 with --to {args.to}: expected --to huggingface or safetensors")
    if args.data is not None and args.to not in _FOLDERS:
        raise UsageError(f"--data with --to {args.to}: it needs no dictionaries; leave --data out")
    package, install = _PACKAGES.get(args.to, ("torch", ""))
    if importlib.util.find_spec(package) is None:
        raise UsageError(f"--to {args.to}: the package {package} is missing; pip install {install}")
    if args.to in _FOLDERS:
        is_one, files = _FOLDERS[args.to]
        if output.exists() and not (args.force and is_one(output)):
            advice = "--force replaces such an export only" if args.force else "--force replaces it"
            raise UsageError(f"--output: {output} exists already; {advice}")
        if others := {file.name for file in output.glob("*")} - files:
            raise UsageError(f"--output: {output} has {min(others)}, which --force would remove")
    else:
        if args.to == "safetensors" and output.suffix == ".json":
            raise UsageError(f"--output {output}: the options get this name; expected .safetensors")
        files = [output, config_file(output)] if args.to == "safetensors" else [output]
        sets.check_output(read, files, args.force)
    with quietly():
        if args.to == "huggingface":
            write_huggingface(path, output, args.force, args.fp16, args.data)
        elif args.to == "ctranslate2":
            write_ctranslate2(path, output, args.force, args.data)
        elif args.to == "safetensors":
            write_safetensors(path, output, args.force, args.fp16)
        else:
            sets.write_converted(as_stock(path), output, args.force)
    print(f"{output}: {_WRITTEN[args.to].format(options=config_file(output))}")
