"""The paper's other systems and options, each against plain loops; see test_block.py for the rest."""

import torch
from plain_loops import T, make_block, make_input
from reference import ffn, layer_norm, reference


def draws_as_made(monkeypatch, *values):
    """`torch.rand_like` and `torch.rand` return these, so that the loops can know them."""
    queue = list(values)

    def next_draw(*args, **kwargs):
        return queue.pop(0)

    monkeypatch.setattr(torch, "rand_like", next_draw)
    monkeypatch.setattr(torch, "rand", next_draw)
    return queue


def test_a_dropped_cmr_gate_leaves_the_shared_network(monkeypatch):
    x, mask = make_input("some")
    block = make_block("8", cmr=True, cmr_gate_drop=0.4, capacity_factor=0)
    draws = torch.rand(T, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    drops = (draws < 0.4) & ~mask.unsqueeze(1)
    whole, stats = block.eval()(x, mask)
    shared = x + block.cmr.network(block.layer_norms[0](x))
    draws_as_made(monkeypatch, draws[~mask])
    y, dropped_stats = block.train()(x, mask)
    assert drops.any() and torch.allclose(y, shared.where(drops, whole), atol=1e-9)
    assert torch.allclose(dropped_stats.cmr_gate_sum, stats.cmr_gate_sum)
    assert int(stats.cmr_tokens) == int((~mask).sum())


def test_expert_output_masking_in_evaluation_scales_every_expert():
    """Scaling the outputs of all experts by 1 - p is scaling their second layers."""
    x, mask = make_input("some")
    masked = make_block("2-2-2-2", eom=0.1).eval()
    scaled = dict(masked.named_parameters())
    scaled = {n: p * 0.9 if n in ("experts.w2", "experts.b2") else p for n, p in scaled.items()}
    want, _, want_rc, *_ = reference(scaled, "2-2-2-2", x, mask)
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
