"""Every method trains on the built-in corpus, by its one word on the command line.

A pyramid wants more than the one MoE layer per side that others have there.
"""

import re

import pytest
from commands import succeeded
from sampling import some
from test_recipes import recipe

# One of each kind; test_golden.py has the flags of all, and test_family_training.py trains with them.
METHODS = some(
    [
        *("dense", "switch", "moe-eom", "stacked-4-4", "smoe-2-2-2-2", "depths", "moe-cmr"),
        *"""moe-hash moe-base moe-expert-choice moe-top-p moe-relu moe-threshold moe-plus-plus
            moe-residual moe-shared moe-bias moe-update moe-chain""".split(),
        *("pyramid-4-8 --moe-freq 1", "deep-4-4", "smoe-zero-4-4", "smoe-scores-4-4"),
    ],
)
SMALL = [
    *("--encoder-embed-dim", "64", "--encoder-ffn-embed-dim", "64", "--max-tokens", "500"),
    *("--max-update", "24", "--log-interval", "6", "--warmup-updates", "6"),
    *("--no-save", "--disable-validation", "--max-epoch", "1"),
]


@pytest.mark.parametrize("method", METHODS)
def test_trains_and_its_loss_falls(phrasebook, method):
    # Without GPUS, torch is imported to count them; with LOGLEVEL, all of the log is shown.
    given = {"OMP_NUM_THREADS": "1", "GPUS": "0", "LOGLEVEL": "INFO"}
    words = ("train", "phrasebook", *method.split(), *SMALL)
    process = succeeded(recipe(phrasebook, *words, **given))
    output = process.stdout + process.stderr
    losses = [float(loss) for loss in re.findall(r"train_inner .*?, nll_loss=([\d.]+)", output)]
    assert len(losses) == 4 and losses[-1] < losses[0] - 1
    assert ("requested_capacity=" in output) == (method != "dense")
    assert ("cmr_gate_loss=" in output) == (method == "moe-cmr")


@pytest.mark.soak
def test_a_budget_is_met_within_five_percent(phrasebook, tmp_path):
    """Of four strata; uniform routing would ask for 2.08."""
    flags = "--encoder-embed-dim 64 --encoder-ffn-embed-dim 64 --max-tokens 1000 --max-update 120"
    words = [*flags.split(), "--warmup-updates", "20", "--smoe-capacity-budget", "1.5"]
    given = {"OMP_NUM_THREADS": "1", "GPUS": "0", "RUN_DIR": str(tmp_path)}
    succeeded(recipe(phrasebook, "train", "phrasebook", "smoe-2-2-2-2", *words, **given))
    log = (tmp_path / "phrasebook/smoe-2-2-2-2/train.log").read_text()
    found = re.findall(r"valid on.*? requested_capacity ([\d.]+)", log)
    assert float(found[-1]) == pytest.approx(1.5, rel=0.05) and "smoe_budget_loss=" in log
