"""What README.md and the Makefile say at their beginning, as a user types it."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from commands import succeeded
from test_recipes import TRAIN, recipe, refusal, write_dataset

ROOT = Path(__file__).parents[1]


def yaml_of(page: str, dataset: str = "mine") -> str:
    """The file of a data set that a page shows."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.search(rf"```yaml\n(# configs/datasets/{dataset}.yaml.*?)```", text, re.DOTALL)[1]


def test_text_of_ones_own(tmp_path):
    """Four lines of YAML and two files of text; the settings for a laptop train, too."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    configs = shutil.copytree(ROOT / "configs", tmp_path / "configs")
    for name, page in {"mine": "README.md", "laptop": "docs/start.md"}.items():
        (configs / f"datasets/{name}.yaml").write_text(yaml_of(page))
    (tmp_path / "folder").mkdir()
    numbers = [" ".join(str(number)) for number in range(1000, 1400)]
    (tmp_path / "folder/en.txt").write_text("".join(f"the number {n}\n" for n in numbers))
    (tmp_path / "folder/de.txt").write_text("".join(f"die Zahl {n}\n" for n in numbers))
    given = {"CONFIG_DIR": str(configs), "GPUS": "0", "JOBS": "1"}
    words = ("prepare", "mine", "--vocab-size", "320", "--raw", "folder")
    succeeded(recipe(tmp_path, *words, **given))
    assert len((tmp_path / "data/mine/raw/test.en-de.en").read_text().splitlines()) == 200
    assert len((tmp_path / "data/mine/raw/valid.en-de.de").read_text().splitlines()) == 100
    for name, step in (("mine", "train"), ("mine", "evaluate"), ("laptop", "train")):
        assert f"scripts/{step}.sh mine smoe-4-4" in readme
        succeeded(recipe(tmp_path, step, name, "smoe-4-4", DRY_RUN="1", **given))


@pytest.mark.parametrize("missing", TRAIN)
def test_what_training_cannot_do_without(tmp_path, missing):
    """fairseq would take a rate of 0.25, train for ever, or end in a stack trace."""
    there = {name: value for name, value in TRAIN.items() if name != missing}
    given = write_dataset(tmp_path / "configs", "mine", pairs=["a-b"], train=there)
    ask = ("train", "mine", "smoe-2-2")
    sentence = refusal(recipe(tmp_path, *ask, DRY_RUN="1", GPUS="0", **given))
    assert f"--{missing} is missing" in sentence and "configs/datasets/mine.yaml" in sentence
    behind = (f"--{missing}", str(TRAIN[missing]))
    assert recipe(tmp_path, *ask, *behind, DRY_RUN="1", GPUS="0", **given).returncode == 0


def test_methods_that_need_the_number_of_experts(tmp_path):
    given = write_dataset(tmp_path / "configs", "mine", pairs=["a-b"], train=TRAIN)
    result = recipe(tmp_path, "train", "mine", "moe", DRY_RUN="1", GPUS="0", **given)
    assert "datasets/mine.yaml: `experts` is missing, and moe needs it" in refusal(result)


def test_what_a_script_lacks_is_said_of_the_script(tmp_path):
    result = recipe(tmp_path, "train", "multi30k")
    (line,) = result.stderr.splitlines()
    assert result.returncode == 2 and line.startswith("scripts/train.sh: error: ")
    assert "METHOD" in line and "scripts/train.sh --help" in line


def test_a_run_that_was_refused_does_not_hide_the_others(tmp_path):
    for method in ("moe", "smoe-8-1"):  # its second gate has one expert to choose two from
        (tmp_path / "runs/multi30k" / method).mkdir(parents=True)
    result = recipe(tmp_path, "table", "multi30k")
    assert (
        result.returncode == 0
        and "runs/multi30k/smoe-8-1 has no cost: --moe-top-k 2" in result.stderr
    )
    assert re.search(r"^\| moe +\| +\d", result.stdout, re.M)


def test_an_environment_without_the_torch_to_keep(tmp_path):
    """Where one was made before, ``KEEP_TORCH`` would change nothing, and say nothing."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/pyvenv.cfg").write_text("include-system-site-packages = false\n")
    environment = {n: v for n, v in os.environ.items() if not n.startswith("MAKE")}
    command = ["make", "setup", "KEEP_TORCH=1"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 2
    assert "KEEP_TORCH=1: .venv has its own torch; remove .venv" in result.stderr
    assert not result.stdout
    command[-1] = "KEEP_TORCH=0"
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "KEEP_TORCH" not in result.stderr and "setup.py" in result.stderr  # which is not there
