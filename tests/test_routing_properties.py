"""What holds for any weights, strata and tokens."""

import math

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plain_loops import executing

from smoe_fairseq.modules import StratifiedMoE
from smoe_fairseq.modules.gates import GATES

D = 8
POLICIES = ("sampling", "all", "random")


@st.composite
def cases(
    draw,
    drop_orders=("sentence", "score", "random"),
    policies=POLICIES,
    factors=(0.0, 0.3, 1.0, 2.0),
):
    sizes = [*draw(st.lists(st.integers(0, 4), max_size=3)), draw(st.integers(1, 4))]
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
    with executing(block.execution):
        y, stats = block(x, mask)
    for handle in handles:
        handle.remove()
    return y, stats, passes


@settings(max_examples=80, deadline=None, derandomize=True)
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
        assert int(load.sum()) == int(routing.chosen_TK.sum() - routing.dropped_TK.sum())
        assert (routing.expert_TK[~active] == strata.visible[i]).all()
    assert waiting[-1] == int((~mask).sum())  # everyone leaves


@settings(max_examples=60, deadline=None, derandomize=True)
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


FAMILY = {
    "topk": dict(null_experts=2, balance="loss"),
    "simple": dict(gate="topk", copy_experts=1, constant_experts=1),
    "bias": dict(gate="topk", balance="bias"),
    "top-p": dict(top_p=0.6),
    "relu": {},
    "threshold": {},
    "depths": dict(capacity_factor=1.5),
    "hash": {},
    "base": {},
    "expert-choice": dict(capacity_factor=1.5),
}


@st.composite
def family_cases(draw):
    """Of any member, with sentences of any length: block, tokens, mask, ids."""
    name = draw(st.sampled_from(sorted(FAMILY)))
    options = {"gate": name, "capacity_factor": 0.0, **FAMILY[name]}
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    if name in ("hash", "base", "expert-choice", "depths"):
        sizes = [sum(sizes)]
    torch.manual_seed(draw(st.integers(0, 10_000)))
    if name == "hash":
        options["hash_table"] = torch.randint(sizes[0], (20,))
    top_k = draw(st.integers(1, sizes[-1] + options.get("null_experts", 0)))
    strata = "-".join(map(str, sizes))
    read = {"top_k": top_k, "second_expert_policy": "all"}
    read = {name: value for name, value in read.items() if name in GATES[options["gate"]].options}
    block = StratifiedMoE(D, 8, strata, **read | options).double()
    for gate in block.gates:
        for parameter in gate.parameters():
            torch.nn.init.normal_(parameter)
        if name == "bias":
            gate.bias.steps += torch.randint(0, 300, (gate.num_experts,))
    block.execution = draw(st.sampled_from(["per-expert", "grouped"]))
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    mask = torch.rand(shape) < draw(st.sampled_from([0.0, 0.4, 1.0]))
    return block, torch.randn(*shape, D).double(), mask, torch.randint(20, shape)


@settings(max_examples=70, deadline=None, derandomize=True)
@given(family_cases())
def test_members_treat_sentences_alone_and_tokens_alike(case):
    """In evaluation: a sentence by itself, its tokens in another order, its padding left out."""
    block, x, mask, ids = case
    block.eval()
    with executing(block.execution):
        y, stats = block(x, mask, ids=ids)
    assert torch.equal(y[mask], x[mask])
    assert torch.equal(stats.requested_capacity > 0, ~mask)
    assert int(stats.first_choices.sum()) == int(stats.requested_capacity.sum())
    assert not stats.dropped.any()
    for s in range(len(x)):
        real = (~mask[s]).nonzero().squeeze(1)
        order = real[torch.randperm(len(real))]
        own, own_stats = block(x[s : s + 1, order], ids=ids[s : s + 1, order])
        assert torch.allclose(own[0], y[s, order], atol=1e-12)
        assert torch.equal(own_stats.requested_capacity[0], stats.requested_capacity[s, order])


@settings(max_examples=80, deadline=None, derandomize=True)
@given(family_cases())
def test_members_train_any_tokens(case):
    """No token, one, or more: losses and gradients are numbers, and counts add up."""
    block, x, mask, ids = case
    x = x.clone().requires_grad_()
    with executing(block.execution):
        y, stats = block.train()(x, mask, ids=ids)
        (y.square().sum() + stats.balance_loss + stats.z_loss).backward()
    gradients = [p.grad for p in block.parameters() if p.grad is not None]
    assert all(g.isfinite().all() for g in (x.grad, *gradients))
    tokens = int((~mask).sum())
    if type(block.gates[0]).__name__ == "BaseGate":
        loads = stats.first_choices[0]
        assert loads.max() <= -(-tokens // len(loads)) and loads.min() >= tokens // len(loads)
    if type(block.gates[0]).__name__ == "ExpertChoiceGate":
        experts = block.strata.num_experts
        room = min(tokens, math.ceil(1.5 * tokens / experts))
        assert int(stats.chosen.sum()) == experts * room
    if type(block.gates[0]).__name__ == "HashGate":
        assert int(stats.chosen.sum()) == tokens
