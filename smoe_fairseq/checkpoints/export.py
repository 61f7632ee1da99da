"""``smoe export``: checkpoints for stock fairseq, models for CTranslate2, and safetensors."""

import importlib.util
import json
import os
import re
import stat
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
from torch import Tensor

from smoe_fairseq.checkpoints.io import files_read
from smoe_fairseq.checkpoints.model import (
    SIDES,
    STOCK,
    known_options,
    model_values,
    plain_config,
    transformer_options,
)
from smoe_fairseq.checkpoints.sets import (
    add_output_arguments,
    check_output,
    place_of,
    weights_of,
    write_converted,
)
from smoe_fairseq.errors import UsageError, blaming, quietly
from smoe_fairseq.files import whole_files, whole_folder
from smoe_fairseq.models.hub import data_of
from smoe_fairseq.models.options import SMoETransformerConfig

_CRITERION = "label_smoothed_cross_entropy"


def as_stock(path: Path, reader: str = "fairseq's transformer") -> dict:
    """The content of a checkpoint of ``transformer``, without optimizer state.

    Args:
        path: a checkpoint of a dense ``smoe_transformer``, pre-norm or post-norm.
        reader: what the content is for, in the sentence that refuses experts.

    Raises:
        UsageError: it is another model, has experts, or cannot be read.
    """
    state = weights_of(path)
    if model_values(path, state)[0] == STOCK:
        raise UsageError(f"{path} holds fairseq's transformer already; expected a smoe_transformer")
    if not state.get("cfg"):
        raise UsageError(
            f"{path} has no cfg, in which fairseq 0.12.2 keeps all options; expected one"
        )
    if any(".moe." in name for name in state["model"]):
        raise UsageError(
            f"{path} has experts, for which {reader} has no place; expected a dense model "
            "(--moe-freq 0), or --to safetensors"
        )
    model = Namespace(**transformer_options(path, state), arch=STOCK, _name=STOCK)
    ARCH_CONFIG_REGISTRY[STOCK](model)
    state["cfg"] = _plain_config(state, model)
    state["args"] = None
    for entry in state.get("optimizer_history", []):
        entry["criterion_name"] = LabelSmoothedCrossEntropyCriterion.__name__
    return state


def _plain_config(state: Mapping, model: Namespace) -> dict:
    """All parts of the config; nothing in them asks for the plugin."""
    cfg = {name: _without_plugin(part) for name, part in state["cfg"].items()}
    # fairseq keeps the whole command line as the model; CTranslate2 reads the task's options there.
    task = cfg.get("task") or {}
    task = dict(task if isinstance(task, Mapping) else vars(task))
    model = Namespace(**{"task": task.pop("_name", None), **task, **vars(model)})
    known = {f.name for f in fields(LabelSmoothedCrossEntropyCriterionConfig)}
    criterion = cfg.get("criterion") or {}
    values = criterion if isinstance(criterion, Mapping) else vars(criterion)
    criterion = {name: value for name, value in values.items() if name in known}
    return {**cfg, "model": model, "criterion": {**criterion, "_name": _CRITERION}}


def _without_plugin(part):
    """A part of the config without our flags; tasks older than hydra hold the whole command line."""
    values = vars(part) if isinstance(part, Namespace) else part
    if not isinstance(values, Mapping):
        return part
    named = {"user_dir": None, "arch": STOCK, "criterion": _CRITERION}
    values = {
        name: named.get(name, value)
        for name, value in values.items()
        if not name.startswith(("moe_", "smoe_", "cmr_", "encoder_moe", "decoder_moe"))
    }
    return Namespace(**values) if isinstance(part, Namespace) else values


# A model as safetensors and JSON: weights that no program can hide in, and all options as plain
# data.

_UNUSED = (".version", "._float_tensor")  # buffers that say nothing of the model


def config_file(output: Path) -> Path:
    """The JSON beside the weights."""
    return output.with_suffix(".json")


