"""The exit bias at its ends and in a model; test_block.py compares it with plain loops."""

import math
from contextlib import contextmanager

import pytest
import torch
from plain_loops import make_block, make_input, watched
from test_model import make_batch, tiny

from smoe_fairseq.modules.gates.linear import ExitBias


@contextmanager
def exit_bias(model, bias):
    """Within it all gates of a model have this one."""
    before = [(each, each.bias) for each in model.modules() if isinstance(each, ExitBias)]
    for each, _ in before:
        each.bias = bias
    yield
    for each, value in before:
        each.bias = value


def biased(bias, **options):
    return make_block("2-2-2", exit_bias=bias, capacity_factor=0.0, **options).eval()


def routings(block, x, mask):
    """Of each gate, its inputs and probabilities for the tokens that stop there."""
    with watched(block.gates) as seen:
        y, stats = block(x, mask)
    return y, stats, [(x_TD[r.active_T], r.probs_TE[r.active_T]) for (x_TD, *_), r in seen]


@pytest.mark.parametrize("gate", ["topk", "top-p"])
@pytest.mark.parametrize("large", [1e5, 1e30, math.inf])
def test_ends(large, gate, execution):
    """Far below 0 tokens stop everywhere, far above they choose their own stratum in the last alone."""
    x, mask = make_input("some")
    plain, lowest, highest = (
        biased(bias, gate=gate, execution=execution) for bias in (0.0, -large, large)
    )
    y, stats, seen = routings(lowest, x, mask)
    assert stats.requested_capacity[~mask].tolist() == [3] * int((~mask).sum())
    assert all(float(probs[:, 2:].sum().detach()) == 0 for _, probs in seen)
    assert y.isfinite().all()
    y, stats, seen = routings(highest, x, mask)
    assert stats.requested_capacity.max() <= 2 and y.isfinite().all()
    logits = seen[0][0] @ plain.gates[0].weight.t()
    # As if the gate saw the later ones alone, to the last digits of their logits.
    assert torch.allclose(seen[0][1][:, 2:], logits[:, 2:].softmax(1), atol=1e-9)
    for value in (stats.balance_loss, stats.z_loss, *([stats.entropy] if gate == "top-p" else [])):
        assert value.isfinite()


def test_of_a_model_in_evaluation():
    """By its flag, in both layers."""
    plain = tiny("--smoe-strata", "4-4").bfloat16().eval()
    other = tiny("--smoe-strata", "4-4", "--smoe-exit-bias", "30").bfloat16().eval()
    other.load_state_dict(plain.state_dict())
    capacities = [
        [float(s.requested_capacity.max()) for s in m(*make_batch())[1]["moe_stats"]]
        for m in (plain, other)
    ]
    assert capacities == [[2, 2], [1, 1]]
