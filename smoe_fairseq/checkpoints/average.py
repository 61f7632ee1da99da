"""``smoe average``: one checkpoint whose weights are the mean of several."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from smoe_fairseq.checkpoints import reading, sets, trained_with
from smoe_fairseq.checkpoints.content import MADE_OF, fingerprint
from smoe_fairseq.checkpoints.model import check_fit, other_model, saved_model
from smoe_fairseq.compat.checkpoint_names import PENDING, files_read, rank_of, saved, set_name
from smoe_fairseq.errors import UsageError
from smoe_fairseq.flags import values_of
from smoe_fairseq.translate.directions import other_flags

# Suffix of step counts of --moe-balance bias and of gates that learn by counts.
COUNTS = ".steps"
KINDS = ("epoch", "update")


def average(paths: Sequence[Path], copies: bool = False) -> tuple[dict, list[Path]]:
    """The content of a checkpoint with the mean weights; everything else is from the last checkpoint.

    Means are in float32 at least. Integers have to be equal in all checkpoints, except for `COUNTS`,
    which are those of the last one. One checkpoint is read at a time.

    Args:
        copies: whether copies, such as fairseq makes under other names, are passed over.

    Returns:
        The content, and the checkpoints that count.

    Raises:
        UsageError: architectures or dictionaries differ, or a checkpoint has diverged or is damaged; the
            message names it. Or there is a copy, or only one checkpoint.
    """
    sums, owners, first, state, read = {}, {}, None, None, {}
    counted: dict[str, Path] = {}  # by fingerprint
    for path in tqdm(paths, "average", unit=" checkpoints"):
        name = str(path) if path.name in read else path.name
        made = read[name] = fingerprint(path)
        if made in counted and not copies:
            raise UsageError(f"{path} is a copy of {counted[made]}: it would count twice")
        if made in counted:
            tqdm.write(f"{path} is a copy of {counted[made]}, and counts once")
            continue
        counted[made] = path
        state = None  # free the previous one before reading the next
        state = sets.weights_of(path)
        if first is None:
            first = _outline(state)
        else:
            _check_alike(paths[0], first, path, _outline(state))
        _add(sums, owners, path, state["model"])
    if len(counted) < 2:
        raise UsageError(f"{paths[0]} is one checkpoint: expected more, or a folder with --last N")
    last = state["model"]
    means = {
        name: _mean(sums.pop(name), len(counted), last[name])
        for name, owner in owners.items()
        if owner == name
    }
    state["model"] = {name: means[owners[name]] for name in last}
    return {**state, MADE_OF: read}, list(counted.values())


def _add(sums: dict, owners: dict, path: Path, model: Mapping) -> None:
    """Add a model to ``sums``; ``owners`` maps each tensor's name to the name under which it is summed.

    Tied tensors, such as embeddings, are summed once, and stay tied if they are tied in all files.
    """
    if not owners:
        keys = {}
        owners.update(
            {name: keys.setdefault(sets.memory_key(t), name) for name, t in model.items()}
        )
    for name, owner in owners.items():
        if owner != name and sets.memory_key(model[name]) != sets.memory_key(model[owner]):
            sums[name] = sums[owner].clone()  # tied in the earlier files, but not in this one
            owners[name] = name
    for name, tensor in model.items():
        if owners[name] != name:
            continue
        if not all(each.is_floating_point() for each in (tensor, sums.get(name, tensor))):
            if name in sums and not name.endswith(COUNTS) and not torch.equal(sums[name], tensor):
                raise UsageError(
                    f"{path}: {name} has other whole numbers than before; expected checkpoints of one run"
                )
            sums[name] = tensor
            continue
        summand = tensor.to(torch.float64, copy=True)
        sums[name] = sums[name].add_(summand) if name in sums else summand


def _mean(total: Tensor, count: int, like: Tensor) -> Tensor:
    if not like.is_floating_point():
        return like
    return (total / count).to(torch.promote_types(like.dtype, torch.float32))


def _outline(state: Mapping) -> dict:
    """What all checkpoints have to share, without the tensors' content."""
    kept = {key: state.get(key) for key in ("cfg", "args", trained_with.DICTIONARIES)}
    return kept | {"model": {name: tensor.to("meta") for name, tensor in state["model"].items()}}


