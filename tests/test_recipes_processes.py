"""Recipes of several processes on a machine without a GPU: interrupted, they go on to the same bits."""

import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from commands import TORCHRUN, bash_functions, bash_torchrun, refused, run_forked, succeeded
from programs import HANGS, path_with, started, wait_until
from ranks import free_port
from sampling import soak
from test_lock import holder
from test_recipes import ROOT, TRAIN, commands, recipe, tiny_place, value, write_dataset
from test_several_processes import LAST, assert_same_bits, content
from test_signals import state

from smoe_fairseq import locks
from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes import processes
from smoe_fairseq.recipes.settings import Settings
from smoe_fairseq.recipes.training.launcher import Launch, plan_launch

# SLURM's: a step is what srun starts; a job that is put into the queue again is ended before.
SLURM = {
    "scontrol": 'if [[ $1 == show ]]; then echo node1; else echo "$@" > requeued; kill "$(< step)"; fi',
    "srun": 'while [[ $1 != python ]]; do shift; done; "$@" & echo $! > step; wait $!',
}


@pytest.fixture
def place(tmp_path, small_corpus) -> dict[str, str]:
    saving = {"save-interval-updates": 2, "keep-interval-updates": 1}
    given = tiny_place(tmp_path, small_corpus, **{"batch-size": 4, **saving})
    return given | {"PATH": path_with(tmp_path / "bin", SLURM)}


def interrupted(folder: Path, script: str, words, send: signal.Signals, environment) -> int:
    """The exit status of a run that is sent a signal once it has saved, which would go on for hours."""
    command = [ROOT / "scripts" / script, *words, "--max-update", 1_000_000]
    process = started(command, folder, os.environ | bash_functions() | environment)
    try:
        wait_until((folder / "runs/tiny/smoe-2-2" / LAST).exists, process)
        process.send_signal(send)
        output, _ = process.communicate(timeout=HANGS)
    finally:
        process.kill()
    log = (folder / "runs/tiny/smoe-2-2/train.log").read_text()
    assert "Traceback" not in output and "gloo" in log, output
    assert "the same command resumes from runs/tiny/smoe-2-2/checkpoint_last.pt" in output
    return process.returncode


def goes_on_to_the_same_bits(tmp_path: Path, script: str, words, given) -> None:
    """Two updates more, against a run of as many at once."""
    parts = tmp_path / "runs/tiny/smoe-2-2"
    saved = torch.load(parts / LAST, weights_only=True)["optimizer_history"][-1]["num_updates"]
    more = ("--max-update", str(saved + 2))
    succeeded(recipe(tmp_path, script, *words, *more, **given))
    log = (parts / "train.log").read_text()
    assert f"Loaded checkpoint runs/tiny/smoe-2-2/{LAST}" in log
    succeeded(recipe(tmp_path, script, *words, *more, **given, RUN_DIR="whole"))
    assert_same_bits(content(parts), content(tmp_path / "whole/tiny/smoe-2-2"))


def test_variables_of_another_launcher_do_not_make_one_process_a_rank(tmp_path, place):
    another = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "LOCAL_RANK": "0"}
    given = place | another | {"WORLD_SIZE": "2", "RANK": "0", "GPUS": "0"}
    words = ("tiny", "smoe-2-2", "--disable-validation", "--max-update", "1")
    succeeded(recipe(tmp_path, "train", *words, **given))


