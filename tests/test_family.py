"""The gates: what they draw, learn and count; their choices are those of plain loops (test_block.py)."""

import math

import pytest
import reference_gates
import torch
from plain_loops import PADDING, SENTENCES, D, F, T, assert_agrees, make_block, make_input

from smoe_fairseq.modules import StratifiedMoE
from smoe_fairseq.modules.gates.base import balanced_assignment

# What is drawn.


def test_random_order_keeps_each_token_as_often():
    """All want expert 0, which takes four of sixteen; over many passes each is kept in a quarter of them."""
    torch.manual_seed(0)
    gate = StratifiedMoE(D, F, "8", top_k=1, capacity_factor=2.0, drop_order="random").gates[0]
    torch.nn.init.zeros_(gate.weight)
    kept_T = sum((gate(torch.randn(16, D)).expert_TK[:, 0] == 0).long() for _ in range(400))
    assert int(kept_T.sum()) == 4 * 400
    assert (kept_T - 100).abs().max() < 44  # five standard deviations


def test_random_order_draws_nothing_in_evaluation():
    """The same input gives the same output: the tokens of highest score are kept."""
    block = make_block("4-4", drop_order="random", eval_capacity_factor=0.5).eval()
    x, mask = make_input("some")
    outputs = [block(x, mask)[0] for _ in range(2)]
    for gate in block.gates:
        gate.capacity.order = "score"
    for y in outputs:
        assert torch.equal(y, block(x, mask)[0])


def test_sampled_second_expert_follows_the_scores():
    """Those of all experts but the first."""
    torch.manual_seed(0)
    options = {"second_expert_policy": "sampling", "capacity_factor": 0}
    gate = StratifiedMoE(D, F, "4", **options).double().gates[0]
    x = torch.randn(1, D, dtype=torch.float64)
    probs = gate.logits(x)[0].softmax(0).detach()
    first, second = gate(x.expand(20_000, D)).expert_TK.unbind(1)
    assert (first == probs.argmax()).all()
    probs[probs.argmax()] = 0
    got = torch.bincount(second, minlength=4) / 20_000
    assert torch.allclose(got.double(), probs / probs.sum(), atol=0.015)


def test_random_second_expert_is_taken_by_its_weight():
    torch.manual_seed(0)
    options = {"second_expert_policy": "random", "gate_normalization": "none"}
    gate = StratifiedMoE(D, F, "4", capacity_factor=0, **options).double().gates[0]
    torch.nn.init.normal_(gate.weight, std=0.8)
    x = torch.randn(1, D, dtype=torch.float64)
    second = gate.logits(x)[0].softmax(0).sort(descending=True).values[1]
    assert 2 * second < 0.9  # otherwise nothing would be left to chance
    routing = gate(x.expand(20_000, D))
    taken = (routing.expert_TK[:, 1] < 4).double().mean()
    assert abs(taken - 2 * second) < 0.015
    assert int(routing.chosen_TK[:, 1].sum()) == int((routing.expert_TK[:, 1] < 4).sum())
    assert not routing.dropped_TK.any()


def test_further_experts_are_drawn_without_replacement():
    """One of six pairs beside the first expert: by the scores, as one is drawn after the other."""
    torch.manual_seed(0)
    gate = StratifiedMoE(D, F, "5", top_k=3, capacity_factor=0).double().gates[0]
    x = torch.randn(1, D, dtype=torch.float64)
    probs = gate.logits(x)[0].softmax(0).tolist()
    draws = 20_000
    first, second, third = gate(x.expand(draws, D)).expert_TK.unbind(1)
    top = max(range(5), key=lambda e: probs[e])
    assert (first == top).all() and (second != third).all()
    for a in range(5):
        for b in range(5):
            if top in (a, b) or a == b:
                continue
            want = probs[a] / (1 - probs[top]) * probs[b] / (1 - probs[top] - probs[a])
            got = ((second == a) & (third == b)).double().mean()
            assert abs(float(got) - want) < 0.015


# What is learnt and counted.


@pytest.mark.parametrize(
    "strata, options", [("4", {"chain": 3}), ("4-0-4", {}), ("4", {"gate_residual": "layers"})]
)
def test_a_batch_without_rows(strata, options, execution):
    block = make_block(strata, execution=execution, **options)
    x = torch.zeros(0, D, dtype=torch.float64, requires_grad=True)
    y, stats = block(x)
    (y.sum() + stats.balance_loss).backward()
    assert y.shape == x.shape and float(stats.balance_loss) == 0 and not stats.first_choices.any()


def normed(block, x):
    return torch.nn.functional.layer_norm(x, (D,), *block.layer_norms[0].parameters())


