"""The block's shorter way for inference on a CPU, beside the general one: the same bits."""

from dataclasses import fields
from functools import partial

import pytest
import torch
from test_exit_bias import exit_bias

from smoe_fairseq.analysis.capacity import training_capacity
from smoe_fairseq.modules import StratifiedMoE, inference
from smoe_fairseq.modules.config import MoEConfig
from smoe_fairseq.translate.int8 import FbgemmLinear, Int8Linear, has_fbgemm, levels
from smoe_fairseq.translate.packed import PackedExperts, PackedLinear, can_pack

OPTIONS = {
    "paper": {},
    "released": {"norms": "released"},
    "stacked": {"stacked": True},
    "before-drop": {"gate_normalization": "before-drop"},
    "none": {"gate_normalization": "none"},
    "sigmoid": {"scores": "sigmoid", "second_expert_policy": "all"},
    "switch": {"top_k": 1},
    "gelu": {"activation_fn": "gelu"},
    "geglu": {"activation_fn": "geglu"},
}
STRATA = ("8", "2-2-2-2", "0-3-5")
GENERAL = {
    "top-3": {"top_k": 3},
    "bias": {"balance": "bias", "second_expert_policy": "all"},
    "null experts": {"null_experts": 2},
    "shared experts": {"strata": "8", "shared_experts": 1},
    "output masking": {"eom": 0.1},
    "capacity": {"eval_capacity_factor": 1.0},
    "exit bias": {"exit_bias": 1.0},
    "gate residual": {"gate_residual": "strata"},
    "relu": {"gate": "relu"},
    "grouped": {"execution": "grouped"},
}


# Other values of the other options.
OTHER_VALUES = [
    {"strata": "8", "chain": 2},
    {"gate": "top-p", "top_p": 0.6},
    {"gate": "threshold", "threshold_step": 0.5},
    {"strata": "8", "gate": "hash", "hash_table": torch.arange(16) % 8},
    {"copy_experts": 1, "constant_experts": 1},
    {"expert_ffn_dim": 24},
    {"strata": "8", "residual": True},
    {"balance": "bias", "bias_step": 0.5, "second_expert_policy": "all"},
    {"balance_over": "update", "capacity_budget": 1.5},
    {"capacity_factor": 0.5},
    {"drop_order": "score", "eval_capacity_factor": 0.5},
    {"dropout_per": "layer", "dropout": 0.1, "activation_dropout": 0.1},
    {"gate_init_scale": 3.0, "output_init_scale": 3.0},
    {"fom": 0.2},
    {"gating_dropout": 0.5},
    {"strata": "8", "cmr": True, "cmr_gate_drop": 0.5},
    {"expert_parallel": True},
]
OF_PLUGINS = ("gate_options", "branches")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1)


def block_of(strata: str, **options) -> StratifiedMoE:
    block = StratifiedMoE(16, 32, strata, **options).eval()
    for gate in block.gates:
        for weight in gate.parameters():
            torch.nn.init.normal_(weight, std=0.5)
    return block


def general(block, x, padding_mask=None, ids=None):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inference, "applies", lambda *_: False)
        return block(x, padding_mask, with_stats=False, ids=ids)[0]


def compare(block, x, padding_mask=None):
    with torch.inference_mode():
        assert inference.applies(block, x)
        found, stats = block(x, padding_mask, with_stats=False)
        expected = general(block, x, padding_mask)
    assert stats is None
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("strata", STRATA)
def test_it_computes_the_same_bits(strata, name):
    if name == "stacked" and "0" in strata:
        pytest.skip("a stratum without experts cannot be stacked")
    block = block_of(strata, **OPTIONS[name])
    for sentences, tokens in ((1, 1), (5, 1), (40, 1), (7, 13)):
        x = torch.randn(sentences, tokens, 16)
        compare(block, x)
        compare(block, x, torch.rand(sentences, tokens) < 0.3)
    compare(block, x, torch.ones(sentences, tokens, dtype=torch.bool))


@pytest.mark.parametrize("option", [f.name for f in fields(MoEConfig)])
def test_no_option_is_ignored(option):
    """Whichever way computes a block, its output is that of the general way."""
    cases = [*OPTIONS.values(), *GENERAL.values(), *OTHER_VALUES]
    tried = [options for options in cases if option in options]
    assert tried or option in OF_PLUGINS
    for options in tried:
        block, x = block_of(**{"strata": "2-6", **options}), torch.randn(7, 3, 16)
        ids = torch.randint(16, (7, 3)) if block.kind.extra_input == "id" else None
        with torch.inference_mode():
            found = block(x, with_stats=False, ids=ids)[0]
            assert torch.equal(found, general(block, x, ids=ids))


def test_a_chain_of_passes():
    compare(block_of("8", chain=3), torch.randn(9, 1, 16))


@pytest.mark.parametrize("linear", [PackedLinear, Int8Linear, FbgemmLinear])
@pytest.mark.parametrize("strata", STRATA)
def test_with_packed_experts(strata, linear):
    exists = {PackedLinear: can_pack, Int8Linear: levels, FbgemmLinear: has_fbgemm}
    if not exists[linear]():
        pytest.skip("this CPU has no such products")
    block = block_of(strata)
    experts = block.experts
    maps = [
        [linear(*each) for each in zip(*pair, strict=True)]
        for pair in ((experts.w1, experts.b1), (experts.w2, experts.b2))
    ]
    block.execution = partial(PackedExperts, maps)
    for rows in (1, 5, 40, 91):
        compare(block, torch.randn(rows, 1, 16))


def test_equal_scores_and_nan():
    block = block_of("4-4")
    x = torch.randn(6, 1, 16)
    x[2] = torch.nan
    compare(block, x)
    for gate in block.gates:
        torch.nn.init.zeros_(gate.weight)
    compare(block, x)


@pytest.mark.parametrize("name", GENERAL)
def test_what_goes_the_general_way(name):
    block, x = block_of(**{"strata": "4-4", **GENERAL[name]}), torch.randn(3, 2, 16)
    with torch.inference_mode():
        assert not inference.applies(block, x)
        assert torch.equal(block(x, with_stats=False)[0], block(x)[0])


def test_so_do_other_modes_and_types():
    block, x = block_of("4-4"), torch.randn(3, 2, 16)
    assert not inference.applies(block, x)  # gradients
    with torch.inference_mode():
        assert inference.applies(block, x)
        assert not inference.applies(block, x[:0])
        assert not inference.applies(block.bfloat16(), x.bfloat16())
        block.float()
        with torch.autocast("cpu", torch.bfloat16):
            assert not inference.applies(block, x)
        with training_capacity(block):
            assert not inference.applies(block, x)
        with exit_bias(block, 0.5):
            assert not inference.applies(block, x)
        hook = block.gates[1].register_forward_hook(lambda *_: None)
        assert not inference.applies(block, x)
        hook.remove()
        assert inference.applies(block, x)
        assert not inference.applies(block.train(), x)
