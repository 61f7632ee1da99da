"""Two runs in one folder: the second one is refused, by the name of the first."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from commands import PLUGIN, refused, touch_binarised
from programs import wait_until
from test_recipes import recipe

from smoe_fairseq import locks
from smoe_fairseq.errors import UsageError

SMALL = f"""--user-dir {PLUGIN} --cpu --num-workers 0 --arch smoe_transformer_tiny --encoder-layers 2
    --decoder-layers 2 --encoder-embed-dim 16 --decoder-embed-dim 16 --encoder-ffn-embed-dim 16
    --decoder-ffn-embed-dim 16 --encoder-attention-heads 2 --decoder-attention-heads 2 --moe-freq 0
    --criterion smoe_label_smoothed_cross_entropy --optimizer adam --lr 0.005 --max-tokens 400
    --no-epoch-checkpoints --disable-validation""".split()
GLOO = ("--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp")

HOLD = """
import sys, time
from pathlib import Path
from smoe_fairseq import locks
from smoe_fairseq.errors import ends_with_sentence
ends_with_sentence()(locks.lock_folder)(Path(sys.argv[1]), *sys.argv[2:])
print("held", flush=True)
sys.stdin.read()
"""


def holder(folder, *name) -> subprocess.Popen:
    """A process that holds a folder until its input ends."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, folder, *name], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    process.line = process.stdout.readline()
    return process


def test_second_is_refused_by_name_until_the_first_ends(tmp_path):
    first = holder(tmp_path)
    assert first.line == "held\n"
    second = holder(tmp_path)
    _, sentence = second.communicate()
    assert second.returncode == 1 and sentence.count("\n") == 1
    assert f"{tmp_path} is in use" in sentence
    assert f"process {first.pid} on {socket.gethostname()}, since 2" in sentence
    with pytest.raises(UsageError, match=f"process {first.pid} "):
        locks.check_free(tmp_path)
    locks.check_free(tmp_path, locks.RECIPE)
    first.communicate()
    assert os.listdir(tmp_path) == []
    locks.check_free(tmp_path)


def test_a_data_set_is_prepared_by_one_alone(tmp_path):
    """Two at once would write to the same files, and their mixture looked complete."""
    data = tmp_path / "data/phrasebook"
    data.mkdir(parents=True)
    first = holder(data, locks.PREPARATION)
    second = recipe(tmp_path, "prepare", "phrasebook")
    refused(second, data, f"process {first.pid} ", "--data-dir")
    assert os.listdir(data) == [locks.PREPARATION]
    touch_binarised(tmp_path, "phrasebook")
    third = recipe(tmp_path, "prepare", "phrasebook")
    assert third.returncode == 0 and "is prepared already" in third.stdout
    first.communicate()


def test_what_is_released_may_be_taken(tmp_path):
    locks.lock_folder(tmp_path)
    locks.unlock_folder(tmp_path)
    locks.unlock_folder(tmp_path)
    assert os.listdir(tmp_path) == []
    other = holder(tmp_path)
    assert other.line == "held\n"
    other.communicate()


def test_killed_process_leaves_no_lock(tmp_path):
    first = holder(tmp_path)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert os.listdir(tmp_path) == [locks.TRAINING]
    locks.check_free(tmp_path)
    second = holder(tmp_path)
    assert second.line == "held\n"
    assert f"process {second.pid} " in (tmp_path / locks.TRAINING).read_text()
    second.communicate()


def test_a_forked_process_holds_no_lock_of_its_parent(tmp_path):
    """Such as one that reads data. ``flock``, on which filelock 3 is built, would be inherited."""
    program = HOLD.replace("print(", "import os\nif os.fork() == 0: time.sleep(60)\nprint(")
    pipe = subprocess.PIPE
    first = subprocess.Popen([sys.executable, "-c", program, tmp_path], stdin=pipe, stdout=pipe)
    assert first.stdout.readline() == b"held\n"
    children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    first.kill()
    first.wait()
    try:
        locks.check_free(tmp_path)
    finally:
        os.kill(int(children[0]), signal.SIGKILL)


