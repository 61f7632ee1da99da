"""Files and numbers that a command would read or count for ever are refused at once."""

import os
import zipfile
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from fairseq.data import Dictionary

from smoe_fairseq.checkpoints.io import open_checkpoint, rank_file
from smoe_fairseq.checkpoints.sets import Shards, run_reshard
from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes.archives import extract
from smoe_fairseq.recipes.config import read


@pytest.mark.parametrize(
    "reader", [open_checkpoint, Dictionary.load, lambda f: extract(f, {}), lambda f: read(f, ())]
)
def test_a_pipe_is_no_file(tmp_path, reader):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="pipe is a pipe or a device; expected a file"):
        reader(str(pipe) if reader == Dictionary.load else pipe)


def test_a_device_is_no_checkpoint():
    with pytest.raises(UsageError, match="/dev/zero is a pipe or a device"):
        open_checkpoint("/dev/zero")


def test_a_checkpoint_of_compressed_parts_is_refused(tmp_path):
    """Its 12 GB may be zeros, in a file of some megabytes."""
    torch.save({"model": {"w": torch.zeros(1000)}}, tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "small.pt", "w", zipfile.ZIP_DEFLATED) as small,
    ):
        for part in plain.namelist():
            small.writestr(part, plain.read(part))
    with pytest.raises(UsageError, match="small.pt holds compressed parts"):
        open_checkpoint(tmp_path / "small.pt")


def test_a_stray_file_of_a_set_is_not_counted_up_to(tmp_path):
    name = tmp_path / "checkpoint_last.pt"
    for rank in (0, 1, 10_000_000):
        rank_file(name, rank).touch()
    with pytest.raises(UsageError, match="checkpoint_last-rank-2.pt is missing"):
        Shards.open(name)


def test_more_processes_than_there_can_be():
    args = Namespace(world_size=1_000_000, path=Path("a.pt"), output=Path("b.pt"), force=False)
    with pytest.raises(UsageError, match="--world-size 1000000: expected at most 10,000"):
        run_reshard(args)
