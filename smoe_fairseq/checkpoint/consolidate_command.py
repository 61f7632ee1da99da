"""``smoe consolidate``: one ordinary checkpoint of a run with sharded experts."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from smoe_fairseq.checkpoint.names import PENDING, rank_file, rank_files, set_name
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
        help="the set of files: its name without -rank-N",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="what to write")
    parser.add_argument(
        "--optimizer-state",
        action="store_true",
        help="keep the optimizer's state, for training on in one process",
    )
    parser.add_argument("--force", action="store_true", help="overwrite FILE")


def run(args: Namespace) -> None:
    """Reads the set, writes FILE, and says what it holds."""
    name = set_name(args.path)
    if not rank_files(name) and not rank_files(name, PENDING):
        raise UsageError(f"{rank_file(name, 0)} is missing: {name} stands for no set")
    # By rank 0's file, since a checkpoint of the plain name may lie beside it, from an earlier time perhaps.
    shards = Shards.open(rank_file(name, 0), args.optimizer_state)
    write(shards, args.output, 1, args.force)
    record = shards.record
    numbers = " or ".join(map(str, record.numbers_of_experts))
    print(
        f"{args.output}: {numbers} experts per MoE layer, of {len(shards.files)} "
        f"processes, update {record.num_updates}"
    )