def test_file_that_is_removed_in_between_is_no_lock(tmp_path, monkeypatch):
    """Whoever ends removes the file: one who has opened it before has locked nothing by it."""
    locked, lockf = [], fcntl.lockf

    def remove_first(opened, flags):
        if not locked:
            (tmp_path / locks.TRAINING).unlink()
        locked.append(opened)
        lockf(opened, flags)

    monkeypatch.setattr(fcntl, "lockf", remove_first)
    monkeypatch.setattr(locks, "_held", {})
    locks.lock_folder(tmp_path)
    locks.lock_folder(tmp_path)
    assert len(locked) == 2 and (tmp_path / locks.TRAINING).exists()
    locks.release_all(os.getpid())


def test_a_lock_that_cannot_be_removed_ends_nothing(tmp_path, monkeypatch):
    """As on a file system that has become read-only."""

    def unlink(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(locks, "_held", {})
    locks.lock_folder(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", unlink)
        locks.release_all(os.getpid())
    locks.lock_folder(tmp_path)
    locks.release_all(os.getpid())


def test_file_system_without_locks(tmp_path, monkeypatch, capsys):
    def lockf(opened, flags):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", lockf)
    monkeypatch.setattr(locks, "_held", {})
    locks.lock_folder(tmp_path)
    assert "without locks" in capsys.readouterr().err


@pytest.mark.parametrize("lie", ["symlink_to", "hardlink_to", "fifo"])
def test_a_link_in_the_place_of_a_lock_is_refused(tmp_path, lie):
    """Nothing is written through it: what it leads to may be anybody's."""
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.write_text("mine")
    run.mkdir()
    for name in (locks.TRAINING, locks.RECIPE):
        if lie == "fifo":
            os.mkfifo(run / name)
        else:
            getattr(run / name, lie)(victim)
        for use in (locks.lock_folder, locks.check_free):
            with pytest.raises(UsageError, match=f"{name} is a link or no plain file"):
                use(run, name)
    (run / locks.EVALUATION).symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="is a link"):
        locks.lock_folder(run, locks.EVALUATION)
    assert victim.read_text() == "mine" and not (tmp_path / "nowhere").exists()


def test_a_link_in_the_place_of_the_log_is_refused(prepared, tmp_path):
    victim, log = tmp_path / "victim", tmp_path / "runs/tiny/dense/train.log"
    victim.write_text("mine")
    log.parent.mkdir(parents=True)
    log.symlink_to(victim)
    folders = {"DATA_DIR": str(prepared / "data"), "CONFIG_DIR": str(prepared / "configs")}
    result = recipe(tmp_path, "train", "tiny", "dense", GPUS="0", **folders)
    refused(result, "dense/train.log")
    assert victim.read_text() == "mine"


def train(ranks, tmp_path, small_corpus, world_size, *flags):
    """Starts a run of ``fairseq-train`` in ``tmp_path/run``."""
    arguments = [small_corpus, "--save-dir", tmp_path / "run", *SMALL]
    arguments += ["--log-interval", 1, "--log-format", "json", *flags]
    arguments += GLOO if world_size > 1 else ()
    return ranks.start(tmp_path / "logs", world_size, *arguments, one=world_size == 1)


@pytest.mark.soak
def test_runs_of_fairseq_train(ranks, tmp_path, small_corpus):
    endless = ("--max-epoch", 10_000, "--save-interval", 10_000)
    first = train(ranks, tmp_path, small_corpus, 2, *endless)
    wait_until(lambda: "train_inner" in first.output(0) or set(first.statuses()) != {None})
    assert set(first.statuses()) == {None}, first.output()
    for pid in first.pids:  # it has the lock all the same, and leaves the cores to the others
        os.kill(pid, signal.SIGSTOP)
    for world_size in (1, 2):
        second = train(ranks, tmp_path, small_corpus, world_size, "--max-update", 1)
        assert second.wait() == [1] * world_size
        for rank in range(world_size):
            assert f"is in use by another run (process {first.pids[0]} on" in second.output(rank)
            assert "Traceback" not in second.output(rank)
    train(ranks, tmp_path, small_corpus, 1, "--max-update", 1, "--no-save").finish()
    first.kill()
    first.wait()
    assert (tmp_path / "run" / locks.TRAINING).exists()
    for update in (1, 2):
        train(ranks, tmp_path, small_corpus, 1, "--max-update", update).finish()
        assert os.listdir(tmp_path / "run") == ["checkpoint_last.pt"]
