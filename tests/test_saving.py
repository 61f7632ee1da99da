"""Saves between validations: by minutes, and when a signal ends training, after which it resumes exactly."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from commands import WITH_PLUGIN, run_python, succeeded, train
from programs import wait_until
from sampling import soak
from test_expert_parallel import flags
from test_lock import SMALL
from test_several_processes import LAST, assert_same_bits, content

from smoe_fairseq import locks

FOREVER = "--max-update 1000000 --max-epoch 0 --log-interval 1 --save-interval 1000000".split()
MODES = {"one": (1, ()), "replicated": (2, ()), "sharded": (2, ("--expert-parallel",))}


def begin(ranks, corpus, folder, mode, *more):
    """A run that would go on for ever; returns it once it has made some updates."""
    number, own = MODES[mode]
    words = [*flags(corpus, folder, *own), "--no-epoch-checkpoints", *FOREVER, *more]
    run = ranks.start(folder.with_name("logs"), number, *words, one=number == 1)
    wait_until(lambda: run.output(0).count("num_updates") > 3 or 1 in run.statuses())
    return run, own


def test_an_updates_checkpoint_at_the_end_of_an_epoch_is_kept(small_corpus, tmp_path):
    words = ("--batch-size", 10, "--save-interval-updates", 5, "--keep-interval-updates", 2)
    more = ("--max-epoch", 2, "--required-batch-size-multiple", 1)
    succeeded(train(small_corpus, tmp_path, *SMALL, *words, *more))
    kept = sorted(file.name for file in tmp_path.glob("checkpoint*.pt"))
    assert kept == ["checkpoint_1_5.pt", "checkpoint_2_10.pt", "checkpoint_last.pt"]


@pytest.mark.soak
def test_the_last_epoch_is_saved_whatever_the_interval(small_corpus, tmp_path):
    words = ("--save-interval", 2, "--validate-interval", 2, "--max-epoch", 3, "--batch-size", 25)
    succeeded(train(small_corpus, tmp_path, *SMALL, *words))
    state = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)["extra_state"]
    assert state["train_iterator"]["epoch"] == 4  # the next one


def updates(folder) -> int:
    name = LAST if (folder / LAST).exists() else "checkpoint_last-rank-0.pt"
    return torch.load(folder / name, weights_only=True)["optimizer_history"][-1]["num_updates"]


@pytest.mark.parametrize(
    "mode, number",
    [
        ("one", signal.SIGINT),
        ("sharded", signal.SIGTERM),
        soak("replicated", signal.SIGTERM),
    ],
)
def test_a_signal_to_one_rank_saves_on_all_and_the_run_resumes_exactly(
    ranks, small_corpus, tmp_path, mode, number
):
    """Before it, it has saved by minutes, for a run that is killed."""
    by_minutes = ("--save-interval-minutes", 0.001)
    run, own = begin(ranks, small_corpus, tmp_path / "parts", mode, *by_minutes)
    name = "checkpoint_last-rank-0.pt" if mode == "sharded" else LAST
    wait_until(lambda: (tmp_path / "parts" / name).exists() or 1 in run.statuses())
    os.kill(run.pids[-1], number)
    assert set(run.wait()) == {128 + number}, run.output()
    assert "Traceback" not in run.output()
    assert not list((tmp_path / "parts").glob("checkpoint_[0-9]*"))  # nothing accumulates
    until = ("--max-update", updates(tmp_path / "parts") + 2)
    for folder in ("parts", "whole"):
        words = flags(small_corpus, tmp_path / folder, *own, "--no-epoch-checkpoints", *FOREVER)
        ranks.train(tmp_path / "logs", MODES[mode][0], *words, *until, one=mode == "one")
    if mode != "sharded":
        assert_same_bits(content(tmp_path / "parts"), content(tmp_path / "whole"))
    else:
        for rank in (0, 1):
            file = f"checkpoint_last-rank-{rank}.pt"
            one, other = (
                torch.load(tmp_path / f / file, weights_only=True) for f in ("parts", "whole")
            )
            assert_same_bits(one, other)


def test_a_signal_to_all_processes_of_a_run_saves(ranks, small_corpus, tmp_path):
    """As from `timeout`, a terminal or SLURM: to those that load data, too, even before the others."""
    loading = ("--num-workers", 2, "--data-buffer-size", 0)  # torch then ends the main thread, too
    run, _ = begin(ranks, small_corpus, tmp_path / "run", "one", *loading)
    (pid,) = run.pids
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    workers = [worker for children in threads for worker in children.read_text().split()]
    assert workers
    for each in (*map(int, workers), pid):
        os.kill(each, signal.SIGTERM)
        time.sleep(0.1)
    assert run.wait() == [128 + signal.SIGTERM], run.output()
    assert updates(tmp_path / "run") > 0
    wait_until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))


def test_signals_are_noted_once_and_by_the_main_thread_of_the_run_alone():
    """Programs that it starts end by any."""
    program = """
import signal, subprocess, threading
from smoe_fairseq.training.saving import SaveTimer
timer, own = SaveTimer(1), signal.getsignal(signal.SIGTERM)
thread = threading.Thread(target=timer.listen)
thread.start(), thread.join()
assert signal.getsignal(signal.SIGTERM) is own
for _ in range(2):
    timer.listen()
assert timer.before[signal.SIGTERM] is own
subprocess.run(["grep", "SigBlk", "/proc/self/status"], preexec_fn=lambda: None)
"""
    assert run_python(program, server=WITH_PLUGIN).stdout.split() == ["SigBlk:", "0" * 16]


def test_a_second_signal_ends_at_once(ranks, small_corpus, tmp_path):
    """While the first one waits for the end of an update, which here never comes."""
    run, _ = begin(ranks, small_corpus, tmp_path / "run", "replicated")
    os.kill(run.pids[1], signal.SIGSTOP)
    holder = (tmp_path / "run" / locks.TRAINING).read_text()
    for _ in range(2):
        os.kill(run.pids[0], signal.SIGTERM)
        wait_until(lambda: "SIGTERM" in run.output(0))
    assert (tmp_path / "run" / locks.TRAINING).read_text().startswith(f"{holder}, ")
    wait_until(lambda: run.statuses()[0] is not None)
    assert run.statuses()[0] in (-signal.SIGTERM, 128 + signal.SIGTERM)
    run.kill()
    assert not (tmp_path / "run" / LAST).exists()
