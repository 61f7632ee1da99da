"""The method as README.md describes it: its example is computed by hand and by the block."""

import re
from pathlib import Path

import torch

from smoe_fairseq.modules import StratifiedMoE

README = Path(__file__).parents[1].joinpath("README.md").read_text("utf-8")
LOGIT = 3.0  # of a first choice; a second has 1, the others 0


def example() -> tuple[list[str], list[tuple[int, str, str]], int]:
    """The strata, ``(gate, first choice, second choice)`` in order, and the requested capacity."""
    text = " ".join(README[README.index("For example, a layer has the strata") :].split())
    strata = re.match(r"For example, a layer has the strata (.*?)\.", text)[1]
    strata = [name.replace(" ", "") for name in re.split(r", | and ", strata)]
    choices = re.findall(r"first choice is ([A-F]) and its second is ([A-F])", text)
    passed = re.search(r"It passed gates (.*?), so its requested capacity is (\d)", text)
    gates = [int(number) for number in passed[1].split(" and ")]
    passes = [(gate, *both) for gate, both in zip(gates, choices, strict=True)]
    return strata, passes, int(passed[2])


def test_the_example_of_the_readme():
    strata, passes, requested = example()
    experts = "".join(strata)
    torch.manual_seed(0)
    block = StratifiedMoE(8, 16, "-".join(str(len(each)) for each in strata)).double().eval()
    x = torch.randn(1, 1, 8, dtype=torch.double)

    # Each gate is set so that it scores what the text says of the token that arrives there.
    want = x.flatten()
    with torch.no_grad():
        for gate, first, second in passes:
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
    assert stats.requested_capacity.item() == requested


def test_the_token_goes_on_behind_the_stratum_of_its_first_choice():
    """The example's gates follow from the rule, and one expert is in a later stratum."""
    strata, passes, requested = example()
    stratum = {expert: number for number, of in enumerate(strata, 1) for expert in of}
    ways = [1, *(stratum[first] + 1 for _, first, _ in passes)]
    assert ways[:-1] == [gate for gate, _, _ in passes]
    assert ways[-1] == len(strata) + 1 and requested == len(passes)
    assert any(stratum[second] > stratum[first] for _, first, second in passes)
