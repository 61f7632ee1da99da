"""What holds for any gate, weights, strata and tokens."""

import math
import random

import pytest
import torch
from plain_loops import executing

from smoe_fairseq.modules import StratifiedMoE
from smoe_fairseq.modules.gates import GATES
from smoe_fairseq.modules.routing import DROP_ORDERS

D = 8
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


def member(seed: int):
    """One of the family, with sentences of any length: block, tokens, mask, ids."""
    draw = random.Random(seed)
    name = sorted(FAMILY)[seed % len(FAMILY)]
    options = {"gate": name, "capacity_factor": 0.0, **FAMILY[name]}
    sizes = [*(draw.randint(0, 4) for _ in range(draw.randint(0, 2))), draw.randint(1, 4)]
    if name in ("hash", "base", "expert-choice", "depths"):
        sizes = [sum(sizes)]
    torch.manual_seed(seed)
    if name == "hash":
        options["hash_table"] = torch.randint(sizes[0], (20,))
    top_k = draw.randint(1, sizes[-1] + options.get("null_experts", 0))
    strata = "-".join(map(str, sizes))
    if name == "topk":
        options["drop_order"] = draw.choice(DROP_ORDERS)
        options["capacity_factor"] = draw.choice([0.0, 0.3, 2.0])
    read = {"top_k": top_k, "second_expert_policy": "all"}
    read = {name: value for name, value in read.items() if name in GATES[options["gate"]].options}
    block = StratifiedMoE(D, 8, strata, **read | options).double()
    for gate in block.gates:
        for parameter in gate.parameters():
            torch.nn.init.normal_(parameter)
        if name == "bias":
            gate.bias.steps += torch.randint(0, 300, (gate.num_experts,))
    block.execution = draw.choice(["per-expert", "grouped"])
    shape = draw.randint(1, 4), draw.randint(1, 7)
    mask = torch.rand(shape) < draw.choice([0.0, 0.4, 1.0])
    return block, torch.randn(*shape, D).double(), mask, torch.randint(20, shape)


@pytest.mark.parametrize("seed", range(40))
def test_members_treat_sentences_alone_and_tokens_alike(seed):
    """In evaluation: a sentence by itself, its tokens in another order, its padding left out."""
    block, x, mask, ids = member(seed)
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


@pytest.mark.parametrize("seed", range(40))
def test_members_train_any_tokens(seed):
    """No token, one, or more: losses and gradients are numbers, and counts add up."""
    block, x, mask, ids = member(seed)
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
