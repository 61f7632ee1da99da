"""The paper's other systems and options, each against plain loops; see test_block.py for the rest."""

import pytest
import torch
from plain_loops import T, gradients, make_block, make_input
from reference import ffn, layer_norm, reference


def draws_as_made(monkeypatch, *values):
    """`torch.rand_like` and `torch.rand` return these, so that the loops can know them."""
    queue = list(values)

    def next_draw(*args, **kwargs):
        return queue.pop(0)

    monkeypatch.setattr(torch, "rand_like", next_draw)
    monkeypatch.setattr(torch, "rand", next_draw)
    return queue


def cmr_reference(params, x, padding, drops, capacity_factor):
    """(1 - g) FFN(h) + g MoE(h), token by token; ``drops[t]`` puts a token's gate to 0."""
    moe, loss, *_ = reference(params, "8", x, padding, capacity_factor=capacity_factor)
    rows, gate_sum = [], 0
    for t, row in enumerate(x):
        if padding[t]:
            rows.append(row)
            continue
        h = layer_norm(params, 0, row)
        gate = 1 / (1 + torch.exp(-(params["cmr.gate.weight"][0] @ h)))
        gate_sum = gate_sum + gate
        hidden = torch.relu(params["cmr.fc1.weight"] @ h + params["cmr.fc1.bias"])
        shared = params["cmr.fc2.weight"] @ hidden + params["cmr.fc2.bias"]
        g = 0 if drops[t] else gate
        rows.append(row + (1 - g) * shared + g * (moe[t] - row))
    return torch.stack(rows), loss, gate_sum


@pytest.mark.parametrize("gate_drop", [0.0, 0.4])
def test_cmr_agrees_with_plain_loops(gate_drop, monkeypatch):
    x, mask = make_input("some")
    block = make_block("8", cmr=True, cmr_gate_drop=gate_drop, capacity_factor=1.0)
    draws = torch.rand(T, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    drops = (draws < gate_drop).squeeze(1)
    if gate_drop:
        assert drops[~mask].any() and not drops[~mask].all()
        draws_as_made(monkeypatch, draws[~mask])
    y, stats = block(x, mask)
    monkeypatch.undo()
    params = dict(block.named_parameters())
    want_y, want_loss, want_gates = cmr_reference(params, x, mask, drops, 1.0)
    # the gate is a float32 sigmoid
    assert torch.allclose(y, want_y, atol=1e-6)
    assert torch.allclose(stats.cmr_gate_sum.double(), want_gates, rtol=1e-6)
    assert int(stats.cmr_tokens) == int((~mask).sum())
    want = gradients(want_y, want_loss + 0.1 * want_gates, x, params)
    for name, got in gradients(y, stats.balance_loss + 0.1 * stats.cmr_gate_sum, x, params).items():
        assert torch.allclose(got, want[name].expand_as(got), atol=1e-5), name


@pytest.mark.parametrize("strata", ["8", "2-2-2-2"])
def test_expert_output_masking_in_evaluation_scales_every_expert(strata):
    """Scaling the outputs of all experts by 1 - p is scaling their second layers."""
    x, mask = make_input("some")
    masked = make_block(strata, eom=0.1).eval()
    scaled = dict(masked.named_parameters())
    scaled = {n: p * 0.9 if n in ("experts.w2", "experts.b2") else p for n, p in scaled.items()}
    want, _, want_rc, *_ = reference(scaled, strata, x, mask)
    y, stats = masked(x, mask)
    assert torch.equal(stats.requested_capacity, want_rc)
    assert torch.allclose(y, want, atol=1e-9)


def test_expert_output_masking_in_training_skips_the_masked_copies(monkeypatch):
    """One stratum; a copy is masked after the weights were normalised, so the other keeps its own."""
    x, mask = make_input()
    block = make_block("8", eom=0.3, capacity_factor=0)
    draws = torch.rand(T, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    dropped = draws < 0.3
    assert dropped.any(1).sum() > dropped.all(1).sum() > 0
    draws_as_made(monkeypatch, draws)
    y, _ = block(x, mask)
    params = dict(block.named_parameters())
    for t in range(T):
        h = layer_norm(params, 0, x[t])
        scores = torch.softmax(params["gates.0.weight"] @ h, 0)
        top = sorted(range(8), key=lambda e, s=scores: -s[e])[:2]
        want = x[t]
        for k, expert in enumerate(top):
            if not dropped[t, k]:
                want = want + scores[expert] / scores[top].sum() * ffn(params, expert, h)
        assert torch.allclose(y[t], want, atol=1e-9)


def test_final_output_masking(monkeypatch):
    x, mask = make_input()
    block = make_block("4-4", fom=0.25, capacity_factor=0)
    params = dict(block.named_parameters())
    plain = make_block("4-4", capacity_factor=0)
    plain.load_state_dict(block.state_dict())
    halves = {n: p * 0.75 if n in ("experts.w2", "experts.b2") else p for n, p in params.items()}
    want, *_ = reference(halves, "4-4", x, mask)
    assert torch.allclose(block.eval()(x, mask)[0], want, atol=1e-9)

    everything, nothing = torch.zeros(1, 1).double(), torch.ones(1, 1).double()
    block.train()
    draws_as_made(monkeypatch, everything, everything)
    assert torch.equal(block(x, mask)[0], x)
    draws_as_made(monkeypatch, nothing, nothing)
    assert torch.allclose(block(x, mask)[0], plain(x, mask)[0])


def test_gating_dropout_skips_the_block_for_a_whole_batch(execution, monkeypatch):
    x, mask = make_input("some")
    block = make_block("2-2-2-2", gating_dropout=0.3)
    block.execution = execution
    draws_as_made(monkeypatch, torch.tensor(0.2), torch.tensor(0.4))
    y, stats = block(x, mask)
    assert torch.equal(y, x) and int(stats.requested_capacity.sum()) == 0
    assert float(stats.balance_loss) == 0
    y, stats = block(x, mask)
    assert not torch.equal(y, x)
    assert torch.equal(stats.requested_capacity > 0, ~mask)
    assert torch.equal(block.eval()(x, mask)[0], block(x, mask)[0])  # never in evaluation


def test_z_loss_agrees_with_plain_loops(execution):
    x, mask = make_input("some")
    block = make_block("8")
    block.execution = execution
    params = dict(block.named_parameters())
    total = 0
    for row in x[~mask]:
        logits = params["gates.0.weight"] @ layer_norm(params, 0, row)
        total = total + torch.log(torch.exp(logits).sum()) ** 2
    want = total / int((~mask).sum())
    _, stats = block(x, mask)
    assert torch.allclose(stats.z_loss, want)
    (got,) = torch.autograd.grad(stats.z_loss, block.gates[0].weight)
    (expected,) = torch.autograd.grad(want, block.gates[0].weight)
    assert torch.allclose(got, expected, atol=1e-10)