@pytest.mark.parametrize("python", ["/gone/python", "/bin/false"])
def test_an_environment_that_is_closed_to_this_user_or_incomplete_is_named(tmp_path, python):
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".venv/bin/python").symlink_to(python)
    for name in ("recipe", "table.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    command = [tmp_path / "scripts/table.sh", "m4"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1 and f"{tmp_path}/.venv/bin/python" in ended.stderr


@pytest.mark.soak
def test_interrupted_on_a_machine_without_gpu(tmp_path, place):
    """GPUS=2 is two processes; what they need for that is added, and fp16 left out."""
    words = ["tiny", "smoe-2-2", "--disable-validation"]
    given = place | {"GPUS": "2"}
    assert interrupted(tmp_path, "train.sh", words, signal.SIGTERM, given) == 128 + signal.SIGTERM
    # Told so, the recipe need not import torch to count GPUs.
    goes_on_to_the_same_bits(tmp_path, "train", [*words, "--cpu"], given)


@pytest.mark.soak
def test_requeued_by_slurm(tmp_path, place):
    """Four processes; the job is ended while it puts itself into the queue, and runs again from there."""
    words = ["tiny", "smoe-2-2", "--disable-validation", "--cpu"]
    job = {"SLURM_JOB_ID": "11", "SLURM_JOB_NODELIST": "node1", "SLURM_SUBMIT_DIR": str(ROOT)}
    given = place | job | {"GPUS": "4"}
    assert interrupted(tmp_path, "slurm.sh", words, signal.SIGUSR1, given) > 0
    assert (tmp_path / "requeued").read_text() == "requeue 11\n"
    goes_on_to_the_same_bits(tmp_path, "slurm", words, given | {"SLURM_RESTART_COUNT": "1"})


@pytest.mark.soak
def test_two_machines_train_one_run_in_a_folder_that_they_share(tmp_path, place):
    """As by hand, one command on each; the one that comes second joins the run of the first."""
    place = {name: value for name, value in place.items() if name not in bash_torchrun()}
    given = place | {"NODES": "2", "GPUS": "1", "MASTER_PORT": str(free_port())}
    words = ["tiny", "smoe-2-2", "--cpu", "--disable-validation", "--max-update", "2"]
    with ThreadPoolExecutor() as both:
        ends = list(
            both.map(lambda _: recipe(tmp_path, "train", *words, fresh=True, **given), range(2))
        )
    assert [end.returncode for end in ends] == [0, 0], "".join(e.stdout + e.stderr for e in ends)
    folder = tmp_path / "runs/tiny/smoe-2-2"
    assert torch.load(folder / LAST, weights_only=True)["optimizer_history"][-1]["num_updates"] == 2
    assert json.loads((folder / "identity.json").read_text())["trained"] == {"--max-update": "2"}
    # One that is not of this run is refused as ever.
    first = holder(folder, locks.RECIPE)
    other = recipe(tmp_path, "train", *words, **place)
    assert other.returncode == 1 and f"process {first.pid} " in other.stderr
    first.communicate()


@pytest.fixture
def planned(monkeypatch):
    """The launch on a machine with so many GPUs, with ``GPUS`` and other settings."""

    def plan(there: int, gpus: str, *flags: str, **more: str) -> Launch:
        monkeypatch.setattr("torch.cuda.device_count", lambda: there)
        return plan_launch(Settings({"GPUS": gpus, **more}), flags)

    return plan


def test_gpus_that_are_not_there(planned):
    with pytest.raises(
        UsageError, match="^--gpus 2: this machine has 1; expected at most as many, or"
    ):
        planned(1, "2")
    assert planned(1, "2", "--cpu") == Launch("torchrun", 1, 2, cpu=True)
    # One process needs no word about it.
    assert planned(0, "1").flags() == {"cpu": True, "distributed-world-size": 1}
    assert planned(2, "2").flags() == {"cpu": False, "ddp-backend": "legacy_ddp"}
    gloo = {"cpu": True, "distributed-backend": "gloo", "ddp-backend": "legacy_ddp"}
    assert planned(0, "0", NODES="2").flags() == gloo
    for elsewhere in ({"LAUNCHER": "slurm"}, {"DRY_RUN": "1"}):
        assert not planned(0, "2", **elsewhere).cpu


def test_the_device_and_the_back_end_of_a_data_set_are_kept(tmp_path):
    train = TRAIN | {"cpu": True, "ddp-backend": "pytorch_ddp"}
    given = write_dataset(tmp_path / "configs", "own", pairs=["en-fr"], raw={}, train=train)
    given |= {"DRY_RUN": "1", "GPUS": "2"}
    words = commands(recipe(tmp_path, "train", "own", "dense", **given), "torchrun")[0]
    assert value(words, "--ddp-backend") == "pytorch_ddp" and "--cpu" in words


def test_a_command_that_has_ended_does_not_hold_up_the_end(monkeypatch):
    """A study waits for none of its runs; ended ones stay in their groups until somebody does."""
    monkeypatch.setattr(processes, "TIMEOUT_SECONDS", 5)
    sent, send = [], os.killpg
    monkeypatch.setattr(os, "killpg", lambda *words: (sent.append(words[1]), send(*words)))
    with pytest.raises(SystemExit, match="130"), processes.ProcessGroups() as groups:
        groups.start(["sleep", "600"], os.environ)
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.SIGINT in sent and signal.SIGKILL not in sent


SLEEPS = """
import os
from smoe_fairseq.recipes.processes import ProcessGroups
with ProcessGroups() as groups:
    command = groups.start(["sleep", "600"], os.environ)
    print(command.pid, flush=True)
    command.wait()
"""


def test_a_command_is_stopped_and_continued_with_its_recipe():
    """Ctrl-Z reaches the recipe alone, as its commands are in process groups of their own."""
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPS], stdout=subprocess.PIPE, text=True
    ) as ours:
        command = int(ours.stdout.readline())
        try:
            ours.send_signal(signal.SIGTSTP)
            wait_until(lambda: {state(ours.pid), state(command)} == {"T"}, ours)
            ours.send_signal(signal.SIGCONT)
            wait_until(lambda: "T" not in {state(ours.pid), state(command)}, ours)
        finally:
            ours.send_signal(signal.SIGCONT)
            ours.terminate()
    assert ours.returncode == 128 + signal.SIGTERM


RANKS = """if [ "$RANK" = 1 ]; then {}; fi; exec sleep 600"""


@pytest.mark.parametrize(
    "does, named", [("kill -9 $BASHPID", ("rank 1", "SIGKILL")), soak("exit 3", ())]
)
def test_a_rank_that_is_killed_is_named_in_one_sentence(planned, does, named):
    """One that ends by itself has said why."""
    _, safe, _, module, *words = planned(0, "2").words("bash")
    assert (safe, module) == ("-P", TORCHRUN)
    result = run_forked("-m", module, *words, "-c", RANKS.format(does), SMOE_SCREEN="1")
    assert result.returncode == 1
    if named:
        refused(result, *named)
    assert len(result.stdout.splitlines()) == bool(named)


@pytest.mark.soak
def test_ranks_that_are_interrupted_end_without_a_stack_trace(planned, tmp_path):
    words = planned(0, "2").words("bash")[1:]
    # Each waits until torchrun knows that it has started: what is interrupted meanwhile is left behind.
    words = [sys.executable, *words, "-c", f"sleep 2; echo > {tmp_path}/$RANK; exec sleep 600"]
    process = started(words, None)
    wait_until(lambda: {"0", "1"} <= {path.name for path in tmp_path.iterdir()}, process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=HANGS)
    assert process.returncode == 128 + signal.SIGINT and "Traceback" not in output, output
