"""What README.md and the Makefile say at their beginning, as a user types it."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from commands import run
from test_recipes import recipe

ROOT = Path(__file__).parents[1]
SMALL = "--arch smoe_transformer_tiny --max-update 2 --num-workers 0 --max-tokens 500".split()


def test_text_of_ones_own(tmp_path):
    """Four lines of YAML and two files of text, with a smaller vocabulary and model than the README's."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    content = re.search(r"```yaml\n(# configs/datasets/mine.yaml.*?)```", readme, re.DOTALL)[1]
    configs = shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (configs / "datasets/mine.yaml").write_text(content)
    (tmp_path / "folder").mkdir()
    numbers = [" ".join(str(number)) for number in range(1000, 1400)]
    (tmp_path / "folder/en.txt").write_text("".join(f"the number {n}\n" for n in numbers))
    (tmp_path / "folder/de.txt").write_text("".join(f"die Zahl {n}\n" for n in numbers))
    given = {"CONFIG_DIR": str(configs), "GPUS": "0", "OMP_NUM_THREADS": "1", "JOBS": "1"}
    last = ["--max-len-b", "5", "--beam", "1"]
    for words, more in (
        (["prepare", "mine"], ["--vocab-size", "40"]),
        (["train", "mine", "smoe-4-4"], SMALL),
        (["evaluate", "mine", "smoe-4-4"], last),
    ):
        assert f"scripts/{words[0]}.sh {' '.join(words[1:3])}" in readme
        result = recipe(tmp_path, *words, *more, RAW=str(tmp_path / "folder"), **given)
        assert result.returncode == 0, result.stdout + result.stderr
    assert len((tmp_path / "data/mine/raw/test.en-de.en").read_text().splitlines()) == 200
    assert len((tmp_path / "data/mine/raw/valid.en-de.de").read_text().splitlines()) == 100
    assert "de-en: BLEU" in result.stdout and "en-de: BLEU" in result.stdout
    command = ("smoe", "translate", "runs/mine/smoe-4-4", "--from", "de", "--to", "en")
    assert " ".join(command) in readme
    more = ("--max-len-b", "5", "--device", "cpu")
    run(*command, *more, cwd=tmp_path, stdin="die Zahl 1 2 3 4\n")


def test_an_environment_without_the_torch_to_keep(tmp_path):
    """Where one was made before, ``KEEP_TORCH`` would change nothing, and say nothing."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/pyvenv.cfg").write_text("include-system-site-packages = false\n")
    environment = {n: v for n, v in os.environ.items() if not n.startswith("MAKE")}
    command = ["make", "setup", "KEEP_TORCH=1"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 2
    assert "KEEP_TORCH=1: .venv is there with a torch of its own; remove .venv" in result.stderr
    assert not result.stdout
