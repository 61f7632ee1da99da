"""The loss of a capacity budget: the expected number of stops, its gradient, what is refused."""

import pytest
import torch
from plain_loops import PADDING, D, derivatives, make_block, make_input, watched
from reference_gates import softmax
from test_criterion import make_criterion, make_sample
from test_model import tiny

from smoe_fairseq.models.transformer import moe_blocks


def budgeted(strata, **options):
    return make_block(strata, capacity_budget=1.5, capacity_factor=0.0, **options)


def gate_inputs(block, x, mask):
    """Of each gate the tokens that stop there: their inputs, and first choices numbered in the block."""
    with watched(block.gates) as seen:
        _, stats = block(x, mask)
    found = []
    for first, ((x_TD, *_), routing) in zip(block.strata.first_experts, seen, strict=True):
        active = routing.active_T
        found.append((x_TD[active], (routing.first_choice_T[active] + first).tolist()))
    return stats, found


def expected_in_loops(block, seen):
    """What has the gradient that is promised: by each token at each of its stops, probability times stops.

    The stops behind a stratum are those that its tokens are counted to make, uniform where there are none.
    """
    strata = block.strata
    counted = [1.0]  # per token from a stratum on, the last one first
    for i in reversed(range(len(strata) - 1)):
        homes = [strata.stratum_of_expert[e] for e in seen[i][1]]
        if not homes:
            homes = strata.stratum_of_expert[strata.first_experts[i] :]
            total = sum(uniform_from(strata, home + 1) for home in homes)
        else:
            behind = [*reversed(counted), 0.0]
            total = sum(behind[home - i] for home in homes)
        counted.append(1 + total / len(homes))
    behind = [*reversed(counted), 0.0]
    value = torch.zeros((), dtype=torch.float64)
    tokens = max(len(seen[0][1]), 1)
    for i, (inputs, _) in enumerate(seen):
        weight, visible = block.gates[i].weight, strata.visible[i]
        first = strata.first_experts[i]
        for h in inputs:
            probs = softmax([row @ h for row in weight])
            for e in range(visible):
                value = value + probs[e] * behind[strata.stratum_of_expert[first + e] + 1] / tokens
    return value


def uniform_from(strata, i):
    """Stops from stratum i on where all experts are as likely."""
    if i == len(strata):
        return 0.0
    homes = strata.stratum_of_expert[strata.first_experts[i] :]
    return 1 + sum(uniform_from(strata, home + 1) for home in homes) / len(homes)


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("strata, gate", [("4-4", "topk"), ("2-2-2-2", "topk"), ("2-3-4", "top-p")])
def test_stops_and_their_gradient_agree_with_plain_loops(strata, gate, execution, padding):
    x, mask = make_input(padding)
    block = budgeted(strata, execution=execution, gate=gate)
    params = dict(block.named_parameters())
    stats, seen = gate_inputs(block, x, mask)
    real = int((~mask).sum())
    if real:
        want = int(stats.requested_capacity.sum()) / real
    else:
        want = uniform_from(block.strata, 0)
    assert float(stats.stops.detach()) == pytest.approx(want, rel=1e-12)
    want_of = derivatives(expected_in_loops(block, seen), x, params)
    for name, got in derivatives(stats.stops, x, params).items():
        assert torch.allclose(got, want_of[name], atol=1e-12), name
    moved = want_of["gates.0.weight"].abs().sum()
    assert (moved > 0) == (padding != "all")


def test_nobody_at_a_stratum_counts_as_uniform():
    """All tokens leave from the first gate; what they would find behind is as if it were drawn."""
    block = budgeted("2-2-2")
    x, mask = make_input()
    with torch.no_grad():
        block.layer_norms[0].weight.zero_()  # tokens that are all alike
        block.layer_norms[0].bias.fill_(1.0)
        block.gates[0].weight.copy_(torch.arange(6.0).unsqueeze(1).expand(6, D) / 4)
    params = dict(block.named_parameters())
    stats, seen = gate_inputs(block, x, mask)
    assert float(stats.stops.detach()) == 1.0 and not seen[1][1]
    want = derivatives(expected_in_loops(block, seen), x, params)
    got = derivatives(stats.stops, x, params)
    assert want["gates.0.weight"].abs().max() > 0.01
    for name in params:
        assert torch.allclose(got[name], want[name], atol=1e-12), name


def test_null_experts_are_of_no_stratum():
    """The first choice is of the others, and so is what is expected of it."""
    block, x, mask = budgeted("2-2", top_k=3, null_experts=3), *make_input()
    stats, seen = gate_inputs(block, x, mask)
    params = dict(block.named_parameters())
    got = derivatives(stats.stops, x, params)
    want = derivatives(expected_in_loops(block, seen), x, params)  # true experts alone
    for name in ("x", "gates.0.weight", "gates.0.null_weight"):
        assert torch.allclose(got[name], want[name], atol=1e-12), name


def test_there_is_nothing_of_it_without_a_budget():
    x, mask = make_input("some")
    with_budget, without = budgeted("4-4"), make_block("4-4", capacity_factor=0.0)
    (y, stats), (plain_y, plain) = with_budget(x, mask), without(x, mask)
    assert plain.stops is None and torch.equal(y, plain_y)
    assert torch.equal(stats.balance_loss, plain.balance_loss)
    assert with_budget.state_dict().keys() == without.state_dict().keys()


@pytest.mark.parametrize("budget", [1.2, 1.9])
def test_loss_is_the_distance_of_the_mean_that_is_logged(budget):
    """Over the tokens of both layers, padding left out; added with its weight."""
    sample = make_sample(4, 6, seed=1)
    sample["net_input"]["src_tokens"] = sample["net_input"]["src_tokens"][:, :4]  # shorter
    model = tiny("--smoe-strata", "4-4", "--smoe-capacity-budget", str(budget)).eval()
    criterion = make_criterion()
    loss, size, log = criterion(model, sample)
    moe_stats = model(**sample["net_input"])[1]["moe_stats"]
    counts = [stats.requested_capacity for stats in moe_stats]
    mean = sum(float(c.sum()) for c in counts) / sum(int((c > 0).sum()) for c in counts)
    assert 1.2 < mean < 1.9
    assert float(log["smoe_budget_loss"]) / size == pytest.approx(abs(mean - budget), rel=1e-5)
    criterion.smoe_capacity_budget_wt = 0.0
    plain, _, _ = criterion(model, sample)
    assert float((loss - plain).detach()) == pytest.approx(
        0.1 * size * abs(mean - budget), rel=1e-3
    )


def test_all_layers_left_out_by_layerdrop():
    """It is logged all the same, as other processes do that have layers."""
    model = tiny("--smoe-strata", "4-4", "--smoe-capacity-budget", "1.5")
    losses = make_criterion().gate_losses(moe_blocks(model), {}, {})
    assert {name: float(value) for name, _, value in losses}["smoe_budget_loss"] == 0
