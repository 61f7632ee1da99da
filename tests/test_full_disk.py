"""A disk without room, in every command: one sentence, exit status 1, and what was there before stays."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import FAIRSEQ, RECIPES, SCRIPTS, STEP, contents, generation, no_room, refused, start
from handmade import training
from programs import HANGS
from test_recipes import server, write_dataset
from test_recipes_archives import opus100

from smoe_fairseq import files
from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes import processes
from smoe_fairseq.recipes.datasets import load_dataset
from smoe_fairseq.recipes.evaluation import scores
from smoe_fairseq.recipes.evaluation.evaluation import Evaluation
from smoe_fairseq.recipes.settings import Settings
from smoe_fairseq.recipes.training import train

assert server  # a fixture


LIMITED = """
import resource, signal, sys
from __main__ import run_program  # of warm.py

size, *words = sys.argv[1:]
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), int(size)))
sys.dont_write_bytecode = True  # of which Python 3.11 would keep the half for later
run_program(words)
"""


def limited(size: int, *command, cwd=None, **environment) -> subprocess.CompletedProcess:
    """A command, of which no file may become larger; its disk seems to be full."""
    program, *words = map(str, command)
    server = RECIPES if program == "python" else FAIRSEQ
    path = [] if program == "python" else [str(SCRIPTS / program)]
    given = {"OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1", **environment}
    return subprocess.run(
        [*start(server), "-c", LIMITED, str(size), *path, *words],
        cwd=cwd,
        env=os.environ | given,
        capture_output=True,  # by pipes, which have no size
        text=True,
        timeout=HANGS,
    )


# Standard output


def printing(command: str, output, **environment) -> subprocess.CompletedProcess:
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    words = [str(SCRIPTS / "smoe"), *command.split()]
    return subprocess.run(
        words, env=inherited | environment, stdout=output, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["path", "path --help"])
def test_output_that_cannot_be_written(command, unbuffered):
    with open("/dev/full", "w") as full:
        result = printing(command, full, PYTHONUNBUFFERED=unbuffered)
    assert result.returncode == 1
    assert result.stderr.startswith("error: standard output ") and result.stderr.count("\n") == 1


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_closed_streams(closed):
    words = ["bash", "-c", f"{SCRIPTS / 'smoe'} path {closed}"]
    result = subprocess.run(words, capture_output=True, text=True)
    if closed == "2>&-":
        assert (result.returncode, result.stderr) == (0, "") and result.stdout.count("\n") == 1
    else:
        assert result.returncode == 1 and "standard output" in result.stderr
        assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["path", "path --help"])
def test_a_reader_that_has_gone_is_no_error(command):
    reading, writing = os.pipe()
    os.close(reading)
    result = printing(command, writing)
    os.close(writing)
    assert (result.returncode, result.stderr) == (128 + signal.SIGPIPE, "")


# The steps of prepare.sh


def step(tmp_path: Path, size: int, *words, **environment) -> str:
    result = limited(size, "python", *STEP, *words, cwd=tmp_path, **environment)
    assert result.stderr.count("error: ") == 1
    return refused(result)


def test_fetch(tmp_path, server):
    server.files["train.en"] = b"text\n" * 4000
    server.bytes_per_reply = 10**6
    raw = {"files": "{split}.{language}", "url": f"http://127.0.0.1:{server.server_port}/{{file}}"}
    given = write_dataset(tmp_path / "configs", "remote", pairs=["en-fr"], raw=raw)
    told = step(tmp_path, 5000, "fetch", "remote", "download", **given)
    assert told.startswith("error: download/train.en.part ")
    assert server.starts == [0]  # The network is well and is not asked again.
    assert set(contents(tmp_path / "download")) == {"train.en.part", "train.en.part.version"}


def test_unpack(tmp_path):
    (tmp_path / "download").mkdir()
    (tmp_path / "download/opus-100-corpus-v1.0.tar.gz").write_bytes(opus100())
    assert "unpacked" in step(tmp_path, 500, "unpack", "opus100", "download", "unpacked")
    assert [path.name for path in tmp_path.iterdir()] == ["download"]


@pytest.mark.parametrize("workers", [1, 2])
def test_preprocess(tmp_path, raw_corpus, workers):
    command = ("fairseq-preprocess", "-s", "src", "-t", "tgt", "--trainpref", raw_corpus / "train")
    command += ("--destdir", tmp_path / "bin", "--workers", workers)
    result = limited(1000, *command)  # Python tells of its log, which is on the same disk
    assert f"--destdir {tmp_path / 'bin'} " in result.stderr.splitlines()[-1]
    assert result.returncode == 1


def test_generate(tmp_path, corpus, pre_norm):
    command = ("fairseq-generate", *generation(corpus, pre_norm), "--results-path", tmp_path)
    command += ("--num-workers", 0)  # others hand batches over in files, which are limited too
    result = limited(1000, *command)  # Python tells of its log here too
    last = result.stderr.splitlines()[-1]
    assert result.returncode == 1 and last.startswith(f"error: --results-path {tmp_path} ")


def test_an_update_that_diverged_is_the_error_though_its_checkpoint_is_not_saved(
    tmp_path, small_corpus
):
    command = training(small_corpus, tmp_path, "--lr", 1e30, "--max-update", 9)
    result = limited(30_000, *command)
    refused(result, "--lr")
    assert "crash.pt" in result.stderr + result.stdout
    assert not list(tmp_path.glob("*.pt*"))


# train.sh and evaluate.sh


def test_a_log_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "open_plain", lambda *_, **__: open("/dev/full", "wb"))
    with pytest.raises(UsageError, match="train.log"):
        train.begin_log(tmp_path / "train.log", "fairseq-train")


def test_scores_that_cannot_be_saved_leave_the_old_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs/multi30k/moe"
    for folder in ("test", "test.partial"):
        (run / folder).mkdir(parents=True)
    for name in ("test/en-de.txt", "scores.json", "checkpoint_best.pt", "test.partial/en-de.txt"):
        (run / name).write_text("old")
    before = contents(run)
    dataset = load_dataset("multi30k")
    evaluation = Evaluation(dataset, run, run / "checkpoint_best.pt", ("en-de",))
    monkeypatch.setattr(files.os, "fsync", no_room)
    with pytest.raises(UsageError, match="scores.json"):
        evaluation.finish({"en-de": scores.Score(30.0, "s", 1, 1.0)})
    assert contents(run) == before


def test_a_program_that_does_not_say_what_went_wrong_is_named(capfd):
    with pytest.raises(UsageError) as error:
        processes.run(["env python -c 'print(1)' > /dev/full"], Settings())
    assert str(error.value).startswith("env failed with exit status ")
    with pytest.raises(
        UsageError, match=r"^echo \| cut failed with exit status 1, for the reason above"
    ):
        processes.run(["echo 1 | cut -c1 > /dev/full"], Settings())
    assert "No space left on device" in capfd.readouterr().err


def test_a_terminal_of_few_letters_gets_the_others_spelt_out():
    """Such as one in Latin-1, for the demo's translations."""
    program = "from smoe_fairseq.ending import flush_stdout; flush_stdout()(print)('ž ± 1')"
    given = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    printed = subprocess.run([sys.executable, "-c", program], env=given, stdout=subprocess.PIPE)
    assert printed.stdout == b"\\u017e \xb1 1\n"
