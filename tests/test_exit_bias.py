"""The exit bias: what it adds, when, and that 0 adds nothing."""

import math
from contextlib import contextmanager

import pytest
import torch
from plain_loops import PADDING, make_block, make_input
from reference_gates import softmax
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


def biased(bias, strata="2-2-2-2", execution="per-expert", **options):
    block = make_block(strata, exit_bias=bias, capacity_factor=0.0, **options).eval()
    block.execution = execution
    return block


def routings(block, x, mask):
    """Of each gate, what it got and decided, for the tokens that stop there."""
    seen = []

    def hook(gate, inputs, routing):
        seen.append([inputs[0][routing.active_T], routing.probs_TE[routing.active_T]])

    handles = [gate.register_forward_hook(hook) for gate in block.gates]
    y, stats = block(x, mask)
    for handle in handles:
        handle.remove()
    return y, stats, seen


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("bias", [-2.0, 0.7, 3.0])
@pytest.mark.parametrize("strata, gate", [("4-4", "topk"), ("2-3-4", "topk"), ("2-2-2", "top-p")])
def test_logits_of_later_strata_are_raised(strata, gate, bias, execution, padding):
    x, mask = make_input(padding)
    block = biased(bias, strata, execution, gate=gate)
    _, stats, seen = routings(block, x, mask)
    for i, (inputs, probs) in enumerate(seen):
        own = block.strata.sizes[i]
        for h, found in zip(inputs, probs, strict=True):
            logits = [row @ h for row in block.gates[i].weight]
            want = softmax([z + (bias if e >= own else 0) for e, z in enumerate(logits)])
            assert torch.allclose(found, torch.stack(want), atol=1e-12)
    assert stats.balance_loss.isfinite()


def test_null_experts_are_in_no_stratum():
    x, mask = make_input()
    for bias in (1.0, -1.0):
        block = biased(bias, "2-2", top_k=3, null_experts=2)
        _, _, seen = routings(block, x, mask)
        rows = torch.cat([block.gates[0].weight, block.gates[0].null_weight])
        moved = torch.tensor([0, 0, bias, bias, 0, 0], dtype=torch.float64)
        assert torch.allclose(seen[0][1], (seen[0][0] @ rows.t() + moved).softmax(1), atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"gate": "top-p"}, {"null_experts": 2, "top_k": 3}])
def test_zero_is_exact_and_training_knows_no_bias(options, execution):
    x, mask = make_input("some")
    plain = biased(0.0, "3-3-3", execution, **options)
    with_bias = biased(2.0, "3-3-3", execution, **options)
    assert with_bias.state_dict().keys() == plain.state_dict().keys()
    want, stats = plain(x, mask)
    assert not torch.equal(with_bias(x, mask)[0], want)
    with exit_bias(with_bias, 0.0):
        got, got_stats = with_bias(x, mask)
    assert torch.equal(got, want) and torch.equal(
        got_stats.requested_capacity, stats.requested_capacity
    )
    assert not torch.equal(with_bias(x, mask)[0], want)  # as it was
    for block in (plain, with_bias):
        block.train()
    torch.manual_seed(1)
    want = plain(x, mask)[0]
    torch.manual_seed(1)
    assert torch.equal(with_bias(x, mask)[0], want)


@pytest.mark.parametrize("gate", ["topk", "top-p"])
@pytest.mark.parametrize("large", [1e5, 1e30, math.inf])
def test_ends(large, gate, execution):
    """Far below 0 tokens stop everywhere, far above they choose their own stratum in the last alone."""
    x, mask = make_input("some")
    lowest, highest = (biased(b, "2-2-2", execution, gate=gate) for b in (-large, large))
    plain = biased(0.0, "2-2-2", execution, gate=gate)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_a_model_in_evaluation(dtype):
    """By its flag, in both layers."""
    plain = tiny("--smoe-strata", "4-4").to(dtype).eval()
    other = tiny("--smoe-strata", "4-4", "--smoe-exit-bias", "30").to(dtype).eval()
    other.load_state_dict(plain.state_dict())
    capacities = [
        [float(s.requested_capacity.max()) for s in m(*make_batch())[1]["moe_stats"]]
        for m in (plain, other)
    ]
    assert capacities == [[2, 2], [1, 1]]
