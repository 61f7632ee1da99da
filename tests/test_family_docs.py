"""docs/family.md: what its table and its picture show is what there is."""

import re
from pathlib import Path

import pytest
import torch
from sampling import soak
from test_model import tiny

from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes.datasets import load_dataset
from smoe_fairseq.recipes.methods import method_flags

DOCS = Path(__file__).parents[1] / "docs"
ROWS = [
    [cell.strip(" `") for cell in line.strip("|").split("|")]
    for line in (DOCS / "family.md").read_text("utf-8").splitlines()
    if re.match(r"\|[^|]*\| `--", line)
]
EACH_ROW = pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])


def is_taken(*flags) -> bool:
    try:
        with torch.device("meta"):
            tiny(*flags)
    except UsageError:
        return False
    return True


@pytest.mark.parametrize(
    "row", [row if row[0] in ("balance by a bias", "residual") else soak(row) for row in ROWS]
)
def test_what_goes_with_strata_and_with_cmr(row):
    name, flags, _, strata, _ = row
    words = flags.split()
    if "--smoe-strata" in words:  # of its own
        layers = ["--encoder-layers", "6", "--decoder-layers", "6"]
        assert is_taken(*words, *layers)
        return
    if name.startswith("shared"):
        strata, narrow = "no", ["--moe-expert-ffn-dim", "64"]
        assert is_taken(*narrow, "--smoe-strata", "8-8")
    said = strata.partition(";")[0]
    assert said in ("yes", "no", "required")
    assert is_taken(*words, "--smoe-strata", "8-8") == (said != "no")
    assert is_taken(*words, "--smoe-strata", "16") == (said != "required")
    if said != "required":
        assert is_taken(*words, "--smoe-strata", "16", "--moe-cmr") == (name != "residual")


@EACH_ROW
def test_a_method_has_what_its_row_says(row):
    """An exit bias is of evaluation; it is set beside a method."""
    name, flags, method, *_ = row
    if "exit" in name:
        assert " " in method
        return
    of_method = method_flags(method, load_dataset("phrasebook"))
    assert any(f"--{flag}" in flags.split() for flag in of_method)