def write_safetensors(path: Path, output: Path, half: bool = False) -> None:
    """Writes ``output`` and the JSON beside it, both or none.

    The JSON has ``model``, all options; ``blocks``, the arguments of `StratifiedMoE` by the prefix of each
    block's parameters; ``tied``, names whose tensor is another name's and is there once; and
    ``dictionaries``, what the checkpoint says of them (words and checksum).

    Args:
        half: see `halved`.

    Raises:
        UsageError: ``path`` cannot be read, the system refuses the files, or see `halved`.
    """
    state = weights_of(path)
    options = known_options(path, state)
    tensors, tied = unique_tensors(state["model"])
    content = {
        "model": plain_config(options),
        "blocks": blocks(path, SMoETransformerConfig(**options), tensors),
        "tied": tied,
        "dictionaries": state.get("smoe_dictionaries", {}),
    }
    files = [output, config_file(output)]
    if half:
        tensors = halved(path, tensors)
    with whole_files(files, called=f"--output {output}", parents=True) as (weights, config):
        save_tensors(tensors, weights)
        Path(config).write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def blocks(
    path: Path, config: SMoETransformerConfig, tensors: Mapping[str, Tensor]
) -> dict[str, dict]:
    """Arguments of the `StratifiedMoE` of each MoE layer, as plain data, by the prefix of its parameters.

    A hash gate's ``hash_table`` is not among them: it is ``PREFIX.gates.0.table`` of the weights.
    """
    found = {}
    for side in SIDES:
        freq = config.moe_freq_of(side)
        with blaming(path):
            of_layers = config.moe_options(side)
        for number, options in enumerate(of_layers, start=1):
            prefix = f"{side}.layers.{number * freq - 1}.moe"
            options |= {"activation_fn": str(config.activation_fn), "expert_parallel": False}
            sizes = {
                name: getattr(config, f"{side}_{name}") for name in ("embed_dim", "ffn_embed_dim")
            }
            found[prefix] = sizes | options
    missing = {name.partition(".moe.")[0] + ".moe" for name in tensors if ".moe." in name} ^ set(
        found
    )
    if missing:
        raise UsageError(f"{path}: {min(missing)} is not where its options have a MoE layer")
    return found


