"""Every command that makes a checkpoint of another: bad files are named, and what was there stays."""

import os
import signal
from pathlib import Path

import pytest
import torch
from commands import FAIRSEQ, changed, contents, no_room, run_python, smoe, untrained
from test_checkpoint_files import rotted
from test_expert_parallel_checkpoints import call, refusal
from test_import import as_theirs
from test_refused_types import Intruder
from test_training import train

MAIN = "import sys; from smoe_fairseq.cli import main; sys.exit(main(sys.argv[1:]))"
KILLED = """
import os, signal, torch
def save(state, file):
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
torch.save = save
"""
KILLED_BEHIND_WEIGHTS = """
import json, os, signal
json.dumps = lambda *a, **o: os.kill(os.getpid(), signal.SIGKILL)
"""
READ = {  # commands by what they read and the words behind it
    "average": ("dense", ["other.pt"]),
    "prune": ("sparse", ["CORPUS", "--keep", 0.5, "--cpu"]),
    "upcycle": ("dense", ["--smoe-strata", 4]),
    "import": ("theirs", []),
    "export": ("dense", ["--to", "fairseq"]),
    "export weights": ("sparse", ["--to", "safetensors"]),
    "reshard": ("sparse", ["--world-size", 1]),
}
COMMANDS = pytest.mark.parametrize("command", READ)


@pytest.fixture(scope="module")
def sources(small_corpus, tmp_path_factory) -> Path:
    """A folder of a checkpoint of each kind."""
    folder = tmp_path_factory.mktemp("sources")
    short = ("--smoe-strata", 4, "--max-update", 1, "--disable-validation")
    train(small_corpus, folder / "run", *short)
    sparse = (folder / "run/checkpoint_last.pt").rename(folder / "sparse.pt")
    untrained(sparse, folder / "dense.pt", small_corpus, moe_freq=0)
    torch.save(as_theirs(sparse), folder / "theirs.pt")
    return folder


def mark(state: dict) -> None:
    """A change of no weight, by which two files are no copies."""
    state["extra_state"]["second"] = True


@pytest.fixture
def ask(sources, small_corpus, tmp_path):
    """The words of a command, with the file that it reads and the one that it writes."""

    def ask(command: str, source: Path | None = None, output: Path | None = None) -> list:
        kind, more = READ[command]
        places = {"CORPUS": small_corpus, "other.pt": sources / "sparse.pt"}
        if command == "average":
            places["other.pt"] = changed(sources / "dense.pt", sources / "second.pt", mark)
        words = [places.get(word, word) for word in more]
        output = output or tmp_path / "out.pt"
        read = source or sources / f"{kind}.pt"
        return [command.split()[0], read, *words, "--output", output]

    return ask


def is_whole(folder: Path) -> bool:
    """Nothing is there but what was to be written, and nothing old."""
    return sorted(contents(folder)) in (["out.pt"], ["out.json", "out.pt"]) and (
        b"old" not in contents(folder).values()
    )


@COMMANDS
def test_nothing_is_overwritten_unasked(ask, tmp_path, command):
    (tmp_path / "out.pt").write_text("old")
    sentence = refusal(*ask(command))
    assert f"{tmp_path / 'out.pt'} " in sentence and "--force" in sentence
    assert contents(tmp_path) == {"out.pt": b"old"}
    call(*ask(command), "--force")
    assert is_whole(tmp_path)
    read = ask(command)[1]
    before = read.read_bytes()
    assert f"{read}" in refusal(*ask(command, output=read), "--force")
    assert "folder" in refusal(*ask(command, output=tmp_path / ".."), "--force")
    assert read.read_bytes() == before and is_whole(tmp_path)


def test_a_name_that_is_empty_is_refused(ask, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = smoe(*ask("export")[:-1], "", "--force", check=False)
    assert result.returncode == 2 and "--output" in result.stdout.splitlines()[-1]
    assert not list(tmp_path.glob("out*"))


FAULTS = ("cut", "a program", "no model", "missing", "folder")
BAD = [*((command, "rotted") for command in READ), *(("import", fault) for fault in FAULTS)]


@pytest.mark.parametrize("command, fault", BAD)
def test_a_bad_file_is_named(ask, sources, tmp_path, command, fault):
    sound, bad = sources / f"{READ[command][0]}.pt", tmp_path / "bad.pt"
    state = torch.load(sound, weights_only=False)
    if fault == "cut":
        bad.write_bytes(sound.read_bytes()[:5000])
    elif fault == "rotted":
        rotted(sound, bad)
    elif fault == "a program":
        torch.save(state | {"more": Intruder(tmp_path / "trace")}, bad)
    elif fault == "no model":
        torch.save({**state, "model": None}, bad)
    elif fault == "folder":
        bad.mkdir()
    before = sorted(tmp_path.iterdir())
    assert f"{bad}" in refusal(*ask(command, bad))
    assert sorted(tmp_path.iterdir()) == before


@COMMANDS
def test_without_room_what_was_there_stays(ask, tmp_path, monkeypatch, command):
    (tmp_path / "out.pt").write_text("old")
    monkeypatch.setattr(os, "fsync", no_room)
    sentence = refusal(*ask(command), "--force")
    assert f"--output {tmp_path / 'out.pt'} " in sentence and "No space left" in sentence
    assert contents(tmp_path) == {"out.pt": b"old"}


@pytest.mark.parametrize(
    "command, killed", [("average", KILLED), ("export weights", KILLED_BEHIND_WEIGHTS)]
)
def test_a_kill_leaves_what_was_there(ask, tmp_path, command, killed):
    """And the next attempt takes the place of what is left beside it."""
    for name in ("out.pt", "out.json"):
        (tmp_path / name).write_text("old")
    assert run_python(killed + MAIN, *ask(command), "--force", server=FAIRSEQ).returncode == -9
    assert contents(tmp_path).items() >= {"out.pt": b"old", "out.json": b"old"}.items()
    assert len(contents(tmp_path)) > 2
    if command == "average":
        (tmp_path / "out.json").unlink()
    call(*ask(command), "--force")
    assert is_whole(tmp_path)


def test_a_signal_leaves_nothing_beside_what_was_there(ask, tmp_path):
    """By the door that all commands have in common."""
    (tmp_path / "out.pt").write_text("old")
    sent = KILLED.replace("SIGKILL", "SIGTERM")
    done = run_python(sent + MAIN, *ask("average"), "--force", server=FAIRSEQ)
    assert done.returncode == 128 + signal.SIGTERM
    assert contents(tmp_path) == {"out.pt": b"old"}
