"""``scripts/slurm.sh`` with stand-ins for SLURM's commands, which no machine here has."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from commands import touch_binarised
from programs import HANGS, path_with, started, wait_until
from test_recipes import ROOT

from smoe_fairseq.recipes.methods import tables

STAND_INS = {
    "sbatch": 'echo "$@" > submitted; echo "$NODES $GPUS $LAUNCHER" > exported',
    "scontrol": 'if [[ $1 == show ]]; then printf "node1\\nnode2\\n"; else echo "$@" >> requeued; exit 1; fi',
    "srun": 'echo "$@" > started; until [[ -e end ]]; do sleep 0.05; done; touch ended; exit 3',
}

EXPORT = f"--export=ALL,SMOE_SCRIPTS={ROOT}/scripts"  # SLURM runs a copy of the script


@pytest.fixture
def cluster(tmp_path) -> dict[str, str]:
    """The environment of a login node."""
    touch_binarised(tmp_path, "m15")
    return os.environ | {"PATH": path_with(tmp_path / "bin", STAND_INS)}


@pytest.mark.parametrize(
    "words, status",
    [
        ("slurm.sh m15 moe --help", 0),
        ("slurm_table.sh m15 moe --seed 2", 2),
        ("slurm_table.sh m15 moe moee", 1),
        ("slurm.sh m15 moe --batch huge", 1),
    ],
)
def test_nothing_is_submitted_for_help_or_for_what_is_wrong(tmp_path, cluster, words, status):
    result = run(tmp_path, cluster, *words.split())
    assert result.returncode == status, result.stderr
    named = next((word for word in words.split() if word.startswith("--")), words.split()[-1])
    assert status == 0 or result.stderr.startswith("error: ") and named in result.stderr
    assert not (tmp_path / "submitted").exists()


def run(tmp_path: Path, environment: dict[str, str], script: str, *words: str):
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    return subprocess.run([ROOT / "scripts" / script, *words], **options)


def test_submission(tmp_path, cluster):
    words = ("slurm.sh", "m15", "smoe-4-12", "--lr", "1")
    assert run(tmp_path, cluster | {"NODES": "2"}, *words).returncode == 0
    expected = (
        f"{EXPORT} --nodes=2 --gpus-per-node=8 {ROOT}/scripts/slurm.sh m15 smoe-4-12 --lr 1\n"
    )
    assert (tmp_path / "submitted").read_text() == expected
    assert (tmp_path / "exported").read_text() == "2 8 slurm\n"


def test_what_a_dry_run_prints_trains(tmp_path, cluster):
    """In a job, which has the numbers of its machines and GPUs from SLURM."""
    words = ("m15", "moe", "--nodes", "2", "--dry-run", "--gpus=4")
    submit, *_ = run(tmp_path, cluster, "slurm.sh", *words).stdout.splitlines()
    assert submit.endswith("/slurm.sh m15 moe --nodes 2 --gpus=4 ")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_SUBMIT_DIR": str(ROOT)}
    job |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "4"}
    said = run(tmp_path, cluster | job, "slurm.sh", "m15", "moe", "--dry-run").stdout
    assert "= 8 ranks x" in said and "--nproc-per-node 4 " in said


def test_job_requeues_itself_and_outlives_the_signals(tmp_path, cluster):
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_SUBMIT_DIR": str(ROOT)}
    command = [ROOT / "scripts/slurm.sh", "m15", "smoe-4-12"]
    process = started(command, tmp_path, cluster | job | {"NODES": "2"})
    wait_until((tmp_path / "started").exists, process)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        process.send_signal(number)
        time.sleep(0.3)
    assert not (tmp_path / "ended").exists()
    (tmp_path / "end").touch()
    output, _ = process.communicate(timeout=HANGS)
    assert process.returncode == 3, output  # Training's own status.
    assert (tmp_path / "ended").exists()
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    words = (tmp_path / "started").read_text()
    assert "--rdzv-endpoint node1:20007" in words
    assert "--nproc-per-node 8 --no-python fairseq-train data/m15/bin" in words


# Of several clusters, it names that of the first job.
SBATCH = """echo "$@" >> submitted
n=$(wc -l < submitted)
if [[ $n == 1 ]]; then on=" on cluster one"; fi
echo "Submitted batch job $n$on"
"""


@pytest.mark.soak
@pytest.mark.parametrize("methods", [("smoe-4-4",), ()])
def test_a_dry_run_of_a_table_prints_two_jobs_for_each_of_its_rows(tmp_path, cluster, methods):
    """Without methods, of all rows of the paper's."""
    touch_binarised(tmp_path, "m4")
    given = {"DRY_RUN": "1", "NODES": "2", "SEED": "5", "DATA_DIR": "my data"}
    (tmp_path / "data").rename(tmp_path / "my data")
    result = run(tmp_path, cluster | given, "slurm_table.sh", "m4", *methods)
    seed, folder, *lines = result.stdout.splitlines()
    assert (seed, folder) == ("export SEED=5", "export DATA_DIR=my\\ data")
    methods = methods or list(tables()["m4"]["rows"])
    assert [line.split()[-1] for line in lines[::2]] == list(methods)
    first = f"sbatch {EXPORT} --nodes=2 --gpus-per-node=8 {ROOT}/scripts/slurm.sh m4 {methods[0]} "
    assert lines[0].replace("\\,", ",") == first
    assert all(
        line.startswith("sbatch --export=ALL --dependency=afterok:JOB_OF_") for line in lines[1::2]
    )
    assert not (tmp_path / "submitted").exists()


def test_scores_of_a_table_wait_for_training(tmp_path, cluster):
    (tmp_path / "bin/sbatch").write_text(f"#!/usr/bin/env bash\n{SBATCH}")
    words = ("slurm_table.sh", "m15", "moe", "smoe-4-12")
    assert run(tmp_path, cluster, *words).returncode == 0
    train, score, other, last = (tmp_path / "submitted").read_text().splitlines()
    assert train == f"{EXPORT} --nodes=1 --gpus-per-node=8 {ROOT}/scripts/slurm.sh m15 moe"
    assert other == train.removesuffix("moe") + "smoe-4-12"
    assert "--dependency=afterok:1 " in score and "--kill-on-invalid-dep=yes" in score
    assert "--dependency=afterok:3 " in last
    assert score.endswith(f"--wrap NODES=1 GPUS=1 {ROOT}/scripts/evaluate.sh m15 moe ")
