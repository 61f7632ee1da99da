"""The commands of docs/gpu.md, each as it stands there; test_other_ranks.py runs some in two ranks."""

import re
from pathlib import Path

import pytest
from commands import smoe, succeeded
from test_recipes import ROOT, recipe, write_dataset

PAGE = (ROOT / "docs/gpu.md").read_text()
LINES = [
    line.partition(" #")[0].strip()
    for block in re.findall(r"^```bash\n(.*?)^```", PAGE, re.M | re.S)
    for line in block.splitlines()
]


@pytest.mark.parametrize("line", dict.fromkeys(LINES))
def test_command(tmp_path, line):
    program, *words = re.sub(r"^MASTER_ADDR=node1 ", "", line).split()
    if program == "smoe":
        assert re.search(r"^translation +[\d,]+$", smoe(*words).stdout, re.M)
        return
    training = {"arch": "smoe_transformer_base", "lr": 0.0008, "warmup-updates": 4000}
    training |= {"max-update": 50000, "max-tokens": 4096}
    given = {"pairs": ["en-de"], "experts": 8, "raw": {}, "train": training}
    given = write_dataset(tmp_path / "configs", "mine", **given)
    given |= {"DRY_RUN": "1", "FORECAST": "0"}
    if program not in line[: len(program)]:
        given["MASTER_ADDR"] = "node1"
    done = succeeded(recipe(tmp_path, Path(program).stem, *words, **given))
    assert "fairseq-train" in done.stdout and "--save-dir runs/mine/smoe-4-4" in done.stdout
    if "--gpus 8" in line and not re.search("--(nodes|batch|max-tokens) ", line):
        assert "--nproc-per-node 8" in done.stdout and "--max-tokens 512" in done.stdout