def _check_alike(first_path: Path, first: dict, path: Path, other: dict) -> None:
    """Raise UsageError where two outlines differ, and warn of another seed.

    Settings that one of them lacks are not compared.
    """
    check_fit(path, other["model"], first["model"], f"in {first_path}")
    tasks = (reading.saved_task(each)[0] for each in (other, first))
    if flags := other_model(other, saved_model(first)) | other_flags(*tasks):
        had = " ".join(flags.values())
        raise UsageError(f"{path} differs from {first_path}: its training had {had}")
    one, two = (outline[trained_with.DICTIONARIES] or {} for outline in (first, other))
    both = one.keys() & two.keys()  # fine-tuning may have fewer languages than its start
    if any(one[name] != two[name] for name in both) or one and two and not both:
        raise UsageError(f"{path} was trained with another dictionary than {first_path}")
    one, two = (_seed(outline) for outline in (first, other))
    if one != two:
        seeds = f"{first_path} was trained with --seed {one}, {path} with {two}"
        reason = "models that did not begin with the same weights have no useful mean"
        tqdm.write(f"warning: {seeds}: {reason}", file=sys.stderr)


def _seed(state: Mapping) -> int | None:
    return values_of((state["cfg"] or {}).get("common") or state["args"]).get("seed")


def add_average_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="checkpoints, those of --expert-parallel without -rank-N; with --last the folder of a run",
    )
    parser.add_argument("--last", type=int, metavar="N", help="average the N newest of the folder")
    words = (
        "with --last: checkpoints of epochs, or of every N updates; needed if the folder has both"
    )
    parser.add_argument("--by", choices=KINDS, help=words)
    sets.add_output_arguments(parser)


def run_average(args: Namespace) -> None:
    made, paths = None, select(args.paths, args.last, args.by)
    while made is None:
        read = [file for path in paths for file in files_read(path)]
        sets.check_output(read, [args.output], args.force)
        try:
            made = average(paths, copies=args.last is None)
        except (UsageError, OSError):
            before, paths = paths, select(args.paths, args.last, args.by)
            if paths == before:  # else training has replaced some of them meanwhile
                raise
    state, counted = made
    sets.write_converted(state, args.output, args.force)
    print(f"{args.output}: mean of {len(counted)} checkpoints, {counted[0]} to {counted[-1]}")
    if any(name.endswith(COUNTS) for name in state["model"]):
        print(f"the step counts (*{COUNTS}) are those of {counted[-1]}")


def select(paths: Sequence[Path], last: int | None, by: str | None) -> list[Path]:
    """The checkpoints to average, the newest last; a set by its name without ``-rank-N``.

    Raises:
        UsageError: there are fewer than ``last``, or the choice is ambiguous.
    """
    folders = [path for path in paths if path.is_dir()]
    if last is None:
        if by is not None:
            raise UsageError(f"--by {by}: expected --last with it, and a run's folder")
        if folders:
            raise UsageError(f"{folders[0]} is a folder: add --last N, or name its files")
        if twice := next((path for path in paths if paths.count(path) > 1), None):
            raise UsageError(f"{twice} is named twice: it would count twice")
        # A shell's * expands to all files of a set.
        sets_and_files = (path if rank_of(path) is None else set_name(path) for path in paths)
        return list(dict.fromkeys(sets_and_files))
    if last < 2:
        raise UsageError(f"--last {last}: expected 2 or more")
    if len(paths) > 1 or not folders:
        raise UsageError(f"--last {last}: expected one folder, not {', '.join(map(str, paths))}")
    return _newest(folders[0], last, by)


def _newest(folder: Path, last: int, by: str | None) -> list[Path]:
    files: dict[str, dict[int, Path]] = {kind: {} for kind in KINDS}
    found = saved(file for file in folder.iterdir() if file.suffix in (".pt", PENDING))
    for file, (epoch, updates) in found.items():
        files["update" if updates else "epoch"][updates or epoch] = file
    if by is None:
        kinds = [kind for kind in KINDS if files[kind]]
        if len(kinds) > 1:
            raise UsageError(f"{folder} has both kinds: add --by update or --by epoch")
        by = kinds[0] if kinds else "update"
    if len(files[by]) < last:
        raise UsageError(
            f"--last {last}: {folder} has {len(files[by])} checkpoints of an {by}; see "
            "--save-interval-updates and --no-epoch-checkpoints of fairseq-train (files of "
            "--checkpoint-suffix do not count)"
        )
    *_, second, newest = numbers = sorted(files[by])
    end, updates = folder / "checkpoint_last.pt", second  # it is behind by one while it is written
    with suppress(UsageError, OSError, LookupError):  # it is missing, or keeps the weights alone
        updates = reading.open_checkpoint(end)["optimizer_history"][-1]["num_updates"]
    if by == "update" and updates < second:
        raise UsageError(
            f"{files[by][newest]} is of another training than {end}, which has {updates} updates: name "
            "the files to average"
        )
    return [files[by][number] for number in numbers[-last:]]
