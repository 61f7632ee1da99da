"""Every method trains on the built-in corpus, by its one word on the command line.

A pyramid wants more than the one MoE layer per side that others have there.
"""

import re

import pytest
from sampling import some
from test_recipes import recipe

METHODS = some(
    [
        *("dense", "moe", "switch", "moe-eom", "moe-cmr", "stacked-4-4", "smoe-2-2-2-2"),
        *"""moe-hash moe-base moe-expert-choice moe-top-p moe-relu moe-threshold depths moe-null
            moe-plus-plus moe-residual""".split(),
        *("moe-shared", "moe-bias", "moe-update", "pyramid-4-8 --moe-freq 1", "moe-chain"),
        *("moe-32", "stacked-2-2-2-2", "smoe-4-4", "smoe-1-3-4", "deep-4-4"),
        *("moe-top-4", "smoe-budget-4-4", "smoe-released-4-4", "moe-16"),
        *("moe-top-3", "moe-released", "moe-16-released", "moe-16-top-3", "smoe-released-2-4-2"),
        *("moe-zero", "smoe-zero-4-4", "moe-hash-topk-8", "moe-fine-9", "smoe-scores-4-4"),
    ],
    "smoe-2-2-2-2",
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
    process = recipe(phrasebook, "train", "phrasebook", *method.split(), *SMALL, **given)
    output = process.stdout + process.stderr
    assert process.returncode == 0, output[-2000:]
    losses = [float(loss) for loss in re.findall(r"train_inner .*?, nll_loss=([\d.]+)", output)]
    assert len(losses) == 4 and losses[-1] < losses[0] - 1
    assert ("requested_capacity=" in output) == (method != "dense")
    assert ("cmr_gate_loss=" in output) == (method == "moe-cmr")
