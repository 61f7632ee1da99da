"""Budget and exit bias on the built-in corpus, as a user trains and translates."""

import re
from pathlib import Path

import pytest
from test_recipes import recipe

pytestmark = pytest.mark.soak
SMALL = [
    *("--encoder-embed-dim", "64", "--encoder-ffn-embed-dim", "64", "--max-tokens", "1000"),
    *("--max-update", "120", "--warmup-updates", "20"),
]


def trained(folder: Path, method: str, *flags) -> Path:
    """A checkpoint of the recipe; its log is beside it."""
    given = {"OMP_NUM_THREADS": "1", "GPUS": "0"}
    process = recipe(folder, "train", "phrasebook", method, *flags, **given)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]
    return folder / "runs/phrasebook" / method / "checkpoint_last.pt"


@pytest.fixture(scope="module")
def budgeted(phrasebook) -> Path:
    """A small model, shortly trained with a budget of 1.5 of four strata."""
    return trained(phrasebook, "smoe-2-2-2-2", *SMALL, "--smoe-capacity-budget", "1.5")


def requested_in_validation(checkpoint: Path) -> float:
    log = checkpoint.with_name("train.log").read_text()
    return float(re.findall(r"valid on.*? requested_capacity ([\d.]+)", log)[-1])


def test_budget_is_met_within_five_percent(budgeted):
    """Uniform routing would ask for 2.08 strata."""
    assert requested_in_validation(budgeted) == pytest.approx(1.5, rel=0.05)
    assert "smoe_budget_loss=" in budgeted.with_name("train.log").read_text()
