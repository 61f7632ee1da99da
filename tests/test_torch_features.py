"""What torch lacks is done without: looked for in one place, and here taken away."""

import pytest
import torch

from smoe_fairseq.modules import StratifiedMoE, torch_features
from smoe_fairseq.modules.experts import start_pass


@pytest.fixture
def without_grouped_mm(monkeypatch):
    """As in torch 2.6."""
    monkeypatch.setattr(torch_features, "grouped_mm", None)


def forward_and_backward(execution):
    torch.manual_seed(0)
    block = StratifiedMoE(16, 32, "4-4", second_expert_policy="all", execution=execution)
    x = torch.randn(24, 16, requires_grad=True)
    y, _ = block(x)
    y.square().sum().backward()
    return [y, x.grad, *(p.grad for p in block.parameters())]


@pytest.mark.parametrize("execution", ["auto", "grouped"])
def test_without_a_grouped_product_the_block_computes_the_same(execution, without_grouped_mm):
    for ours, expected in zip(
        forward_and_backward(execution), forward_and_backward("per-expert"), strict=True
    ):
        torch.testing.assert_close(ours, expected)


def test_without_a_grouped_product_none_is_chosen(without_grouped_mm, monkeypatch):
    """Even where one is wanted, as while `torch.compile` traces."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    experts = StratifiedMoE(16, 32, "4-4").experts
    assert type(start_pass("auto", experts, experts.weights())).__name__ == "PerExpert"
