"""Writes checkpoints that only appear under their names when they are complete and verified."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from smoe_fairseq.checkpoint.content import open_checkpoint
from smoe_fairseq.checkpoint.names import PENDING, rank_file, rank_files
from smoe_fairseq.checkpoint.shards import Shards, same_bits
from smoe_fairseq.modules.placement import Placement
from smoe_fairseq.system.errors import UsageError
from smoe_fairseq.system.files import whole_file, whole_files


def output_files(output: Path, world_size: int) -> list[Path]:
    if world_size == 1:
        return [output]
    return [rank_file(output, rank) for rank in range(world_size)]


def write(shards: Shards, output: Path, world_size: int, force: bool) -> list[Path]:
    """The checkpoint, or set, for ``world_size`` processes; returns its files.

    Raises:
        UsageError: a file is there already and not to be overwritten, or what was read back differs, or
            the system refuses a file.
    """
    try:
        for num_experts in shards.record.numbers_of_experts:  # can each layer's be spread?
            places = [Placement(num_experts, world_size, rank) for rank in range(world_size)]
    except ValueError as error:
        raise UsageError(f"--world-size {world_size}: {error}") from None
    files = output_files(output, world_size)
    left_over = []  # of another set of this name
    if world_size > 1:
        found = [*rank_files(output).values(), *rank_files(output, PENDING).values()]
        left_over = [file for file in found if file not in files]
    check_output(shards.files, [*files, *left_over], force)
    shards.check_agreement()
    shards.check_division(world_size)

    per_file = sum(1 for _ in shards.tensors(shards.states[0]))
    with whole_files(files, called=f"--output {output}") as partials:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tqdm(total=2 * per_file * world_size, unit=" tensors", desc=output.name) as bar:
            for place, file in zip(places, partials, strict=True):
                state = shards.state_for(place, bar.update)
                with open(file, "wb") as opened:
                    torch.save(state, opened)
                del state
                _verify(shards, place, Path(file), bar.update)
    for file in left_over:
        _remove(file)
    return files


def _remove(file: Path) -> None:
    try:
        file.unlink()
    except OSError as error:
        raise UsageError(
            f"{file} is of another set and cannot be removed: {error.strerror}; the new files are complete"
        ) from None


def check_output(read: Iterable[Path], files: Iterable[Path], force: bool) -> None:
    """Raise UsageError where a file to be written is one that is read, a folder, or there already.

    Or where it cannot be written: that is known before the work of which it is the result.
    """
    read = {file.resolve() for file in read}
    for file in files:
        if file.resolve() in read:
            raise UsageError(f"--output: {file} is what is read; choose another name or folder")
        if file.is_dir():
            raise UsageError(f"--output: {file} is a folder; expected a file's name")
        if file.exists() and not force:
            raise UsageError(f"--output: {file} is there already; --force overwrites it")
        folder = next(parent for parent in file.absolute().parents if os.path.exists(parent))
        if not folder.is_dir():
            raise UsageError(f"--output: {file} cannot be written: {folder} is not a folder")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(
                f"--output: {file} cannot be written: nothing may be written in {folder}"
            )


def write_content(state: dict, output: Path, progress: Callable) -> None:
    """One checkpoint of this content; ``progress`` is called for each tensor that was read back.

    Raises:
        UsageError: what was read back differs, or the system refuses the file.
    """
    with whole_file(output, called=f"--output {output}") as partial:
        output.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as opened:
            torch.save(state, opened)
        written = open_checkpoint(partial)["model"]
        for name, source in state["model"].items():
            _check_written(partial, name, [(written[name], source)])
            progress()


def _verify(shards: Shards, place: Placement, file: Path, progress: Callable) -> None:
    """Every tensor in ``file`` has the bits of the one it was made of."""
    written = {name: tensor for name, tensor, _ in shards.tensors(open_checkpoint(file))}
    for name, source, is_expert in shards.tensors(shards.states[0]):
        progress()
        if name not in written:
            raise UsageError(f"{file}: {name} has not been written; is the disk sound?")
        copies = [(written[name], source)]
        if is_expert:
            local = shards.record.placement(name, place.world_size, place.rank).local
            copies = [
                (written[name][expert - local.start], shards.expert(name, expert))
                for expert in local
            ]
        _check_written(file, name, copies)


def _check_written(file: Path | str, name: str, copies: list[tuple[Tensor, Tensor]]) -> None:
    if not all(same_bits(copy, original) for copy, original in copies):
        raise UsageError(f"{file}: {name} was not written as it was read; is the disk sound?")
