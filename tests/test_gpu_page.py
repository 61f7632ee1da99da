"""The commands of docs/gpu.md, each as it stands there; test_other_ranks.py runs some in two ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_recipes import ROOT, write_dataset

PAGE = (ROOT / "docs/gpu.md").read_text()
LINES = [
    line.partition(" #")[0].strip()
    for block in re.findall(r"^```bash\n(.*?)^```", PAGE, re.M | re.S)
    for line in block.splitlines()
]


@pytest.mark.parametrize("line", LINES)
def test_command(tmp_path, line):
    given = write_dataset(
        *(tmp_path / "configs", "mine"),
        pairs=["en-de"],
        experts=8,
        raw={},
        train={
            **{"arch": "smoe_transformer_base", "lr": 0.0008, "warmup-updates": 4000},
            **{"max-update": 50000, "max-tokens": 4096},
        },
    )
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    given |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    given |= {"DRY_RUN": "1", "FORECAST": "0"}
    done = subprocess.run(
        ["bash", "-c", line],
        **{"cwd": tmp_path, "env": os.environ | given, "capture_output": True, "text": True},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    if line.startswith("smoe"):
        assert re.search(r"^translation +[\d,]+$", done.stdout, re.M)
        return
    assert "fairseq-train" in done.stdout and "--save-dir runs/mine/smoe-4-4" in done.stdout
    if "--gpus 8" in line and not re.search("--(nodes|batch|max-tokens) ", line):
        assert "--nproc-per-node 8" in done.stdout and "--max-tokens 512" in done.stdout
