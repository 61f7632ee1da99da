"""The example of README.md, computed by hand and by the block."""

import torch

from smoe_fairseq.modules import StratifiedMoE

LOGIT = 3.0  # of a first choice; a second has 1, the others 0


STRATA = ["AB", "CD", "EF"]
PASSES = [(1, "C", "E"), (3, "F", "E")]  # gate, first choice, second choice


def test_the_example_of_the_readme():
    strata, experts = STRATA, "".join(STRATA)
    torch.manual_seed(0)
    block = StratifiedMoE(8, 16, "-".join(str(len(each)) for each in strata)).double().eval()
    x = torch.randn(1, 1, 8, dtype=torch.double)

    # Each gate is set so that it scores what the text says of the token that arrives there.
    want = x.flatten()
    with torch.no_grad():
        for gate, first, second in PASSES:
            h = block.layer_norms[gate - 1](want)
            seen = "".join(strata[gate - 1 :])  # its own stratum and all later ones
            logits = torch.zeros(len(seen), dtype=torch.double)
            logits[seen.index(first)], logits[seen.index(second)] = LOGIT, 1.0
            block.gates[gate - 1].weight.copy_(torch.outer(logits, h / h.dot(h)))
            score = logits.softmax(0)
            share = score[[seen.index(first), seen.index(second)]]
            share = share / share.sum()
            for expert, weight in zip((first, second), share, strict=True):
                e, own = experts.index(expert), block.experts
                hidden = (own.w1[e] @ h + own.b1[e]).relu()
                want = want + weight * (own.w2[e] @ hidden + own.b2[e])
    y, stats = block(x)
    assert torch.allclose(y.flatten(), want, atol=1e-12)
    assert stats.requested_capacity.item() == len(PASSES)
