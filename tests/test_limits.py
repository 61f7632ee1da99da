"""Files and numbers that a command would read or count for ever are refused at once."""

import os
import signal
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest
import torch
from commands import changed, refused, smoe
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import MMapIndexedDataset
from test_expert_parallel_checkpoints import refusal
from torch.multiprocessing.spawn import ProcessExitedException

from smoe_fairseq.analysis import training_log
from smoe_fairseq.checkpoints.model import known_options
from smoe_fairseq.checkpoints.reading import open_checkpoint
from smoe_fairseq.checkpoints.sets import Shards, weights_of
from smoe_fairseq.cli import main
from smoe_fairseq.compat.checkpoint_names import rank_file
from smoe_fairseq.errors import UsageError, naming_file, one_line
from smoe_fairseq.recipes.config_files import read
from smoe_fairseq.recipes.data.archives import extract


@pytest.mark.parametrize(
    "reader",
    [
        *(open_checkpoint, training_log.read, lambda f: Dictionary.load(str(f))),
        *(lambda f: extract(f, {}), lambda f: read(f, ())),
        lambda f: MMapIndexedDataset(str(f.with_suffix(""))),
    ],
)
def test_a_pipe_is_no_file(tmp_path, reader):
    pipe = tmp_path / "pipe.idx"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="pipe.idx is a pipe or a device; expected a file"):
        reader(pipe)


def test_a_stray_file_of_a_set_is_not_counted_up_to(tmp_path):
    name = tmp_path / "checkpoint_last.pt"
    for rank in (0, 1, 10_000_000):
        rank_file(name, rank).touch()
    with pytest.raises(UsageError, match="checkpoint_last-rank-2.pt is missing"):
        Shards.open(name)


def test_more_processes_than_there_can_be():
    said = refusal("reshard", "a.pt", "--world-size", 1_000_000, "--output", "b.pt")
    assert "--world-size 1000000: expected 1 to 10,000" in said


# What a checkpoint holds, by a recorded one of a small model.


def with_value(recorded: Path, tmp_path: Path, *keys, value) -> Path:
    """The checkpoint with another value under these keys."""

    def change(state):
        reduce(getitem, keys[:-1], state)[keys[-1]] = value

    return changed(recorded / "strata-4-4.pt", tmp_path / "changed.pt", change)


@pytest.mark.parametrize(
    "keys, value, named",
    [
        (("cfg", "model", "dropout"), "x", ""),
        (("cfg", "model", "dropout"), "${nope}", "nope"),
        (("cfg", "model", "activation_fn"), "nope", "--activation-fn nope"),
        (("task_state",), None, ""),
        (("cfg", "model", "encoder_layers"), 100_000, "--encoder-layers 100000"),
        (("cfg", "model", "decoder_embed_dim"), 10**18, f"--decoder-embed-dim {10**18}"),
    ],
    ids=str,
)
def test_settings_of_which_no_model_can_be_made(recorded, tmp_path, keys, value, named):
    """Before anything of those sizes is built; the sentence is about the file."""
    path = with_value(recorded, tmp_path, *keys, value=value)
    said = refusal("translate", path, "--data", recorded)
    assert said.startswith(f"error: {path}") and named in said


def test_a_file_that_the_settings_name_is_the_one_at_fault(tmp_path):
    (tmp_path / "dict.txt").write_text("no count\n")
    with pytest.raises(UsageError, match="^[^ ]+dict.txt: "):
        with naming_file("model.pt"):
            Dictionary.load(str(tmp_path / "dict.txt"))


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("encoder_layers", 10**9, "--encoder-layers"),
        ("decoder_embed_dim", 10**12, "--decoder-embed-dim"),
        ("dropout", "x", "dropout"),
    ],
)
def test_options_that_are_not_those_of_the_weights(recorded, tmp_path, name, value, said):
    """They would be written into what is exported, if a list of so many layers ever ended."""
    path = with_value(recorded, tmp_path, "cfg", "model", name, value=value)
    with pytest.raises(UsageError, match=f"{path}: .*{said} "):
        known_options(path, weights_of(path))


def test_a_dictionary_of_fewer_words_is_named(recorded, tmp_path):
    file = recorded / "strata-4-4.pt"
    (tmp_path / "run").mkdir()
    for name in ("dict.src.txt", "dict.tgt.txt"):
        (tmp_path / "run" / name).write_text("a 1\n")
    words = len(weights_of(file)["model"]["encoder.embed_tokens.weight"])
    result = smoe("translate", file, "--data", tmp_path / "run", check=False)
    refused(result, tmp_path / "run/dict.src.txt", " 5 tokens", words, "--data")


@pytest.mark.parametrize(
    "key, value",
    [
        *(("num_updates", -1), ("num_experts", "x"), ("rank", 5)),
        *(("parameters", [1]), ("world_size", 0)),
    ],
)
def test_a_record_of_experts_that_is_damaged(recorded, tmp_path, key, value):
    path = with_value(recorded, tmp_path, "smoe_experts", key, value=value)
    with pytest.raises(UsageError, match="changed.pt: its smoe_experts"):
        weights_of(path)


# The one line that ends a command.


class Killed:
    """Data whose first number is never loaded, since the process that loads it is killed."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_that_loads_data_is_one_line():
    with pytest.raises(RuntimeError) as ended:
        list(torch.utils.data.DataLoader(Killed(), num_workers=1))
    assert "--num-workers" in one_line(ended.value)


def test_a_killed_process_that_fairseq_has_spawned_is_one_line():
    ended = ProcessExitedException("process 1 terminated with signal SIGKILL", 1, 2, -9, "SIGKILL")
    assert "process 1" in one_line(ended) and "SIGKILL" in one_line(ended)


def test_names_are_shown_with_neither_line_ends_nor_orders_to_a_terminal():
    assert one_line(FileNotFoundError("/no/dir")).startswith("/no/dir: ")
    line = one_line(UsageError("a\nb\x1b[31m" + "x" * 100_000))
    assert line.startswith(r"a\nb\x1b[31m") and line.isprintable() and len(line) < 400


def test_a_flag_that_there_is_not_is_shown_so_too(capsys):
    with pytest.raises(SystemExit):
        main(["cost", "--x\x1b[31m" + "y" * 10_000])
    line = capsys.readouterr().err.rstrip("\n")
    assert r"--x\x1b[31myyy" in line and line.isprintable() and len(line) < 500


def test_a_current_folder_that_was_deleted(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SystemExit, match="^error: the current folder"):
        main(["cost", "--arch", "smoe_transformer_tiny"])
