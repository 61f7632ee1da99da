"""A study: every method and seed, interrupted and resumed, and what its report says of them."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from commands import step_here, succeeded
from programs import wait_until
from test_lock import holder
from test_recipes import recipe, refusal, surroundings, write_dataset, write_text

from smoe_fairseq.recipes.study import results as study_results
from smoe_fairseq.recipes.training import identity

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
    succeeded(recipe(folder, "prepare", "tiny", RAW=str(raw), **given))
    return folder, given


def kept_runs(folder: Path) -> list[str]:
    return [path.parent.name for path in folder.glob(f"results/tiny/*/{study_results.FILE}")]


def kept_command(folder: Path, run: str) -> str:
    return json.loads((folder / "results/tiny" / run / study_results.FILE).read_text())["command"]


def change_json(file: Path, **values) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.soak
def test_an_interrupted_study_goes_on_with_what_is_left(data):
    """Ended when the first run was kept and reported, and started again."""
    folder, given = data
    first = subprocess.Popen(
        [ROOT / "scripts/study.sh", "tiny"],
        cwd=folder,
        env=surroundings() | given | {"JOBS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    report = folder / "results/tiny/report.md"
    wait_until(lambda: report.exists() or first.poll() is not None)
    first.terminate()
    first.wait()
    (done,) = kept_runs(folder)
    before = (folder / "results/tiny" / done / study_results.FILE).stat().st_mtime_ns
    absolute = {"RUN_DIR": str(folder / "runs")}
    said = succeeded(recipe(folder, "study", "tiny", JOBS="2", **given | absolute)).stdout
    assert (folder / "results/tiny" / done / study_results.FILE).stat().st_mtime_ns == before
    assert "--path runs/tiny/smoe-2-2/checkpoint" in kept_command(folder, "smoe-2-2")
    assert "# tiny: 3 of 4 runs are still to do" in said and "(3 of 3 runs)" in said
    assert sorted(kept_runs(folder)) == sorted(RUNS)
    for name in RUNS:
        about = json.loads((folder / "results/tiny" / name / study_results.FILE).read_text())
        assert about["updates"] == 2
        of_here = [
            each for each in [about["command"], *about["flags"].values()] if str(folder) in each
        ]
        assert not of_here  # the same on any machine, as without RUN_DIR
        assert about["flags"]["--seed"] == ("2" if name.endswith("seed-2") else "1")
        assert set(about["versions"]) == {"torch", "fairseq", "sacrebleu"}
        same = folder / "runs/tiny" / name / "scores.json"
        assert (folder / "results/tiny" / name / "scores.json").read_text() == same.read_text()


def test_a_second_study_is_refused_and_a_run_that_fails_does_not_end_the_others(prepared, tmp_path):
    for name in ("configs", "data"):
        os.symlink(prepared / name, tmp_path / name)
    runs = tmp_path / "runs/tiny"
    runs.mkdir(parents=True)
    first = holder(runs, "study.lock")
    given = {"CONFIG_DIR": str(prepared / "configs"), "SEEDS": "1 2", "GPUS": "0"}
    said = refusal(step_here("study", "tiny", "smoe-2-2", cwd=tmp_path, **given))
    first.communicate()
    assert "runs/tiny" in said and f"process {first.pid}" in said
    assert not list(runs.iterdir())  # before it notes anything
    for words in (("--no-such-flag", "3"), ("--lr", "0.1", "moe")):  # methods come first
        said = refusal(
            step_here("study", "tiny", "dense", *words, "--dry-run", cwd=tmp_path, **given)
        )
        assert words[0] in said or words[-1] in said
    given |= {"SEEDS": "2", "JOBS": "1", "BATCH": "600", "PRECISION": "bf16"}
    study = ("study", "tiny", "smoe-2-2", "dense")
    (failing, dense) = (runs / f"{method}.seed-2" for method in study[2:])
    failing.mkdir()
    (failing / study_results.STARTS_FILE).write_text('[{"commit": "a"}]')
    assert study_results.STARTS_FILE in refusal(step_here(*study, cwd=tmp_path, **given))
    assert not dense.exists()
    (failing / study_results.STARTS_FILE).unlink()
    dense.mkdir()
    longer = {"method": "dense", "dictionary": "", "flags": {}, "trained": {"--max-update": "999"}}
    (dense / "identity.json").write_text(json.dumps(longer))
    assert "999 updates" in refusal(step_here(*study, cwd=tmp_path, **given))
    assert not (dense / "study.log").exists()
    (dense / "identity.json").unlink()  # as trained and scored
    (dense / "train.log").write_text('{"valid_nll_loss": 7.5, "valid_num_updates": 15}\n')
    score = {"bleu": 30.0, "signature": "s", "sentences": 3}
    (dense / "scores.json").write_text(json.dumps({"scores": {"en-fr": score}}))
    given["BASH_FUNC_python%%"] = '() { [[ $* != *smoe-2-2* ]] || { echo "no $4"; false; }; }'
    said = refusal(step_here(*study, cwd=tmp_path, **given))
    assert "1 of 2 runs failed (smoe-2-2.seed-2)" in said and "smoe-2-2.seed-2/study.log" in said
    assert (failing / "study.log").read_text() == "no train\n"
    assert kept_runs(tmp_path) == ["dense.seed-2"]
    train, evaluate = kept_command(tmp_path, "dense.seed-2").split(" && ")
    assert train.endswith("dense --seed 2 --batch 600 --precision bf16")
    assert evaluate.endswith("dense --seed 2")
    assert "\n| dense " in (tmp_path / "results/tiny/report.md").read_text()
    # Before another seed is trained, with other text or settings than those that have results.
    kept, given["SEEDS"] = tmp_path / "results/tiny/dense.seed-2", "3"
    other = score | {"test_checksum": "other"}
    for file, named, change in (
        (study_results.FILE, "training text", {identity.TEXT: "other"}),
        (study_results.FILE, "dictionaries", {identity.TEXT: None, "dictionary": "other"}),
        (study_results.FILE, "--lr 9", {"dictionary": None, "flags": {"--lr": "9"}}),
        (study_results.FILE, "", {"flags": {}}),
        ("scores.json", "test sets (en-fr)", {"scores": {"en-fr": other}}),
    ):
        change_json(kept / file, **change)
        if named:
            said = refusal(step_here(*study, cwd=tmp_path, **given))
            assert named in said and str(kept.relative_to(tmp_path)) in said
    assert not list(runs.glob("*.seed-3"))
