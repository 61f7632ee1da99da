"""``smoe import``: an MoE checkpoint of another code as one of ours."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from smoe_fairseq.system.quiet import quietly

with quietly():
    from smoe_fairseq.checkpoint.write import check_output
    from smoe_fairseq.conversion.foreign_set import files_of
    from smoe_fairseq.conversion.import_moe import import_moe
    from smoe_fairseq.conversion.written import write_converted


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "path",
        type=Path,
        metavar="CHECKPOINT",
        help="of fairseq's MoE branch (NLLB-200) or of the SMoE paper's code: a single file, or a set by its "
        "name without -shared and -rank-N",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="what to write")
    parser.add_argument("--force", action="store_true", help="overwrite FILE")


def run(args: Namespace) -> None:
    """Writes FILE, and says what it holds."""
    read = files_of(args.path)
    check_output(read, [args.output], args.force)
    with quietly():
        state = import_moe(args.path)
    write_converted(state, args.output)
    layers = sum(name.endswith(".moe.experts.w1") for name in state["model"])
    print(f"{args.output}: {layers} MoE layers, of {len(read)} file{'s' * (len(read) > 1)}")
