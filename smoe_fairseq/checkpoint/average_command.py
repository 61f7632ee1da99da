"""``smoe average``: one checkpoint whose weights are the mean of several."""

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from smoe_fairseq.checkpoint.names import PENDING, files_read, rank_of, set_name
from smoe_fairseq.system.errors import UsageError
from smoe_fairseq.system.quiet import quietly

with quietly():
    from smoe_fairseq.checkpoint.average import COUNTS, average
    from smoe_fairseq.checkpoint.write import check_output, write_content

# How fairseq names what it saves at the end of an epoch, and after so many updates.
KINDS = {
    "epoch": re.compile(r"checkpoint(\d+)\.pt"),
    "update": re.compile(r"checkpoint_\d+_(\d+)\.pt"),
}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="checkpoints, or sets of --expert-parallel by their names without -rank-N; or a run's folder "
        "with --last",
    )
    parser.add_argument(
        "--last", type=int, metavar="N", help="the N newest checkpoints of a folder"
    )
    parser.add_argument(
        "--by",
        choices=sorted(KINDS),
        help="with --last: those saved after so many updates, or at the end of epochs; by default those "
        "that there are",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="what to write")
    parser.add_argument("--force", action="store_true", help="overwrite FILE")


def run(args: Namespace) -> None:
    """Averages, writes, and says of what."""
    paths = chosen(args.paths, args.last, args.by)
    read = [file for path in paths for file in files_read(path)]
    check_output(read, [args.output], args.force)
    with tqdm(unit=" tensors", desc=args.output.name) as bar:

        def progress(count: int = 0) -> None:
            if count and not bar.total:
                bar.total = count * (len(paths) + 1)  # once more to read what has been written
            bar.update(0 if count else 1)

        state = average(paths, progress)
        write_content(state, args.output, progress)
    print(f"{args.output}: mean of {len(paths)} checkpoints, {paths[0]} to {paths[-1].name}")
    if any(name.endswith(COUNTS) for name in state["model"]):
        print(f"the experts' counts (*{COUNTS}), which are whole numbers, are those of {paths[-1]}")


def chosen(paths: Sequence[Path], last: int | None, by: str | None) -> list[Path]:
    """The checkpoints to average, the newest last; a set by its name without ``-rank-N``.

    Raises:
        UsageError: there are too few, or it is not clear which are meant.
    """
    folders = [path for path in paths if path.is_dir()]
    if last is None:
        if by is not None:
            raise UsageError(f"--by {by}: expected --last with it, and a run's folder")
        if folders:
            raise UsageError(
                f"{folders[0]} is a folder: add --last N for its newest checkpoints, or name files"
            )
        return _named(paths)
    if last < 2:
        raise UsageError(f"--last {last}: expected 2 or more")
    if len(paths) > 1 or not folders:
        raise UsageError(f"--last {last}: expected one folder, not {', '.join(map(str, paths))}")
    return _newest(folders[0], last, by)


def _named(paths: Sequence[Path]) -> list[Path]:
    """The same without the further files of a set, which a shell's ``*`` names one by one."""
    found = []
    for path in paths:
        is_rank = rank_of(path) is not None
        name = set_name(path) if is_rank else path
        if name in found and not is_rank:
            raise UsageError(f"{path} is named twice: it would count twice")
        if name not in found:
            found.append(name)
    if len(found) < 2:
        raise UsageError(
            f"{found[0]} is one checkpoint: expected two or more, or a folder with --last N"
        )
    return found


def _newest(folder: Path, last: int, by: str | None) -> list[Path]:
    names = {set_name(file).name for file in folder.iterdir() if file.suffix in (".pt", PENDING)}
    found = {kind: {} for kind in KINDS}
    for name in names:
        for kind, pattern in KINDS.items():
            if match := pattern.fullmatch(name):
                found[kind][int(match[1])] = folder / name
    if by is None:
        there = [kind for kind in KINDS if found[kind]]
        if len(there) > 1:
            raise UsageError(
                f"{folder} has checkpoints by update and by epoch: add --by update or --by epoch"
            )
        by = there[0] if there else "update"
    if len(found[by]) < last:
        raise UsageError(
            f"--last {last}: {folder} has {len(found[by])} checkpoints by {by}; fairseq-train keeps them by "
            "update with --save-interval-updates, by epoch without --no-epoch-checkpoints"
        )
    return [found[by][number] for number in sorted(found[by])[-last:]]
