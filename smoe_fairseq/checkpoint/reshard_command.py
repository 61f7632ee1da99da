"""``smoe reshard``: the checkpoint for another number of processes, optimizer state included."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from smoe_fairseq.system.errors import UsageError
from smoe_fairseq.system.quiet import quietly

with quietly():
    from smoe_fairseq.checkpoint.shards import Shards
    from smoe_fairseq.checkpoint.write import write


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "path",
        type=Path,
        metavar="DIR/checkpoint_last.pt",
        help="a checkpoint of one process, or the set of files: its name without -rank-N",
    )
    parser.add_argument(
        "--world-size", type=int, required=True, metavar="M", help="processes to write it for"
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="what to write: its name without -rank-N; train on with its folder as --save-dir",
    )
    parser.add_argument("--force", action="store_true", help="overwrite what is there")


def run(args: Namespace) -> None:
    """Reads the set, writes that for M processes, and says what changes for training."""
    if args.world_size < 1:
        raise UsageError(
            f"--world-size {args.world_size}: expected a number of processes, 1 or more"
        )
    shards = Shards.open(args.path)
    files = write(shards, args.output, args.world_size, args.force)
    before = len(shards.files)
    print(
        f"{files[0]}{f' to {files[-1].name}' if len(files) > 1 else ''}: update "
        f"{shards.record.num_updates}, for {args.world_size} processes instead of {before}"
    )
    if args.world_size != before:
        print(
            f"for the same global batch, train on with --update-freq times "
            f"{before / args.world_size:g}"
        )
