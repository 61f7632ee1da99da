"""What holds for any weights, strata and tokens."""

import math

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from smoe_fairseq.modules import StratifiedMoE

D = 8
POLICIES = ("sampling", "all", "random")


@st.composite
def cases(
    draw,
    drop_orders=("sentence", "score", "random"),
    policies=POLICIES,
    factors=(0.0, 0.3, 1.0, 2.0),
):
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    top_k = draw(st.integers(1, 1 if sizes[-1] == 1 else 2))
    torch.manual_seed(draw(st.integers(0, 10_000)))
    block = StratifiedMoE(
        D,
        8,
        "-".join(map(str, sizes)),
        top_k=top_k,
        capacity_factor=draw(st.sampled_from(factors)),
        second_expert_policy=draw(st.sampled_from(policies)),
        drop_order=draw(st.sampled_from(drop_orders)),
    ).double()
    for gate in block.gates:
        torch.nn.init.normal_(gate.weight)
    block.execution = draw(st.sampled_from(["per-expert", "grouped"]))
    x = torch.randn(draw(st.integers(1, 30)), D, dtype=torch.float64)
    return block, x, torch.rand(len(x)) < draw(st.sampled_from([0.0, 0.4, 1.0]))


def run(block, x, mask):
    """y, stats, and what each gate was asked and decided: (active rows, routing)."""
    passes = []

    def hook(gate, inputs, routing):
        active = inputs[1] if inputs[1] is not None else torch.ones(len(inputs[0])).bool()
        passes.append((active, routing))

    handles = [gate.register_forward_hook(hook) for gate in block.gates]
    y, stats = block(x, mask)
    for handle in handles:
        handle.remove()
    return y, stats, passes


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases())
def test_tokens_advance_and_capacity_holds(case):
    block, x, mask = case
    strata = block.strata
    y, stats, passes = run(block, x, mask)
    assert len(passes) == len(strata)  # exactly L passes, whatever the tokens do

    requested = stats.requested_capacity
    assert (requested[mask] == 0).all()
    assert ((requested[~mask] >= 1) & (requested[~mask] <= len(strata))).all()
    assert torch.equal(y[mask], x[mask])

    waiting = [0] * (len(strata) + 1)  # tokens on their way to each stratum, by the counts alone
    waiting[0] = int((~mask).sum())
    for i, (active, routing) in enumerate(passes):
        here = int(active.sum())
        assert here == waiting[i] == int(stats.first_choices[i].sum())  # routed exactly once
        assert (stats.first_choices[i, : strata.first_experts[i]] == 0).all()  # never back
        for expert, tokens in enumerate(stats.first_choices[i].tolist()):
            waiting[strata.stratum_of_expert[expert] + 1] += tokens
        factor = block.gates[i].capacity.factor
        capacity = math.ceil(factor * here / strata.visible[i]) if factor else math.inf
        load = torch.bincount(routing.expert_TK.flatten(), minlength=strata.visible[i] + 1)[:-1]
        assert load.max() <= capacity
        assert int(load.sum()) == int(routing.chosen_K.sum() - routing.dropped_TK.sum())
        assert (routing.expert_TK[~active] == strata.visible[i]).all()
    assert waiting[-1] == int((~mask).sum())  # everyone leaves


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases())
def test_order_does_not_matter_when_nothing_is_dropped(case):
    block, x, mask = case
    block.eval()
    order = torch.randperm(len(x))
    y, stats = block(x, mask)
    shuffled_y, shuffled_stats = block(x[order], mask[order])
    assert torch.allclose(shuffled_y, y[order], atol=1e-12)
    assert torch.equal(shuffled_stats.requested_capacity, stats.requested_capacity[order])
    assert torch.allclose(shuffled_stats.balance_loss, stats.balance_loss)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cases(drop_orders=["score"], policies=["all"], factors=[0.3]))
def test_order_does_not_matter_when_capacity_goes_by_score(case):
    """In training, with tokens dropped: a permutation of the rows permutes what comes out."""
    block, x, mask = case
    assume(min(block.strata.visible) > 1)  # an only expert scores 1 everywhere
    order = torch.randperm(len(x))
    y, stats = block(x, mask)
    shuffled_y, shuffled_stats = block(x[order], mask[order])
    assert torch.allclose(shuffled_y, y[order], atol=1e-12)
    assert torch.equal(shuffled_stats.dropped_choices, stats.dropped_choices[order])
    tokens, experts = int((~mask).sum()), block.strata.visible[0]
    room = experts * math.ceil(0.3 * tokens / experts)  # an expert takes one token at least
    assert stats.dropped.any() or tokens <= room


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases())
def test_padding_is_as_good_as_absent(case):
    block, x, mask = case
    block.eval()
    y, stats = block(x, mask)
    real_y, real_stats = block(x[~mask])
    assert torch.allclose(y[~mask], real_y, atol=1e-12)
    assert torch.allclose(stats.balance_loss, real_stats.balance_loss)
    assert torch.equal(stats.first_choices, real_stats.first_choices)
