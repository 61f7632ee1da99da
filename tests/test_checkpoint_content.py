"""Files that can be read, and are not what a checkpoint of fairseq is: one sentence, in every command."""

import errno

import pytest
import torch
from commands import PLUGIN, generation, run, run_python
from fairseq import checkpoint_utils
from test_compat import run_without
from test_training import train as train_smoe

from smoe_fairseq.checkpoints.io import open_checkpoint, pending, rank_file, record_of
from smoe_fairseq.compat.safe_load import InaccessibleCheckpoint
from smoe_fairseq.errors import UsageError
from smoe_fairseq.modules.parallel import Placement
from smoe_fairseq.training import sharded_checkpoints


@pytest.fixture(scope="module")
def sparse(small_corpus, tmp_path_factory):
    """A checkpoint of a tiny SMoE."""
    folder = tmp_path_factory.mktemp("sparse")
    train_smoe(small_corpus, folder, "--max-update", 2)
    return folder / "checkpoint_last.pt"


def changed(source, path, change):
    state = torch.load(source, weights_only=True)
    change(state)
    torch.save(state, path)
    return path


OTHER_KINDS = {
    "no model": lambda state: state.pop("model"),
    "no parameters": lambda state: state.update(model=None),
    "a list of parameters": lambda state: state.update(model=[1]),
    "a history of no kind": lambda state: state.update(optimizer_history=3),
    "extra state of no kind": lambda state: state.update(extra_state="x"),
    "options of no kind": lambda state: state.update(cfg=[1]),
    "a position of no kind": lambda state: state["extra_state"].update(train_iterator="x"),
    "an epoch of no kind": lambda state: state["extra_state"]["train_iterator"].update(epoch=-4),
    "no options": lambda state: state.update(cfg=None, args=None),
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
@pytest.mark.parametrize(
    "load", [open_checkpoint, checkpoint_utils.load_checkpoint_to_cpu], ids=["ours", "fairseqs"]
)
def test_a_part_of_another_kind_is_refused(sparse, tmp_path, kind, load):
    file = changed(sparse, tmp_path / "checkpoint.pt", OTHER_KINDS[kind])
    with pytest.raises(UsageError) as error:
        load(str(file))
    assert str(file) in str(error.value) and "\n" not in str(error.value)


# What the system and torch raise for want of memory or files, or from a failing disk.
SHORTAGES = [
    MemoryError(),
    OSError(errno.EMFILE, "Too many open files"),
    OSError(errno.EIO, "Input/output error"),
    RuntimeError("unable to mmap 9 bytes from file <x.pt>: Cannot allocate memory (12)"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate"
    ),
]


@pytest.mark.parametrize(
    "place, error",
    [("zipfile.ZipFile", e) for e in SHORTAGES[:3]] + [("torch.load", e) for e in SHORTAGES],
)
def test_a_shortage_is_no_fault_of_the_file(sparse, tmp_path, monkeypatch, place, error):
    """It is named, without advice to remove it, and never taken for a useless one, which is removed."""
    file = changed(sparse, tmp_path / "checkpoint.pt", lambda state: None)

    def full(*_, **__):
        raise error

    monkeypatch.setattr(place, full)
    for load in (open_checkpoint, record_of, checkpoint_utils.load_checkpoint_to_cpu):
        with pytest.raises(InaccessibleCheckpoint) as end:
            load(str(file))
        assert str(end.value).startswith(str(file)) and "remove" not in str(end.value)


def test_a_pending_set_is_kept_for_want_of_memory(sparse, tmp_path, monkeypatch):
    file = pending(rank_file(tmp_path / "checkpoint_last.pt", 0))
    changed(sparse, file, lambda state: None)
    monkeypatch.setattr(sharded_checkpoints, "all_gather", lambda value: [value])

    def full(*_, **__):
        raise SHORTAGES[-1]

    monkeypatch.setattr("torch.load", full)
    with pytest.raises(UsageError, match="checkpoint_last-rank-0.pt.pending"):
        sharded_checkpoints.recover(tmp_path, Placement(2, 1, 0))
    assert file.exists()


LIMITED = """
import resource, sys, torch, fairseq.checkpoint_utils
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 30_000_000,) * 2)
sys.path[0] = sys.argv.pop()
from smoe_fairseq.compat.safe_load import InaccessibleCheckpoint
try:
    fairseq.checkpoint_utils.load_checkpoint_to_cpu(sys.argv[1])
except InaccessibleCheckpoint:
    sys.exit(7)
"""


def test_a_sound_checkpoint_that_does_not_fit_into_memory(tmp_path):
    state = {"model": {"w": torch.zeros(20_000_000)}, "args": None, "cfg": {}}
    torch.save(state, tmp_path / "large.pt")
    result = run_python(LIMITED, tmp_path / "large.pt", PLUGIN.parent)
    assert result.returncode == 7, result.stdout


def test_an_empty_history_is_named_by_the_command(small_corpus, sparse, tmp_path):
    file = changed(sparse, tmp_path / "c.pt", lambda state: state.update(optimizer_history=[]))
    result = run("fairseq-generate", *generation(small_corpus, file), check=False)
    assert result.returncode == 1 and "Traceback" not in result.stdout
    words = f"error: {file} is not a checkpoint of fairseq, or parts of it are missing: IndexError"
    assert result.stdout.splitlines()[-1].startswith(words)


def test_without_its_plugin_a_model_is_named(small_corpus, sparse):
    command = ("fairseq-generate", *generation(small_corpus, sparse))
    result = run(*command, check=False)
    words = "error: --user-dir is missing or another: the model is a smoe_transformer"
    assert result.returncode == 1 and "Traceback" not in result.stdout
    assert result.stdout.splitlines()[-1].startswith(words) and "$(smoe path)" in result.stdout
    assert "KeyError: \"'_name'\"" in run_without("name_unknown_model", *command).stdout


def test_state_of_another_run_is_named(small_corpus, sparse, tmp_path):
    file = changed(
        sparse,
        tmp_path / "c.pt",
        lambda state: state["last_optimizer_state"].update(param_groups=[]),
    )
    more = ("--restore-file", file, "--max-update", 4)
    result = train_smoe(small_corpus, tmp_path / "new", *more, check=False)
    last = result.stdout.splitlines()[-1]
    assert last.startswith(f"error: {file} does not fit this run (ValueError: loaded state dict")
    assert "--reset-optimizer" in last and "Traceback" not in result.stdout


@pytest.mark.parametrize("record", ["x", {"rank": 0}, {"extra": 1, "parameters": []}])
def test_a_record_of_another_kind_is_named(sparse, tmp_path, record):
    file = changed(sparse, tmp_path / "c.pt", lambda state: state.update(smoe_experts=record))
    result = run(
        *("smoe", "reshard", file, "--world-size", 2, "--output", tmp_path / "new" / "c.pt"),
        check=False,
    )
    assert result.returncode == 1 and "Traceback" not in result.stdout
    assert "what it says of its experts (smoe_experts)" in result.stdout.splitlines()[-1]


MISSING = {
    "extra_state is missing": lambda state: state.pop("extra_state"),
    "w1 is missing": lambda state: state["model"].pop("decoder.layers.1.moe.experts.w1"),
    "expected 8 experts": lambda state: state["model"].update(
        {"decoder.layers.1.moe.experts.w1": torch.zeros(3)}
    ),
}


@pytest.mark.parametrize("words", MISSING)
def test_a_part_that_cannot_be_divided_is_named(sparse, tmp_path, words):
    file = changed(sparse, tmp_path / "c.pt", MISSING[words])
    output = tmp_path / "new" / "c.pt"
    result = run("smoe", "reshard", file, "--world-size", 2, "--output", output, check=False)
    assert result.returncode == 1 and result.stdout.startswith(f"error: {file}")
    assert words in result.stdout and not output.parent.exists()
