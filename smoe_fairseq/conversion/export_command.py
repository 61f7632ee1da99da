"""``smoe export``: a checkpoint for other tools."""

import importlib.util
from argparse import ArgumentParser, Namespace
from pathlib import Path

from smoe_fairseq.system.errors import UsageError
from smoe_fairseq.system.quiet import quietly

with quietly():
    from smoe_fairseq.checkpoint.names import files_read
    from smoe_fairseq.checkpoint.write import check_output
    from smoe_fairseq.conversion.stock import as_stock
    from smoe_fairseq.conversion.written import write_converted


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "path",
        type=Path,
        metavar="CHECKPOINT",
        help="a file, or the name of a set of --expert-parallel, without -rank-N",
    )
    parser.add_argument(
        "--to",
        required=True,
        choices=("fairseq", "safetensors"),
        help="fairseq: its own transformer, of a dense model; safetensors: weights, and a JSON of all "
        "options beside them",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="what to write")
    parser.add_argument("--force", action="store_true", help="overwrite FILE")


def run(args: Namespace) -> None:
    """Writes FILE, and says what it is."""
    read = files_read(args.path)
    if args.to == "fairseq":
        check_output(read, [args.output], args.force)
        with quietly():
            state = as_stock(args.path)
        write_converted(state, args.output)
        print(f"{args.output}: fairseq's transformer, for its commands without --user-dir")
        return
    if importlib.util.find_spec("safetensors") is None:
        raise UsageError(
            "--to safetensors: the package safetensors is not here; pip install 'smoe-fairseq[export]' has it"
        )
    from smoe_fairseq.conversion.safe_tensors import config_file, write_safetensors

    if args.output.suffix == ".json":
        raise UsageError(
            f"--output {args.output}: the options are to have this name; expected .safetensors"
        )
    check_output(read, [args.output, config_file(args.output)], args.force)
    with quietly():
        write_safetensors(args.path, args.output)
    print(f"{args.output}: weights, with all options in {config_file(args.output)}")
