"""A study: every method and seed, interrupted and resumed, and what its report says of them."""

import csv
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_recipes import recipe, refusal, surroundings, write_dataset, write_text
from test_recipes_evaluation import kill, wait_until

from smoe_fairseq.recipes.study import results as study_results

ROOT = Path(__file__).parents[1]
RUNS = ("moe", "smoe-2-2", "moe.seed-2", "smoe-2-2.seed-2")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A data set to study, prepared."""
    folder = tmp_path_factory.mktemp("study")
    raw = write_text(folder / "text", "en-fr", train=100, valid=10, test=30)
    given = write_dataset(
        *(folder / "configs", "tiny"),
        pairs=["en-fr"],
        experts=4,  # of which smoe-2-2 is one
        raw={},
        subwords={"vocab-size": 60},
        train={
            **{"arch": "smoe_transformer_tiny", "max-tokens": 500, "max-update": 2},
            **{"lr": 0.01, "warmup-updates": 1, "num-workers": 0, "log-interval": 1},
        },
        generate={"max-tokens": 1000, "max-len-b": 10, "num-workers": 0},
        study=["moe", "smoe-2-2"],
    )
    given |= {"OMP_NUM_THREADS": "1", "SEEDS": "1 2", "GPUS": "0"}
    prepared = recipe(folder, "prepare", "tiny", RAW=str(raw), **given)
    assert prepared.returncode == 0, prepared.stderr
    return folder, given


@pytest.fixture(scope="module")
def studied(data):
    """Killed when the first run was kept and reported, and started again."""
    folder, given = data
    first = subprocess.Popen(
        [ROOT / "scripts/study.sh", "tiny"],
        cwd=folder,
        env=surroundings() | given | {"JOBS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    report = folder / "results/tiny/report.md"
    wait_until(lambda: report.exists() or first.poll() is not None)
    kill(first, folder)
    (done,) = kept_runs(folder)
    before = (folder / "results/tiny" / done / study_results.FILE).stat().st_mtime_ns
    absolute = {"RUN_DIR": str(folder / "runs")}
    result = recipe(folder, "study", "tiny", JOBS="2", **given | absolute)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (folder / "results/tiny" / done / study_results.FILE).stat().st_mtime_ns == before
    return folder, result.stdout


def kept_runs(folder: Path) -> list[str]:
    names = [path.parent.name for path in folder.glob(f"results/tiny/*/{study_results.FILE}")]
    return [name for name in names if not name.endswith(".partial")]


def kept_command(folder: Path, run: str) -> str:
    return json.loads((folder / "results/tiny" / run / study_results.FILE).read_text())["command"]


@pytest.mark.soak
def test_an_interrupted_study_goes_on_with_what_is_left(studied):
    folder, said = studied
    assert "--path runs/tiny/smoe-2-2/checkpoint" in kept_command(folder, "smoe-2-2")
    assert "# tiny: 3 of 4 runs are left" in said and "(3 of 3 runs)" in said
    assert sorted(kept_runs(folder)) == sorted(RUNS)
    for name in RUNS:
        about = json.loads((folder / "results/tiny" / name / study_results.FILE).read_text())
        assert about["updates"] == 2
        assert str(folder) not in kept_command(
            folder, name
        )  # of any machine, so as without RUN_DIR
        assert about["flags"]["--seed"] == ("2" if name.endswith("seed-2") else "1")
        assert set(about["versions"]) == {"torch", "fairseq", "sacrebleu"}
        same = folder / "runs/tiny" / name / "scores.json"
        assert (folder / "results/tiny" / name / "scores.json").read_text() == same.read_text()


@pytest.mark.soak
def test_flags_that_kept_runs_were_not_made_with_are_refused(studied, data):
    """They would have no effect; those that are not part of a run have none on its results."""
    folder, _ = studied
    said = refusal(recipe(folder, "study", "tiny", "moe", "--lr", "0.5", **data[1]))
    assert "--lr 0.5" in said and "made with --lr 0.01" in said and "results/tiny/moe " in said
    again = recipe(folder, "study", "tiny", "moe", "--lr=0.01", "--log-interval", "5", **data[1])
    assert again.returncode == 0 and "0 of 2 runs are left" in again.stdout, again.stderr


@pytest.mark.soak
def test_the_curve_is_that_of_the_log(studied):
    folder, _ = studied
    with open(folder / "results/tiny/moe/curve.csv") as lines:
        rows = list(csv.DictReader(lines))
    log = (folder / "runs/tiny/moe/train.log").read_text()
    assert [row["update"] for row in rows] == ["1", "2"]
    for row in rows:
        number = float(row["training_nll"])
        assert f"nll_loss={number:g}, " in log
    assert f"nll_loss {float(rows[-1]['validation_nll']):g} " in log
    assert float(rows[-1]["words"]) > float(rows[0]["words"]) > 0


@pytest.mark.soak
def test_experts_per_token_are_those_of_all_updates(studied):
    folder, _ = studied
    log = (folder / "runs/tiny/smoe-2-2/train.log").read_text()
    pattern = r"experts_per_token=([\d.]+), .*wpb=([\d.]+), .*num_updates=(\d+)"
    lines = {update: numbers for *numbers, update in re.findall(pattern, log)}  # the last of each
    experts, words = (np.array(column, float) for column in zip(*lines.values(), strict=True))
    assert len(lines) == 2
    about = json.loads((folder / "results/tiny/smoe-2-2" / study_results.FILE).read_text())
    assert about["experts_per_token"] == pytest.approx(np.average(experts, weights=words), abs=1e-3)


@pytest.mark.soak
def test_the_report_is_made_of_what_is_kept(studied, tmp_path):
    """On a machine without the runs; again the same."""
    folder, _ = studied
    report = (folder / "results/tiny/report.md").read_text()
    shutil.copytree(folder / "results", tmp_path / "results")
    shutil.copytree(folder / "configs", tmp_path / "configs", symlinks=True)
    given = {"CONFIG_DIR": str(tmp_path / "configs"), "SEEDS": "1 2", "GPUS": "0"}
    (tmp_path / "data/tiny/bin").mkdir(parents=True)
    again = recipe(tmp_path, "study", "tiny", **given)
    assert again.returncode == 0 and "0 of 4 runs are left" in again.stdout, again.stderr
    assert (tmp_path / "results/tiny/report.md").read_text() == report
    assert not (tmp_path / "results/tiny/moe/routing.json").exists()
    of_smoe = json.loads((tmp_path / "results/tiny/smoe-2-2/routing.json").read_text())
    assert set(of_smoe["requested_capacity"]["en-fr"]) == {"encoder.1", "decoder.1"}
    with open(folder / "runs/tiny/smoe-2-2/routing/blocks.csv") as lines:
        rows = [r for r in csv.DictReader(lines) if r["kind"] == "text"]
    for row in rows:
        layer = of_smoe["requested_capacity"][row["direction"]][f"{row['side']}.{row['layer']}"]
        assert layer == float(row["requested_capacity"])
    scores = [json.loads((folder / "results/tiny" / n / "scores.json").read_text()) for n in RUNS]
    bleu = {n: sum(d["bleu"] for d in s["scores"].values()) / 2 for n, s in zip(RUNS, scores)}
    mean = (bleu["moe"] + bleu["moe.seed-2"]) / 2
    spread = abs(bleu["moe"] - bleu["moe.seed-2"]) / math.sqrt(2)
    row = next(
        line for line in report.split("## Systems")[1].splitlines() if line.startswith("| moe ")
    )
    assert f"{mean:.2f} ± {spread:.2f}" in row and " 2 |" in row
    assert "smoe-2-2 and moe" in report
    for name in ("costs", "statements"):
        assert f"![{name}]({name}.png)" in report
        assert (tmp_path / f"results/tiny/{name}.png").stat().st_size > 10_000


@pytest.mark.soak
def test_a_dry_run_prints_what_is_left(data, tmp_path):
    folder, given = data
    result = recipe(tmp_path, "study", "tiny", "dense", "--lr", "1", DRY_RUN="1", **given)
    lines = result.stdout.splitlines()
    assert lines[0] == "# tiny: 2 of 2 runs are left"
    assert lines[2].startswith(
        "SEED=2 python -P -m smoe_fairseq.recipes train tiny dense --lr 1 && "
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
def test_bad_input_of_a_study_is_one_sentence(data, tmp_path):
    _, given = data
    assert "'odd'" in refusal(recipe(tmp_path, "study", "tiny", "odd", **given))
    assert "SEEDS=1x: expected" in refusal(
        recipe(tmp_path, "study", "tiny", **given | {"SEEDS": "1x"})
    )
    assert "each seed once" in refusal(
        recipe(tmp_path, "study", "tiny", **given | {"SEEDS": "1 1"})
    )
    assert "JOBS=no" in refusal(recipe(data[0], "study", "tiny", "dense", JOBS="no", **given))
    assert "prepare.sh tiny" in refusal(recipe(tmp_path, "study", "tiny", **given))
    assert "no runs" in refusal(recipe(tmp_path, "report", "tiny", **given))


@pytest.mark.soak
def test_what_cannot_be_kept_is_known_before_the_first_run(data, tmp_path):
    folder, given = data
    for name in ("configs", "data"):
        os.symlink(folder / name, tmp_path / name)
    (tmp_path / "file").touch()
    result = recipe(tmp_path, "study", "tiny", RESULTS_DIR=str(tmp_path / "file"), **given)
    assert str(tmp_path / "file") in refusal(result)
    assert not (tmp_path / "runs").exists()


@pytest.mark.soak
def test_a_run_that_fails_does_not_end_the_others(data, tmp_path):
    folder, given = data
    for name in ("configs", "data"):
        os.symlink(folder / name, tmp_path / name)
    odd = tmp_path / "runs/tiny/smoe-2-2"
    odd.mkdir(parents=True)
    (odd / study_results.STARTS_FILE).write_text("[")
    given = given | {"SEEDS": "1"}
    assert study_results.STARTS_FILE in refusal(
        recipe(tmp_path, "study", "tiny", "moe", "smoe-2-2", **given)
    )
    assert not (tmp_path / "runs/tiny/moe").exists()
    (odd / study_results.STARTS_FILE).unlink()
    (odd / "checkpoint_last.pt").write_text("no checkpoint")
    sentence = refusal(recipe(tmp_path, "study", "tiny", "smoe-2-2", "moe", JOBS="1", **given))
    assert "1 of 2 runs failed (smoe-2-2)" in sentence and "smoe-2-2/study.log" in sentence
    assert kept_runs(tmp_path) == ["moe"]
    assert "\n| moe " in (tmp_path / "results/tiny/report.md").read_text()
    assert "checkpoint_last.pt" in (odd / "study.log").read_text()


def test_a_second_study_in_a_folder_is_refused_before_it_notes_anything(data, tmp_path):
    folder, given = data
    for name in ("configs", "data"):
        os.symlink(folder / name, tmp_path / name)
    runs = tmp_path / "runs/tiny"
    runs.mkdir(parents=True)
    hold = (
        "import sys, time; from pathlib import Path; from smoe_fairseq.files import lock_folder\n"
    )
    hold += (
        "lock_folder(Path(sys.argv[1]), 'study.lock'); print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, runs], stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout.readline() == "held\n"
        said = refusal(recipe(tmp_path, "study", "tiny", "moe", **given))
        first.kill()
    assert "runs/tiny" in said and f"process {first.pid}" in said
    assert [path.name for path in runs.iterdir()] == ["study.lock"]
