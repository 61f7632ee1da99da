"""Checkpoint files that are damaged, not ours to read, or about to be lost: one sentence, nothing lost."""

import errno
import os
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from commands import FAIRSEQ, SCRIPTS, TINY, contents, generation, no_room, refused, run, run_python
from fairseq import checkpoint_utils
from ranks import fairseq_train
from sampling import soak
from test_compat import run_without
from test_expert_parallel import flags
from test_expert_parallel_checkpoints import refusal
from test_full_disk import limited

from smoe_fairseq.checkpoints.reading import open_checkpoint
from smoe_fairseq.checkpoints.sets import Shards
from smoe_fairseq.compat import safe_load
from smoe_fairseq.errors import UsageError

NORMS = ("--encoder-normalize-before", "--decoder-normalize-before")


def rotted(source: Path, path: Path, inside: bytes = b"/data/3") -> Path:
    """A copy in which 64 bytes of one tensor are others; torch loads it without a word."""
    shutil.copy(source, path)
    with zipfile.ZipFile(path) as archive:
        part = next(i for i in archive.infolist() if i.filename.encode().endswith(inside))
        with archive.open(part) as opened:
            start = opened._fileobj._file.tell()
    content = bytearray(path.read_bytes())
    assert part.file_size >= 64
    for i in range(start, start + 64):
        content[i] ^= 1
    path.write_bytes(content)
    return path


def resume(corpus, save_dir, *flags):
    return ("fairseq-train", corpus, "--save-dir", save_dir, *TINY, *NORMS, *flags)


# Changed bytes


def test_changed_bytes_of_a_tensor_are_noticed(pre_norm, corpus, tmp_path):
    """Without the patch, training goes on from them and translations are made of them."""
    last = rotted(pre_norm, tmp_path / "checkpoint_last.pt")
    assert torch.load(last, weights_only=True)["model"]
    before = contents(tmp_path)
    training = resume(corpus, tmp_path, "--max-epoch", 3)
    for command in (training, ("fairseq-generate", *generation(corpus, last))):
        refused(run(*command, check=False), last, "archive/data/3")
    assert contents(tmp_path) == before
    assert "done training" in run_without("name_unreadable_checkpoints", *training).stdout


def test_each_byte_that_matters_is_covered(pre_norm, tmp_path):
    """The list of contents and the pickle as well as tensors; what is sound stays so."""
    safe_load.check_sums(pre_norm)
    with pytest.raises(UsageError, match="data.pkl does not match"):
        safe_load.check_sums(rotted(pre_norm, tmp_path / "pickle.pt", b"data.pkl"))
    content = pre_norm.read_bytes()
    table = content.rindex(b"PK\1\2")
    for where in (0, table, len(content) - 22):
        bad = bytearray(content)
        bad[where : where + 8] = b"\xff" * 8
        (tmp_path / f"{where}.pt").write_bytes(bad)
        with pytest.raises(UsageError, match=rf"{where}\.pt is (damaged|cut off)"):
            checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / f"{where}.pt"))


def test_a_file_is_summed_once_while_it_stays_as_it_is(pre_norm, tmp_path, monkeypatch):
    opened = []
    original = zipfile.ZipFile.open
    monkeypatch.setattr(
        zipfile.ZipFile, "open", lambda *a, **k: opened.append(1) or original(*a, **k)
    )
    path = tmp_path / "checkpoint.pt"
    shutil.copy(pre_norm, path)
    safe_load.check_sums(path)
    count = len(opened)
    safe_load.check_sums(path)
    assert len(opened) == count > 10
    rotted(pre_norm, path)
    with pytest.raises(UsageError):
        safe_load.check_sums(path)


def test_checkpoints_of_older_torch_have_no_checksums(pre_norm, tmp_path):
    state = torch.load(pre_norm, weights_only=True)
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "old.pt"))["model"]
    assert open_checkpoint(tmp_path / "old.pt")["model"]


# Files of another user


