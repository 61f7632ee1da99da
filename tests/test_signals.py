"""Recipes that are told to stop: nothing that they have started is left behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import STEP, run, touch_binarised
from programs import HANGS, path_with, started, wait_until
from sampling import soak
from test_recipes import ROOT

# In the place of srun, which starts the training: a process that takes its time to end, and one in the
# background, where bash would have SIGINT ignored.
SRUN = """
trap 'sleep 0.3; echo heeded > heeded; exit 0' TERM INT HUP
python -S -c '
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_DFL)
open("background", "w").write(str(os.getpid()))
time.sleep(600)
' &
echo $$ > started
wait
wait
"""


def state(pid: int) -> str:
    """A process's state, such as T (stopped)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def ended(pid: int) -> bool:
    """A process that nobody has asked for its status is still listed, as a zombie."""
    try:
        return state(pid) == "Z"
    except FileNotFoundError:
        return True


MOE = ["train.sh", "m15", "moe"]


@pytest.fixture(params=[MOE])
def training(tmp_path, request):
    """A script that trains, once its command runs, and the processes of the command."""
    script, *words = request.param
    for dataset in ("m15", "phrasebook"):
        touch_binarised(tmp_path, dataset)
    path = path_with(tmp_path / "bin", {"srun": SRUN})
    given = {"PATH": path, "GPUS": "1", "LAUNCHER": "slurm"}
    process = started([ROOT / "scripts" / script, *words], tmp_path, os.environ | given)
    files = [tmp_path / name for name in ("background", "started")]
    wait_until(lambda: all(f.exists() and f.read_text().strip() for f in files), process)
    pids = [int(file.read_text()) for file in files]
    yield process, pids
    for pid in [process.pid, *pids]:
        if not ended(pid):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize(
    "training, number",
    [soak(MOE, signal.SIGTERM), (MOE, signal.SIGINT), (["demo.sh"], signal.SIGHUP)],
    indirect=["training"],
)
def test_signal_reaches_training_and_is_waited_for(tmp_path, training, number):
    process, pids = training
    process.send_signal(number)
    output, _ = process.communicate(timeout=HANGS)
    assert (tmp_path / "heeded").exists(), output
    assert all(map(ended, pids))
    assert process.returncode == 128 + number, output
    assert "Traceback" not in output


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells of a parent's end")
def test_training_ends_with_a_recipe_that_is_killed(tmp_path, training):
    process, pids = training
    process.kill()
    process.wait()
    wait_until(lambda: ended(pids[1]))
    assert (tmp_path / "heeded").exists()


RUN = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from smoe_fairseq.recipes.processes import run
from smoe_fairseq.recipes.settings import Settings
from smoe_fairseq.errors import ends_with_sentence
ends_with_sentence()(run)([sys.argv[1]], Settings())
"""


def test_ignored_signal_stays_ignored(tmp_path):
    line = 'kill -HUP "$PPID"; kill -HUP $$; sleep 0.2; echo outlived > outlived'
    result = subprocess.run([sys.executable, "-c", RUN, line], cwd=tmp_path)
    assert result.returncode == 0 and (tmp_path / "outlived").exists()


def test_a_command_that_a_signal_ends_has_its_status_in_a_shell():
    program = """
import signal
from smoe_fairseq.ending import exit_on_signals
with exit_on_signals():
    signal.raise_signal(signal.SIGTERM)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == 128 + signal.SIGTERM


def test_status_of_a_command_that_was_killed_by_others(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", RUN, "kill -KILL $$"], capture_output=True, text=True
    )
    assert result.returncode == 1
    assert result.stderr == "error: kill was stopped by SIGKILL\n"


# Ctrl-C when the package's first module is being imported, or the last ones.
INTERRUPT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # perhaps ignored here
class Finder:
    def find_spec(name, path=None, target=None):
        if name == os.environ["INTERRUPTED"]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
"""


@pytest.mark.parametrize(
    "words, module",
    [(["smoe", "path"], "compat"), (["python", *STEP, "table", "phrasebook"], "recipes.commands")],
)
def test_interrupt_at_the_start_shows_no_stack_trace(tmp_path, words, module):
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT)
    given = {"PYTHONPATH": str(tmp_path), "INTERRUPTED": f"smoe_fairseq.{module}"}
    result = run(*words, fresh=True, check=False, **given)
    assert (result.returncode, result.stdout) == (-signal.SIGINT, "")
