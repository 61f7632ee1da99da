"""Options that do not go together: one sentence that names the parameter of the block, or the flag."""

import pytest
import torch
from commands import sentence_of
from test_criterion import make_criterion
from test_model import make_model, sentence_against, tiny

from smoe_fairseq.errors import UsageError
from smoe_fairseq.modules import StratifiedMoE

NAN = float("nan")
# The first parameter is the one that is named; the strata are 2-2-2-2 unless given.
OPTIONS = [
    *(dict(strata=each) for each in ("", "4--4", "4-0", "0", "-4", "four")),
    *(dict(embed_dim=0), dict(ffn_embed_dim=-1), dict(embed_dim=2.0)),
    *(dict(top_k="0"), dict(dropout="0"), dict(capacity_factor="0")),
    *(dict(top_k=2, strata="7-1"), dict(top_k=2, strata="1-4", stacked=True), dict(top_k=0)),
    *(dict(top_k=3), dict(top_k=5, null_experts=2), dict(top_k=5, gate="relu")),
    dict(top_k=5, gate="threshold"),
    *(dict(capacity_factor=-1.0), dict(eval_capacity_factor=NAN)),
    *(dict(capacity_factor=0.0, gate=gate, strata="1") for gate in ("expert-choice", "depths")),
    *(dict(gate_normalization="softmax"), dict(second_expert_policy="best")),
    *(dict(drop_order="first"), dict(norms="post"), dict(dropout_per="token")),
    *(dict(dropout_per="layer", norms="released"), dict(activation_fn="reluu")),
    *(dict(norms="released", stacked=True, strata="4-4"), dict(execution="fast")),
    *(dict(gate_init_scale=0.0), dict(output_init_scale=-1.0)),
    *(dict(cmr=True), dict(cmr_gate_drop=1.5, cmr=True, strata="8")),
    *(dict(eom=1.0), dict(fom=-0.1), dict(gating_dropout=2.0)),
    dict(stacked=True, strata="4-0-4"),
    *(dict(gate=gate) for gate in ("soft", "base", "expert-choice", "depths")),
    dict(gate="hash", hash_table=torch.tensor([0, 1])),
    dict(hash_table=None, gate="hash", strata="8"),
    dict(hash_table=torch.tensor([9]), gate="hash", strata="4"),
    *(dict(top_p=p, gate="top-p") for p in (0.0, 1.5)),
    *(dict(null_experts=1, gate=gate) for gate in ("top-p", "relu")),
    *(dict(scores="tanh"), dict(scores="sigmoid", gate="top-p"), dict(copy_experts=1, gate="relu")),
    *(dict(threshold_step=0, gate="threshold"), dict(balance="bias", gate="threshold")),
    *(dict(constant_experts=1, balance="bias"), dict(constant_experts=-1), dict(null_experts=-1)),
    *(dict(balance="none"), dict(second_expert_policy="sampling", balance="bias")),
    *(dict(null_experts=1, balance="bias"), dict(bias_step=0.0, balance="bias")),
    *(dict(balance_over="epoch"), dict(balance_over="update", gate="base", strata="8")),
    *(dict(residual=True), dict(shared_experts=1), dict(shared_experts=-1)),
    # Without effect.
    *(dict(capacity_factor=0.1, gate="base", strata="8"), dict(top_k=4, gate="top-p")),
    *(dict(bias_step=0.5), dict(cmr_gate_drop=0.2, strata="8"), dict(top_p=0.5)),
    *(dict(expert_ffn_dim=-4), dict(residual=True, cmr=True, strata="8")),
    *(dict(capacity_budget=1.5, strata="8"), dict(capacity_budget=2.0, stacked=True)),
    *(dict(capacity_budget=each) for each in (0.9, 4.1, NAN, -1.0)),
    *(dict(gate_options="a{b=1"), dict(branches="a}")),
    *(dict(exit_bias=1.0, strata="8"), dict(exit_bias=-1.0, stacked=True), dict(exit_bias=NAN)),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_parameter_is_named(options):
    named = next(iter(options))
    options = {"embed_dim": 8, "ffn_embed_dim": 6} | options
    assert named in sentence_of(StratifiedMoE, **options)


def test_whole_numbers_are_numbers():
    """A value that changes nothing is accepted beside a gate without the option."""
    base = StratifiedMoE(8, 6, "4", gate="base", capacity_factor=2, eval_capacity_factor=0)
    assert base.config.capacity_factor == 2


# The first flag is the one that is named.
FLAGS = """
    --smoe-strata 4-x
    --moe-freq 3
    --decoder-moe-freq 3
    --no-decoder-normalize-before
    --encoder-attention-heads 0
    --encoder-embed-dim 0
    --decoder-layers -1
    --max-source-positions 0
    --max-source-positions 1000000000000
    --max-target-positions 1000000000000000000000000
    --moe-expert-ffn-dim 1000000000000000000
    --smoe-strata 2000000
    --encoder-embed-dim 100000 --encoder-layers 20
    --smoe-chain 1001 --smoe-strata 8
    --smoe-chain 1000 --smoe-strata 8 --encoder-layers 99
    --attention-dropout nan
    --activation-dropout 1.0
    --encoder-layerdrop -0.1
    --moe-gate hash
    --moe-gate expert-choice --smoe-strata 8 --encoder-moe-freq 0
    --moe-gate base --smoe-chain 2 --smoe-strata 8
    --smoe-chain 2 --smoe-strata 4-4
    --smoe-chain 2 --smoe-strata 8 --moe-stacked
    --moe-cmr --smoe-chain 2 --smoe-strata 8
    --smoe-norm released --smoe-chain 2 --smoe-strata 8
    --moe-gate-residual strata --smoe-strata 8
    --moe-gate-residual strata --moe-stacked
    --moe-gate-residual layers --moe-gate top-p
    --moe-gate-residual layers --moe-freq 1 --decoder-smoe-strata 4-4,8-8
    --smoe-chain 2 --moe-freq 0
    --moe-stacked --moe-freq 0
    --smoe-capacity-budget 2 --moe-freq 0
    --smoe-exit-bias 1 --moe-freq 0
    --moe-hash-seed 5 --moe-gate base --smoe-strata 8
    --moe-hash-table balanced
    --moe-gate-normalization before-drop --moe-gate top-p
    --moe-second-expert-policy random --moe-gate relu
    --moe-drop-order score --moe-gate hash --smoe-strata 8
    --moe-eval-capacity-factor 0.5 --moe-gate depths --smoe-strata 1
    --moe-capacity-factor 1.0 --moe-gate depths --smoe-strata 1
    --smoe-exit-bias 1 --moe-stacked
    --smoe-strata 2,6
    --decoder-smoe-strata 2,6,8
    --encoder-smoe-strata 6-0
    --decoder-smoe-strata 2-1
    --encoder-smoe-strata 8 --encoder-moe-freq 0
    --moe-cmr --encoder-smoe-strata 2-2 --smoe-strata 2
"""


@pytest.mark.parametrize("flags", [line.strip() for line in FLAGS.strip().splitlines()])
def test_a_flag_is_named(flags):
    assert flags.split()[0] in sentence_against(*flags.split())


LANGUAGE_MODEL = """
    --moe-gate expert-choice --smoe-strata 8
    --moe-freq 3
    --no-decoder-normalize-before
    --smoe-strata 4-4,8
    --moe-cmr --moe-freq 0
    --max-target-positions 0 --tokens-per-sample 0
"""


@pytest.mark.parametrize("flags", [line.strip() for line in LANGUAGE_MODEL.strip().splitlines()])
def test_a_flag_of_a_language_model_is_named(flags):
    model = ("--task", "language_modeling", "--arch", "smoe_transformer_lm_tiny")
    assert flags.split()[0] in sentence_of(make_model, *model, *flags.split())


@pytest.mark.parametrize(
    "weights",
    [
        *(dict(cmr_gate_loss_p=1.2), dict(cmr_gate_loss_wt=float("inf")), dict(label_smoothing=1)),
        *(dict(moe_gate_loss_wt=-0.01), dict(moe_z_loss_wt=NAN), dict(smoe_capacity_budget_wt=-1)),
    ],
    ids=str,
)
def test_a_weight_that_makes_no_loss_is_named(weights):
    (name,) = weights
    assert f"--{name.replace('_', '-')} " in sentence_of(make_criterion, **weights)


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--smoe-strata 2-2-2-2", "moe.gates.1.weight"),
        ("--moe-freq 0", "layers.1"),
        ("--smoe-strata 4-4 --encoder-ffn-embed-dim 64", "fc1.bias is (256,)"),
        ("--smoe-strata 4-4 --moe-null-experts 2 --moe-top-k 3", "null_weight"),
        ("--smoe-strata 4-4 --moe-balance bias --moe-second-expert-policy all", "bias.steps"),
    ],
)
def test_a_checkpoint_of_another_model_is_named(flags, named):
    state = tiny("--smoe-strata", "4-4").state_dict()
    said = sentence_of(tiny(*flags.split()).load_state_dict, state)
    assert named in said and "--smoe-strata" in said
    with pytest.raises(UsageError, match="smoe upcycle"):
        tiny("--smoe-strata", "4-4").load_state_dict(tiny("--moe-freq", "0").state_dict())
