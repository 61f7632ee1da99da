"""``smoe import``: converts a checkpoint of another codebase, or a folder for transformers, to ours."""

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path

from smoe_fairseq.checkpoints.foreign import files_of, import_checkpoint
from smoe_fairseq.checkpoints.huggingface_import import read_folder
from smoe_fairseq.checkpoints.sets import add_file_arguments, check_output, write_converted
from smoe_fairseq.errors import UsageError, naming_file, quietly
from smoe_fairseq.files import read_plain, whole_files


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
    with quietly(), naming_file(args.path, "its content"):
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