@pytest.mark.parametrize("free", [{}, {"null_experts": 2}, {"constant_experts": 1}])
def test_logits_for_the_next_layer(free):
    """Before its own were added; 0 at padding."""
    x, mask = make_input("some")
    block = make_block("8", gate_residual="layers", **free)
    _, stats = block(x, mask)
    gate = block.gates[0]
    rows = [getattr(gate, f"{kind}weight", None) for kind in ("", "simple_", "null_")]
    rows = torch.cat([each for each in rows if each is not None])
    assert torch.allclose(stats.gate_logits[~mask], normed(block, x[~mask]) @ rows.T)
    assert not stats.gate_logits[mask].any()
    assert make_block("4-4", gate_residual="strata")(x, mask)[1].gate_logits is None


def test_a_gate_residual_begins_at_0():
    """So that a new block routes as one without it, draw for draw."""
    torch.manual_seed(1)
    plain = StratifiedMoE(D, F, "4-4")
    torch.manual_seed(1)
    block = StratifiedMoE(D, F, "4-4", gate_residual="layers")
    x = torch.randn(T, D)
    assert torch.equal(block.eval()(x, gate_logits=torch.randn(T, 8))[0], plain.eval()(x)[0])
    assert not any(gate.residual_weight.any() for gate in block.gates)


@pytest.mark.parametrize("padding", PADDING)
def test_entropy_of_top_p(padding):
    x, mask = make_input(padding)
    block = make_block("8", gate="top-p")
    p = (normed(block, x[~mask]) @ block.gates[0].weight.T).softmax(1)
    want = -(p * p.log()).sum() / max(len(p), 1)
    assert torch.allclose(block(x, mask)[1].entropy, want)


@pytest.mark.parametrize("padding", PADDING)
def test_l1_loss_of_relu(padding):
    x, mask = make_input(padding)
    block = make_block("8", gate="relu", top_k=2)
    block.gates[0].coefficient.steps += 100
    _, stats = block(x, mask)
    if padding == "all":
        assert float(stats.own_loss.detach()) == 0
        return
    params = dict(block.named_parameters())
    want = reference_gates.relu_l1(params, 0, normed(block, x[~mask]), 2) * 1e-8 * 1.2**100
    weight = params["gates.0.weight"]
    losses = (stats.own_loss, want)
    grads = [torch.autograd.grad(loss, weight, retain_graph=True)[0] for loss in losses]
    assert torch.allclose(stats.own_loss, want, rtol=1e-4) and torch.allclose(*grads, rtol=1e-4)


def test_the_l1_coefficient_goes_towards_the_goal():
    """By 1.2, once per update, by the mean over all strata; the number of experts follows by gradient."""
    block = make_block("4-4", gate="relu", top_k=2)
    for copies, first, second in (([9, 8], 4, 4), ([9, 8], 5, 4), ([8, 8], 4, 4), ([1, 1], 4, 4)):
        block.end_update(torch.tensor([[copies[0], first], [copies[1], second]]))
        want = {9: 1, 1: -1, 8: 0}[copies[0]] if first == 4 else -1
        assert [int(gate.coefficient.steps) for gate in block.gates] == [want] * 2
        for gate in block.gates:
            assert float(gate.coefficient.value()) == pytest.approx(1e-8 * 1.2**want)
            gate.coefficient.steps.zero_()
    block.gates[0].coefficient.steps.fill_(1000)
    block.end_update(torch.tensor([[9, 1], [9, 1]]))
    assert block.gates[0].coefficient.value().isfinite()

    block = make_block("8", gate="relu", top_k=2, capacity_factor=0.0)
    block.gates[0].coefficient.steps += 80
    x = torch.randn(64, D, dtype=torch.float64)
    want, _ = block(x)
    descent, seen = torch.optim.Adam(block.gates.parameters(), lr=0.01), []
    for _ in range(200):
        y, stats = block(x)
        descent.zero_grad()
        ((y - want.detach()).square().mean() + stats.own_loss).backward()
        descent.step()
        block.end_update(stats.observed)
        seen.append(float(stats.chosen.sum()) / 64)
    assert seen[0] > 3 and sum(seen[-50:]) / 50 == pytest.approx(2, abs=0.3)


@pytest.mark.parametrize("padding", PADDING)
def test_thresholds_are_scores_of_a_rank(padding):
    """By active tokens; 0 before the first update, and after one without tokens."""
    x, mask = make_input(padding)
    block = make_block("8", gate="threshold", top_k=3)
    block.end_update(block(x, mask)[1].observed)
    found = block.gates[0].threshold.value()
    if padding == "all":
        assert not found.any()
        return
    scores = (normed(block, x[~mask]) @ block.gates[0].weight.T).T.tolist()
    want = [reference_gates.score_of_rank(of_expert, 8, 3) for of_expert in scores]
    assert found.tolist() == pytest.approx(want, abs=2**-16)
    stats = block(x, mask)[1]
    assert int(stats.chosen.sum()) == 8 * round(3 * int((~mask).sum()) / 8)