def unique_tensors(model: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors in order, and by name those that are another one, such as tied embeddings."""
    tensors, tied, places = {}, {}, {}
    for name, tensor in model.items():
        if name.endswith(_UNUSED):
            continue
        owner = places.setdefault(place_of(tensor), name)
        if owner == name:
            tensors[name] = tensor.contiguous()
        else:
            tied[name] = owner
    return tensors, tied


def halved(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those in floating point as float16.

    Raises:
        UsageError: a weight is too large for it.
    """
    found = {n: t.half() if t.is_floating_point() else t for n, t in tensors.items()}
    for name, tensor in found.items():
        if not tensor.isfinite().all():
            most = torch.finfo(torch.float16).max
            raise UsageError(
                f"{path}: {name} has values above {most:.0f}, the largest of --fp16; leave it out"
            )
    return found


def save_tensors(tensors: dict, path: str) -> None:
    """As the library does, with the rights of any new file; what the system says is an OSError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    Path(path).touch()
    rights = stat.S_IMODE(os.stat(path).st_mode)
    try:
        save_file(tensors, path, metadata={"format": "pt"})
        os.chmod(path, rights)  # the library's are the owner's alone
    except SafetensorError as error:
        if number := re.search(r"(?:os error|Os { code:) (\d+)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from None
        raise


# A folder of CTranslate2, whose own converter reads a checkpoint of fairseq's transformer.

_CT2_WEIGHTS = "model.bin"  # in each such folder


def write_ctranslate2(path: Path, output: Path, force: bool) -> None:
    """Writes the folder ``output`` whole: a dense model in float32, and its vocabularies.

    Args:
        path: a checkpoint, as of `as_stock`. The dictionaries are beside it, or where training had them.
        force: whether another such folder may be replaced.

    Raises:
        UsageError: as of `as_stock`, the dictionaries are missing, the package ctranslate2 is missing
            or refuses the model, or the system refuses the folder.
    """
    if importlib.util.find_spec("ctranslate2") is None:
        raise UsageError(
            "--to ctranslate2: the package ctranslate2 is missing; install it with "
            "pip install 'smoe-fairseq[ctranslate2]'"
        )
    if output.exists() and not (force and (output / _CT2_WEIGHTS).is_file()):
        advice = "--force replaces a model of CTranslate2 only" if force else "--force replaces it"
        raise UsageError(f"--output: {output} is there already; {advice}")
    state = as_stock(path, "CTranslate2")
    options = state["cfg"]["model"]
    try:
        folder = data_of(path, str(getattr(options, "data", None) or ""))
    except UsageError:
        raise UsageError(
            f"{path}: its dictionaries are missing; expected dict.*.txt beside it"
        ) from None
    from ctranslate2.converters import FairseqConverter

    with whole_folder(output, force, f"--output {output}") as partial:
        stock = partial.with_name(f"{partial.name}.pt")
        try:
            torch.save({"args": options, "model": state["model"]}, stock)
            FairseqConverter(str(stock), folder).convert(str(partial), force=True)
        except (ValueError, NotImplementedError) as error:
            reason = " ".join(str(error).split())
            raise UsageError(f"{path}: CTranslate2 does not convert this model: {reason}") from None
        finally:
            stock.unlink(missing_ok=True)


# ``smoe export``: a checkpoint for other tools.


def add_export_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "path",
        type=Path,
        metavar="CHECKPOINT",
        help="a checkpoint; one of --expert-parallel by its name without -rank-N; with --to huggingface also "
        "the folder of a run",
    )
    parser.add_argument(
        "--to",
        required=True,
        choices=("fairseq", "ctranslate2", "huggingface", "safetensors"),
        help="fairseq: a checkpoint of its own transformer (dense models only); ctranslate2: a folder for "
        "CTranslate2 (dense models only); huggingface: a folder for transformers' from_pretrained; "
        "safetensors: the weights, with a JSON file of all options beside them",
    )
    parser.add_argument(
        "--fp16",
        action="store_true",
        help="write weights in float16, half the size; with --to huggingface or safetensors",
    )
    add_output_arguments(parser, "file to write; a folder for ctranslate2 and huggingface")


def run_export(args: Namespace) -> None:
    """Write FILE, and say what it is."""
    path, output, read = args.path, args.output, files_read(args.path)
    if args.fp16 and args.to not in ("huggingface", "safetensors"):
        raise UsageError(f"--fp16 with --to {args.to}: expected --to huggingface or safetensors")
    if args.to == "huggingface":
        from smoe_fairseq.checkpoints.huggingface import write_huggingface

        with quietly():
            write_huggingface(path, output, args.force, args.fp16)
        print(f"{output}: a model for transformers, with its tokenizer")
    elif args.to == "ctranslate2":
        with quietly():
            write_ctranslate2(path, output, args.force)
        print(f"{output}: a model for CTranslate2, with its vocabularies")
    elif args.to == "fairseq":
        check_output(read, [output], args.force)
        with quietly():
            write_converted(as_stock(path), output)
        print(f"{output}: fairseq's transformer, for its commands without --user-dir")
    else:
        if importlib.util.find_spec("safetensors") is None:
            raise UsageError(
                "--to safetensors: the package safetensors is missing; pip install "
                "'smoe-fairseq[export]' has it"
            )
        if output.suffix == ".json":
            raise UsageError(
                f"--output {output}: the options are to have this name; expected .safetensors"
            )
        check_output(read, [output, config_file(output)], args.force)
        with quietly():
            write_safetensors(path, output, args.fp16)
        print(f"{output}: weights, with all options in {config_file(output)}")
