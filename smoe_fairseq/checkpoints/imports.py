"""``smoe import``: converts a checkpoint of another codebase, or a folder for transformers, to ours.

`_LAYOUTS` lists what folders for transformers hold, by ``model_type``. transformers itself is not needed.
"""

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path
from types import ModuleType

from smoe_fairseq.checkpoints import huggingface_m2m, huggingface_ours
from smoe_fairseq.checkpoints.foreign import files_of, import_checkpoint, new_checkpoint
from smoe_fairseq.checkpoints.huggingface_weights import read_weights, refuse_pointers
from smoe_fairseq.checkpoints.model import OURS
from smoe_fairseq.checkpoints.sets import (
    add_file_arguments,
    check_output,
    check_tensors,
    write_converted,
)
from smoe_fairseq.checkpoints.trained_with import DICTIONARIES
from smoe_fairseq.compat.safe_load import check_content
from smoe_fairseq.errors import UsageError, naming_file, quietly
from smoe_fairseq.files import read_plain, whole_files
from smoe_fairseq.forms import check, read_json

# For each ``model_type`` of config.json a module with FORM, of config.json; ``model``, our options and the
# weights under our names; and ``text``, files for the checkpoint's folder, flags of the task, and checksums.
_LAYOUTS: dict[str, ModuleType] = {
    OURS: huggingface_ours,
    **dict.fromkeys(huggingface_m2m.KINDS, huggingface_m2m),
}
# Settings of any config that are refused, and what is expected.
_REFUSED = {
    "quantization_config": "weights that are not quantised",
    "auto_map": "a model of transformers itself, since no code of a folder is run",
}


def read_folder(folder: Path) -> tuple[dict, dict[str, bytes]]:
    """The content of a checkpoint of ``smoe_transformer``, and the text files that belong beside it, by name.

    The files of our own exports are ``dict.LANG.txt`` and ``spm.model``. Those of M2M-100 and NLLB-200 are
    described at `huggingface_m2m.text`.

    Raises:
        UsageError: a file is missing or damaged, or the folder holds another model.
    """
    refuse_pointers(folder)
    file, adapter = folder / "config.json", folder / "adapter_config.json"
    if adapter.exists():
        raise UsageError(
            f"{adapter}: expected a whole model; merge_and_unload of PEFT makes one of LoRA"
        )
    config = read_json(file)
    for option, what in _REFUSED.items():
        if config.get(option):
            raise UsageError(f"{file}: {option} is set; expected {what}")
    kind = config.get("model_type")
    if kind not in _LAYOUTS:
        known = ", ".join([f"{OURS} (smoe export)", *huggingface_m2m.KINDS])
        raise UsageError(f"{file}: model_type is {kind}; expected one of {known}")
    layout = _LAYOUTS[kind]
    check(config, layout.FORM[kind], file)
    weights = read_weights(folder)
    check_content(folder, {"model": weights}, has_config=False)
    check_tensors(folder, weights)
    options, weights = layout.model(folder, config, weights)
    files, task, checksums = layout.text(folder, weights)
    return new_checkpoint(folder, options, config, weights, task) | {DICTIONARIES: checksums}, files


def add_import_arguments(parser: ArgumentParser) -> None:
    add_file_arguments(
        parser,
        "a checkpoint of fairseq's MoE branch (NLLB-200) or of the SMoE paper's code, one of several files "
        "by its name without -shared and -rank-N, or fairseq's dense M2M-100 or NLLB-200; or a folder of "
        "transformers: M2M-100, NLLB-200, NLLB-MoE, or of smoe export --to huggingface",
    )


def run_import(args: Namespace) -> None:
    is_folder = args.path.is_dir()
    if args.path.suffix == ".safetensors" and not is_folder:
        raise UsageError(f"{args.path}: expected a checkpoint, or a whole folder for transformers")
    inside = args.path.glob("*")
    read = [file for file in inside if file.is_file()] if is_folder else files_of(args.path)
    if not (is_folder or args.path.suffix or read[0].exists()):
        raise UsageError(f"{args.path}: expected a file or folder of this machine (`hf download`)")
    check_output(read, [args.output], args.force)
    with quietly(), naming_file(args.path):
        state, contents = (read_folder if is_folder else import_checkpoint)(args.path)
    folder = args.output.absolute().parent
    files = [folder / name for name in contents if not _exists(folder / name, contents[name])]
    called = f"--output {folder}"
    with whole_files(files, called, parents=True, replace=False) as partials:
        for file, partial in zip(files, partials, strict=True):
            Path(partial).write_bytes(contents[file.name])
        write_converted(state, args.output, args.force)
    layers = sum(name.endswith(".moe.experts.w1") for name in state["model"])
    kind = f"{layers} MoE layers" if layers else "a dense model"
    print(f"{args.output}: {kind}, made from {len(read)} file{'s' * (len(read) != 1)}")


def _exists(file: Path, content: bytes) -> bool:
    """Whether a file exists; raises UsageError if it has other content."""
    if os.path.lexists(file) and read_plain(file) != content:
        raise UsageError(f"--output: {file} exists already and differs; choose another folder")
    return os.path.lexists(file)
