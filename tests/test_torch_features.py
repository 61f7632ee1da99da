"""What torch lacks is done without: looked for in one place, and here taken away."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch

from smoe_fairseq.modules import StratifiedMoE, products, torch_features
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


@pytest.mark.parametrize(
    "newer, older, exact",
    [
        *(("tf32", "highest", False), ("none", "high", True)),
        *((None, "high", False), (None, "highest", True)),
    ],
)
def test_float32_is_exact_by_the_newer_setting_or_the_older(newer, older, exact, monkeypatch):
    settings = {"fp32_precision": newer} if newer else {}  # since torch 2.9
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(**settings))
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: older)
    assert torch_features.float32_is_exact() == exact


def test_rows_are_whole_16_bytes_in_the_type_of_the_product():
    """Under autocast, the experts' weights have another type."""
    weight, types = torch.empty(2, 64, 20), (torch.float32, torch.bfloat16)
    has = torch_features.grouped_mm is not None
    assert [products.torch_has_one(weight, dtype) for dtype in types] == [has, False]


def test_an_old_triton_has_no_kernels(monkeypatch):
    """It compiles them and then refuses the arguments of the second launch."""
    old = ModuleType("triton")
    old.__version__, old.__spec__ = "3.5.1", ModuleSpec("triton", None)
    monkeypatch.setitem(sys.modules, "triton", old)
    assert products.kernels.__wrapped__() is None
