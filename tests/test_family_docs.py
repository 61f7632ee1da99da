"""docs/family.md: what its table and its picture show is what there is."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from sampling import soak
from test_model import tiny

from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes.config import load_dataset, method_flags

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


def test_the_picture_shows_what_its_titles_say():
    """A run of its file chooses anew, by the gates as they are."""
    picture = runpy.run_path(str(DOCS / "images/family.py"))
    found = {
        name: picture["experts_of_tokens"](stops) for name, stops in picture["choices"]().items()
    }
    for name, experts in {
        "mixture, top-2": 2,
        "Switch, top-1": 1,
        "hash": 1,
        "chain of 2": 4,
    }.items():
        assert found[name] == [experts] * 8
    assert len(set(found["top-p 0.4"])) > 1 and len(set(found["expert choice"])) > 1
    assert min(found["null experts, top-4"]) < max(found["null experts, top-4"]) < 4
    assert sum(found["expert choice"]) == 6 * 3  # ceil(8 x 2 / 6) of each expert
    assert set(found["SMoE 3-3"]) == {2, 4} and set(found["stacked 3-3"]) == {4}
    assert sum(found["SMoE 3-3, exit bias 1"]) < sum(found["SMoE 3-3"])
    balanced = picture["choices"]()["BASE, in training"][0].weights.values()
    loads = [sum(expert in weights for weights in balanced) for expert in range(6)]
    assert sorted(loads) == [1, 1, 1, 1, 2, 2]
