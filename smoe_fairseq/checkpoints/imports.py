"""``smoe import``: a checkpoint of another code, or a folder of transformers, as a checkpoint of ours."""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path

from smoe_fairseq.checkpoints.foreign import files_of, import_moe
from smoe_fairseq.checkpoints.huggingface_import import read_folder
from smoe_fairseq.checkpoints.sets import check_output, write_converted
from smoe_fairseq.errors import UsageError, quietly
from smoe_fairseq.files import write_whole


def add_import_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "path",
        type=Path,
        metavar="CHECKPOINT",
        help="a checkpoint of fairseq's MoE branch (NLLB-200) or of the SMoE paper's code, one of "
        "several files by its name without -shared and -rank-N; or a folder of transformers: of "
        "smoe export --to huggingface, or of NllbMoeForConditionalGeneration",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="file to write")
    parser.add_argument("--force", action="store_true", help="overwrite FILE")


def run_import(args: Namespace) -> None:
    """Writes FILE, and says what it holds."""
    if args.path.is_dir():
        read = [file for file in args.path.iterdir() if file.is_file()]
        check_output(read, [args.output], args.force)
        with quietly():
            state, text = read_folder(args.path)
        _write_text(text, args.output.absolute().parent)
    else:
        read = files_of(args.path)
        check_output(read, [args.output], args.force)
        with quietly():
            state = import_moe(args.path)
    write_converted(state, args.output, args.force)
    layers = sum(name.endswith(".moe.experts.w1") for name in state["model"])
    print(f"{args.output}: {layers} MoE layers, of {len(read)} file{'s' * (len(read) != 1)}")


def _write_text(text: Mapping[str, bytes], folder: Path) -> None:
    """Dictionaries and subwords beside FILE, where commands look for them; others are not replaced."""
    for name, content in text.items():
        file = folder / name
        if file.exists() and file.read_bytes() != content:
            raise UsageError(
                f"--output: {file} is there already and differs; choose another folder"
            )
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in text.items():
        write_whole(folder / name, content, called=f"--output {folder / name}")
