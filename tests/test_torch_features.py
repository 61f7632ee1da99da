"""What torch lacks is done without: looked for in one place, and here taken away."""

import pytest
import torch

from smoe_fairseq.modules import StratifiedMoE, torch_features
from smoe_fairseq.modules.execution import start_pass
from smoe_fairseq.modules.grouped import can_group


@pytest.fixture
def without_grouped_mm(monkeypatch):
    """As in torch 2.6."""
    for name in ("PUBLIC", "PRIVATE", "grouped_mm"):
        monkeypatch.setattr(torch_features, name, None)


@pytest.fixture
def private_grouped_mm(monkeypatch):
    """As in torch 2.8: one for bfloat16 on GPUs of one kind."""
    monkeypatch.setattr(torch_features, "PUBLIC", None)
    monkeypatch.setattr(torch_features, "PRIVATE", object())


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
    assert type(start_pass("auto", experts, torch.empty(4, 16))).__name__ == "PerExpert"


def test_private_grouped_product_is_for_one_kind_of_gpu(private_grouped_mm, monkeypatch):
    class Weight:
        is_cuda, device, dtype = True, "cuda:0", torch.bfloat16

    for major, expected in ((8, False), (9, True), (10, False)):
        capability = (major, 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert torch_features.has_grouped_mm(Weight) is expected
    Weight.dtype = torch.float16
    assert not torch_features.has_grouped_mm(Weight)
    assert not can_group(torch.empty(2, 16, 16, dtype=torch.bfloat16))