def test_thresholds_are_means_over_batches_and_updates():
    """By tokens over the batches of an update, by the step over updates; none without tokens."""
    block = make_block("4", gate="threshold", top_k=1, threshold_step=0.25)
    threshold = block.gates[0].threshold
    batches = [torch.randn(n, D, dtype=torch.float64) for n in (8, 24)]
    found = [block(x)[1].observed for x in batches]
    units = [observed[0, :4] / observed[0, 4] * 2**-16 for observed in found]
    block.end_update(sum(found))
    first = (8 * units[0] + 24 * units[1]) / 32
    assert torch.allclose(threshold.value().double(), first.double(), atol=1e-4)
    block.end_update(found[0])
    want = first + 0.25 * (units[0] - first)
    assert torch.allclose(threshold.value().double(), want.double(), atol=1e-4)
    block.end_update(torch.zeros_like(found[0]))
    assert torch.allclose(threshold.value().double(), want.double(), atol=1e-4)
    assert block.half().gates[0].threshold.steps.dtype == torch.long  # as exact as before


@pytest.mark.parametrize("experts, factor", [(1, 0.5), (1, 0.125), (4, 1.5), (1, 2.0)])
def test_mixture_of_depths_takes_as_many_tokens_in_evaluation(experts, factor):
    """In all; in training of each sentence. In evaluation no token depends on another one."""
    x, _ = make_input(shape=SENTENCES)
    block = make_block(str(experts), gate="depths", capacity_factor=factor)
    _, stats = block(x)
    assert int(stats.chosen.sum()) == 3 * experts * min(math.ceil(factor * 6 / experts), 6)
    block.end_update(stats.observed)
    y, stats = block.eval()(x)
    assert int(stats.chosen.sum()) == experts * min(round(factor * T / experts), T)
    for one in ((slice(1), slice(2)), (0, slice(3)), (2, 4)):
        assert torch.allclose(y[one], block(x[one])[0], atol=1e-12)


def test_sigmoid_scores_that_are_almost_0():
    block = make_block("8", scores="sigmoid")
    with torch.no_grad():  # of about e^-60
        block.layer_norms[0].weight[0], block.layer_norms[0].bias[0] = 0.0, 1.0
        block.gates[0].weight[:, 0] = -60.0
    assert_agrees(block, *make_input("some"))


def test_bias_goes_towards_those_with_less_than_the_mean():
    options = {"balance": "bias", "bias_step": 0.5, "second_expert_policy": "all"}
    block = StratifiedMoE(D, F, "2-2", **options)
    asked = torch.tensor([[5, 3, 4, 4], [9, 1, 0, 0]])
    block.end_update(asked)
    assert block.gates[0].bias.steps.tolist() == [-1, 1, 0, 0]
    assert block.gates[1].bias.steps.tolist() == [-1, 1]
    block.end_update(torch.zeros_like(asked))  # an update without tokens
    assert torch.equal(block.gates[1].bias.value(), torch.tensor([-0.5, 0.5]))
    half = block.to(torch.bfloat16)
    for _ in range(300):
        half.end_update(asked)
    assert half.gates[1].bias.value().tolist() == [-150.5, 150.5]


@pytest.mark.parametrize(
    "tokens, experts", [(0, 4), (1, 4), (5, 2), (7, 3), (8, 4), (9, 4), (3, 1)]
)
def test_balanced_assignment_is_the_best(tokens, experts):
    torch.manual_seed(tokens)
    for scale in (0, 0.1, 5):  # of what makes one expert better for all
        affinity = torch.randn(tokens, experts).double() + scale * torch.randn(experts)
        found = balanced_assignment(affinity)
        loads = found.bincount(minlength=experts)
        assert loads.max() <= -(-tokens // experts) and loads.min() >= tokens // experts
        best = reference_gates.best_balanced(affinity.tolist())
        want = sum(affinity[t, e] for t, e in enumerate(best))
        got = affinity.gather(1, found.unsqueeze(1)).sum()
        assert float(got) == pytest.approx(float(want), abs=1e-9)


@pytest.mark.parametrize(
    "affinity",
    [
        torch.zeros(100, 8),
        torch.arange(8.0).expand(100, 8),
        torch.full((100, 8), torch.nan),
        torch.randn(100, 8).masked_fill(torch.rand(100, 8) < 0.1, -torch.inf),
        1e30 * torch.randn(100, 8),
    ],
    ids=["equal", "the same order", "no numbers", "some infinite", "large"],
)
def test_balanced_assignment_of_odd_affinities(affinity):
    loads = balanced_assignment(affinity).bincount(minlength=8)
    assert sorted(loads.tolist()) == [12] * 4 + [13] * 4