@pytest.fixture
def denied(monkeypatch):
    """Files named secret* are not to be read: root reads everything, so permission bits cannot say so."""
    original = open

    def refuse(path, mode="r", *others, **options):
        if Path(str(path)).name.startswith("secret") and mode.startswith("r"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return original(path, mode, *others, **options)

    monkeypatch.setattr("builtins.open", refuse)


def test_permission_denied_is_called_so(sparse, small_corpus, tmp_path, denied):
    secret = tmp_path / "secret.pt"
    shutil.copy(sparse, secret)
    with pytest.raises(UsageError) as ended:
        checkpoint_utils.load_checkpoint_to_cpu(str(secret))
    sentences = [
        str(ended.value),
        refusal("reshard", secret, "--world-size", 2, "--output", tmp_path / "new.pt"),
        refusal("analyze", small_corpus, "--path", secret, "--output", tmp_path / "new"),
        refusal("cost", "--path", secret),
    ]
    for sentence in sentences:
        assert sentence.removeprefix("error: ") == f"{secret} cannot be read: Permission denied"


# A run that ends while it saves

KILLED = """
import os, shutil, signal, sys
from __main__ import run_program  # of warm.py
def half(source, target, **_):
    with open(source, "rb") as read, open(target, "wb") as written:
        written.write(read.read()[:5000])
    os.kill(os.getpid(), signal.SIGKILL)
shutil.copyfile = half
run_program(sys.argv[1:])
"""


@pytest.mark.parametrize("program", ["generate", soak("validate")])
def test_a_set_by_its_name_and_a_missing_file(corpus, tmp_path, program):
    path = tmp_path / "checkpoint_last.pt"
    words = (f"fairseq-{program}", corpus, "--path", path, "--cpu", "--batch-size", 1)
    words += ("--task", "translation")
    assert "consolidate" not in refused(run(*words, check=False), path)
    for rank in (0, 1):
        (tmp_path / f"checkpoint_last-rank-{rank}.pt").touch()
    refused(run(*words, check=False), path, "smoe consolidate")


@pytest.fixture
def folder(pre_norm, tmp_path) -> Path:
    """A folder of a run, with its last checkpoint."""
    (tmp_path / "run").mkdir()
    shutil.copy(pre_norm, tmp_path / "run/checkpoint_last.pt")
    return tmp_path / "run"


def test_a_kill_while_saving_leaves_the_old_checkpoint(corpus, folder):
    """The copy of the newest checkpoint to checkpoint_last.pt is where the run ends."""
    before = contents(folder)
    program, *flags = resume(corpus, folder, "--max-epoch", 3)
    assert run_python(KILLED, SCRIPTS / program, *flags, server=FAIRSEQ).returncode == -9
    assert (folder / "checkpoint_best.pt").exists()
    assert contents(folder).items() > before.items()


# A disk without room


def test_without_room_the_old_checkpoint_stays(pre_norm, corpus, folder):
    assert pre_norm.stat().st_size > 150_000
    before = contents(folder)
    result = limited(100_000, *resume(corpus, folder, "--max-epoch", 3))
    refused(result, folder / "checkpoint_best.pt", "File too large")
    assert contents(folder) == before


def train_until_full(folder: str, arguments):
    """``fairseq-train`` in which the disk of rank 1 is full from the second save on."""

    original, count = torch.save, [0]

    def save(state, file, *others, **options):
        count[0] += 1
        if torch.distributed.get_rank() == 1 and count[0] > 1:
            file.write(b"half")
            no_room()
        original(state, file, *others, **options)

    torch.save = save
    fairseq_train(arguments)


def test_a_process_without_room_leaves_the_old_set(ranks, small_corpus, tmp_path):
    """All processes end, and what they had saved together is still one set."""
    arguments = flags(small_corpus, tmp_path, "--expert-parallel", "--save-interval-updates", 1)
    words = (str(tmp_path), list(map(str, arguments)))
    run = ranks.start(tmp_path, 2, *words, function=train_until_full)
    assert run.wait() == [1, 1]
    reason = "cannot be saved: No space left on device"
    assert f"error: {tmp_path}/checkpoint_1_2-rank-1.pt.pending {reason}" in run.output(1)
    assert not list(tmp_path.glob("*-rank-1*.tmp")) and "Traceback" not in run.output(1)
    shards = Shards.open(tmp_path / "checkpoint_last.pt", True)
    assert shards.record.num_updates == 1 and len(shards.files) == 2
