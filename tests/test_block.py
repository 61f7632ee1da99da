"""The block in each gate and option against plain loops; one pass and its gradients beside another."""

import itertools
import math

import pytest
import torch
from plain_loops import (
    IDS,
    PADDING,
    SENTENCES,
    D,
    F,
    assert_agrees,
    gradients,
    make_block,
    make_input,
    objective,
)
from sampling import pairwise, rest
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from smoe_fairseq.modules import StratifiedMoE, torch_features
from smoe_fairseq.modules.products import can_group


def grid(**values):
    """All combinations of lists of options; beyond a pairwise sample for ``--full-grid``."""
    values = {"padding": "some"} | values
    values = {name: of if isinstance(of, list) else [of] for name, of in values.items()}
    cases = [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]
    chosen = set(pairwise(cases))
    return [case if i in chosen else rest(case) for i, case in enumerate(cases)]


STRATA = ["8", "4-12", "2-2-2-2"]
NORMALIZATIONS = ["after-drop", "before-drop", "none"]
FACTORS = [0.0, 0.5, 1.0, 2.0]
MODES = [True, False]
PADDED = {"padding": list(PADDING)}
LIMITED = {"capacity_factor": 1.0}
FREE = {"top_k": 3, **LIMITED, "gate_normalization": NORMALIZATIONS}
# Options of blocks, the padding of their input, and whether they train.
CASES = [
    *grid(
        strata=STRATA,
        top_k=[1, 2],
        gate_normalization=NORMALIZATIONS,
        capacity_factor=FACTORS,
        **PADDED,
    ),
    *grid(strata="1-1-1", top_k=1, capacity_factor=[0.0, 1.0]),
    *grid(strata=["8", "2-2-4", "3-3-3"], top_k=3, capacity_factor=[0.0, 1.0]),
    *grid(strata="8", top_k=8, gate_normalization=["after-drop", "before-drop"]),
    *grid(strata=["4-0-4", "0-5-2", "2-0-0-3"], top_k=[1, 2], capacity_factor=[0.0, 1.0]),
    *grid(strata=["4-4", "2-2-2-2"], stacked=True, **LIMITED),
    *grid(strata="5", chain=[2, 3], top_k=[1, 2], gate_normalization=NORMALIZATIONS, **LIMITED),
    *grid(strata=["8", "2-2-2-2"], drop_order="score", top_k=[1, 2], capacity_factor=0.5),
    *grid(strata=[*STRATA, "1-1-1"], norms="released", top_k=1, **LIMITED),
    *grid(strata=["4-4", "2-2-2-2"], second_expert_policy="sampling", training=False),
    *grid(strata="4-4", capacity_factor=0.0, eval_capacity_factor=0.5, training=MODES),
    *grid(strata=["4-4", "2-3-4"], exit_bias=[-2.0, 0.7, 3.0], training=MODES),
    *grid(strata="2-2-2", gate="top-p", exit_bias=[-2.0, 0.7], training=False),
    *grid(strata="3-3-3", top_k=3, null_experts=2, exit_bias=[1.0, -1.0], training=False),
    # Experts, and networks beside them.
    *grid(strata="4-4", activation_fn=["swiglu", "geglu", "reglu"], **LIMITED),
    *grid(strata="4", activation_fn=["swiglu", "reglu"], shared_experts=2, residual=True),
    *grid(strata="4", gate=["topk", "base"], shared_experts=3, residual=MODES, expert_ffn_dim=4),
    *grid(strata="4", residual=True, expert_ffn_dim=4, top_k=1),
    *grid(strata="8", cmr=True, activation_fn=["relu", "swiglu"], **LIMITED),
    # Free experts, which beside a gate's own ones have no capacity.
    *grid(strata=["8", "2-2-2-2"], null_experts=3, **FREE),
    *grid(strata="8", copy_experts=2, constant_experts=3, **FREE),
    *grid(strata="4-4", copy_experts=1, constant_experts=2, null_experts=2, **FREE),
    *grid(strata="4", copy_experts=3, **FREE),
    # Scores.
    *grid(strata="8", top_k=1, balance="bias", bias_step=0.05, capacity_factor=0.0),
    *grid(strata=["4-4", "2-2-2-2"], balance="bias", bias_step=0.05, capacity_factor=0.0, **PADDED),
    *grid(strata=["8", "4-4"], top_k=[2, 3], scores="sigmoid", capacity_factor=0.0),
    *grid(strata=["2-6", "8"], top_k=[1, 2], scores="sigmoid", balance="bias", bias_step=0.05),
    *grid(strata=["8", "4-4"], gate_residual="layers", null_experts=[0, 2], **LIMITED),
    *grid(strata="3-3-3", gate_residual="strata", constant_experts=[0, 1], **LIMITED),
    *grid(strata="5", chain=3, gate_residual="strata", null_experts=[0, 2], **LIMITED),
    # No tokens.
    *grid(strata="2-2-2-2", stacked=True, padding="all"),
    *grid(strata=["8", "2-2-2-2"], norms="released", top_k=1, padding="all"),
    *grid(strata="3-3-3", gate_residual="strata", constant_experts=1, padding="all"),
    # Other gates.
    *grid(
        strata=["8", "4-4", "1-1-1"],
        gate="top-p",
        top_p=[0.4, 0.8, 1.0],
        capacity_factor=[0.0, 1.0],
    ),
    *grid(
        strata=["8", "4-4"],
        gate=["relu", "threshold"],
        top_k=[2, 3],
        capacity_factor=[0.0, 1.0],
        **PADDED,
    ),
    *grid(strata="1-1-1", gate=["relu", "threshold"], top_k=1),
    *grid(
        strata=["1", "4"],
        gate="depths",
        capacity_factor=[0.125, 0.5, 2.0],
        training=MODES,
        **PADDED,
    ),
    *grid(strata="8", gate="hash", training=MODES),
    *grid(strata="8", gate="hash-topk", top_k=[1, 2, 3], capacity_factor=0.7, training=MODES),
    *grid(strata=["2", "4", "5"], gate="base", training=MODES, **PADDED),
    *grid(
        strata="8", gate="expert-choice", capacity_factor=[0.7, 2.0, 8.0], training=MODES, **PADDED
    ),
    *grid(
        strata="8",
        gate="expert-choice",
        capacity_factor=0.7,
        eval_capacity_factor=1.0,
        training=False,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_plain_loops(case):
    """Gates that learn from counts also after an update."""
    x, mask = make_input(case["padding"], SENTENCES)
    options = {name: value for name, value in case.items() if name not in ("padding", "training")}
    block = make_block(**options).train(case.get("training", True))
    columns = block.strata.num_experts + block.stats_builder.free_experts
    given = {"ids": IDS.view(SENTENCES), "gate_logits": torch.randn(*SENTENCES, columns).double()}
    stats = assert_agrees(block, x, mask, **given)
    if stats.observed is not None:
        block.end_update(block.train()(x, mask, **given)[1].observed)
        assert_agrees(block.train(case.get("training", True)), x, mask, **given)


@pytest.mark.parametrize("name, normalization", [("Olmoe", "none"), ("Qwen3Moe", "before-drop")])
def test_gated_experts_are_those_of_transformers(name, normalization):
    """A vanilla layer without norm and biases, the weights copied."""
    folder = {"Olmoe": "olmoe", "Qwen3Moe": "qwen3_moe"}[name]
    module = pytest.importorskip(f"transformers.models.{folder}.modeling_{folder}")
    config = getattr(module, f"{name}Config")(
        hidden_size=D,
        intermediate_size=F,
        moe_intermediate_size=F,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=normalization != "none",
    )
    theirs = getattr(module, f"{name}SparseMoeBlock")(config)
    ours = StratifiedMoE(
        D, F, "8", top_k=3, activation_fn="swiglu", gate_normalization=normalization
    )
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    with torch.no_grad():
        ours.experts.w1.copy_(theirs.experts.gate_up_proj)
        ours.experts.w2.copy_(theirs.experts.down_proj)
        ours.experts.b1.zero_()
        ours.experts.b2.zero_()
        ours.gates[0].weight.copy_(theirs.gate.weight)
        x = torch.randn(2, 7, D)
        want = theirs(ours.layer_norms[0](x))
        assert torch.allclose(ours.eval()(x)[0] - x, want, atol=1e-5)


def test_norms_of_the_released_code_leave_a_skipped_batch_in_scale():
    """Gating dropout skips gates and experts, not the norm that all tokens leave by."""
    x, mask = make_input("some")
    block = make_block("2-2", norms="released", gating_dropout=0.999)
    torch.manual_seed(0)
    y, stats = block(5 * x, mask)
    assert not stats.requested_capacity.any()
    assert torch.allclose(y[~mask], block.layer_norms[-1](5 * x)[~mask])
    assert torch.equal(y[mask], 5 * x[mask])


def test_dropout_of_the_layer_is_of_all_that_it_adds(execution):
    x, mask = make_input("some")
    options = {"dropout": 0.25, "dropout_per": "layer", "execution": execution}
    block = make_block("2-2-2-2", capacity_factor=0, **options)
    added = block.eval()(x, mask)[0] - x
    with_dropout = block.train()(x, mask)[0] - x
    left_out = with_dropout.isclose(torch.zeros(()).double())
    assert torch.allclose(with_dropout[~left_out], added[~left_out] / 0.75)
    assert 0.1 < left_out[~mask].double().mean() < 0.4 and left_out[mask].all()


@pytest.mark.parametrize(
    "mask",
    [
        torch.zeros(3, 2, dtype=torch.bool),  # fairseq's order of the dimensions
        torch.zeros(2, 4, dtype=torch.bool),
        torch.zeros(2, 3),
    ],
    ids=["transposed", "longer", "float"],
)
def test_a_mask_of_another_shape_or_type_is_named(mask):
    block = StratifiedMoE(8, 16, strata="2-2")
    words = r"padding_mask is torch\.\w+ of shape .*: expected torch.bool of shape \(2, 3\)"
    with pytest.raises(ValueError, match=words):
        block(torch.randn(2, 3, 8), mask)
    with pytest.raises(ValueError, match="tuple"):  # as a block of torch.nn.Sequential would get
        block((torch.randn(2, 3, 8), None))


def test_moving_average_of_a_block_that_stays_is_the_block():
    """torch also averages buffers, and truncates averages of integers."""
    block = make_block("2-2-2-2")
    average = AveragedModel(block, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for _ in range(20):
        average.update_parameters(block)
    x, _ = make_input()
    torch.testing.assert_close(average.eval()(x)[0], block.eval()(x)[0])


@pytest.mark.parametrize("assign", [True, False])
def test_a_block_that_was_made_on_the_meta_device(assign):
    block = make_block("2-2").eval()
    with torch.device("meta"):
        made = StratifiedMoE(D, F, "2-2").double().eval()
    if not assign:
        made.to_empty(device="cpu")
    made.load_state_dict(block.state_dict(), assign=assign)
    x, mask = make_input()
    torch.testing.assert_close(made(x, mask)[0], block(x, mask)[0])


@pytest.mark.parametrize("capacity_factor", [0.0, 1.0])
@pytest.mark.parametrize("strata", ["8", "2-2-2-2"])
def test_grouped_products_equal_one_product_per_expert(strata, capacity_factor):
    """float32, where the path for accelerators takes `grouped_mm` on CPU too."""
    block = StratifiedMoE(D, 8, strata, capacity_factor=capacity_factor, second_expert_policy="all")
    x, mask = make_input("some")
    x = x.detach().float().requires_grad_()
    params = dict(block.named_parameters())
    outputs = {}
    for execution in ("per-expert", "grouped"):
        block.execution = execution
        y, stats = block(x, mask)
        outputs[execution] = y, stats, gradients(y, stats.balance_loss, x, params)
    (y, stats, grads), (grouped_y, grouped_stats, grouped_grads) = outputs.values()
    assert can_group(block.experts.w1, torch.float32) or not torch_features.grouped_mm
    assert torch.allclose(y, grouped_y, atol=1e-5)
    for a, b in zip(stats, grouped_stats, strict=True):
        assert a is b is None or torch.allclose(a, b)
    for name in grads:
        assert torch.allclose(grads[name], grouped_grads[name], atol=1e-4), name


@pytest.mark.parametrize("before", ["gradients of the inputs", "interruption"])
def test_what_was_before_a_backward_pass_leaves_nothing_behind(before, execution):
    """The gradients are those of one pass, not of two."""
    x, mask = make_input("some")
    block = make_block("2-2-2-2", capacity_factor=0, execution=execution)
    params = dict(block.named_parameters())
    y, stats = block(x, mask)
    want = gradients(y, stats.balance_loss, x, params)

    y, stats = block(x, mask)
    total = objective(y, stats.balance_loss)
    if before == "interruption":
        handle = block.gates[0].weight.register_hook(lambda grad: 1 / 0)  # after experts' products
        with pytest.raises(ZeroDivisionError):
            total.backward(retain_graph=True)
        handle.remove()
        block.zero_grad()
        x.grad = None
    else:
        (x_grad,) = torch.autograd.grad(total, x, retain_graph=True)
        assert torch.allclose(x_grad, want["x"])
    total.backward()
    assert torch.allclose(x.grad, want["x"])
    for name, parameter in params.items():
        assert torch.allclose(parameter.grad, want[name].expand_as(parameter)), name


@pytest.mark.parametrize("types", ["bfloat16", "autocast"])
def test_recomputation_takes_the_way_of_the_first_pass(types, execution):
    """Reentrant checkpointing computes without gradients first, and with them again: the same bits."""
    torch.manual_seed(0)
    block = StratifiedMoE(16, 32, "4-4-4-4", second_expert_policy="all", execution=execution)
    x, passes = torch.randn(16384, 16), []

    def run(x):
        y, stats = block(x)
        passes.append([y.detach(), stats.requested_capacity, stats.first_choices])
        return y

    if types == "bfloat16":
        block, x = block.bfloat16(), x.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=types == "autocast"):
        y = checkpoint(run, x.requires_grad_(), use_reentrant=True)
    y.float().sum().backward()
    for first, again in zip(*passes, strict=True):
        assert torch.equal(first, again)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("name", ["relu", "gelu", "SiLU", "PReLU", "swiglu", "reglu"])
def test_gradient_of_the_activation(name, dropout, execution):
    """By finite differences, of the activation's parameters too, which all experts share."""
    torch.manual_seed(0)
    function = {"SiLU": torch.nn.SiLU(inplace=True), "PReLU": torch.nn.PReLU()}.get(name, name)
    block = StratifiedMoE(
        *(4, 6, "2-2"), activation_fn=function, capacity_factor=0.0, second_expert_policy="all"
    ).double()
    block.execution, block.experts.activation_dropout = execution, dropout
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)

    def run(x, *parameters):
        torch.manual_seed(1)
        return block(x)[0]

    assert torch.autograd.gradcheck(run, (x, *block.experts.parameters()), fast_mode=True)


@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("function", ["swiglu", "PReLU"])
def test_inner_sizes_of_any_number_and_experts_without_tokens(function, tokens, execution):
    """torch's grouped product takes the first matrices of gated experts of 6, not the second ones."""
    function = torch.nn.PReLU() if function == "PReLU" else function
    block = StratifiedMoE(16, 6, "2-2", activation_fn=function, execution=execution)
    y, stats = block(torch.randn(tokens, 16, requires_grad=True))
    (y.sum() + stats.balance_loss).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in block.parameters())


def test_frozen_experts_get_no_gradient(execution):
    x, mask = make_input("some")
    block = make_block("4-4", capacity_factor=0, execution=execution)
    y, stats = block(x, mask)
    want = gradients(y, stats.balance_loss, x, dict(block.named_parameters()))
    block.experts.requires_grad_(False)
    learning = {n: p for n, p in block.named_parameters() if p.requires_grad}
    y, stats = block(x, mask)
    assert not block.experts.w1.requires_grad
    for name, got in gradients(y, stats.balance_loss, x, learning).items():
        assert torch.allclose(got, want[name]), name


def test_second_derivatives_are_refused(execution):
    """They would lack what goes through the experts' weights; where torch differentiates, they are right."""
    if execution == "grouped" and torch_features.grouped_mm is None:
        pytest.skip("torch has no grouped product")
    block = StratifiedMoE(D, 8, "4-4", capacity_factor=0, execution=execution)
    y, _ = block(torch.randn(5, D))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(y.square().sum(), [block.experts.w1], create_graph=True)


@pytest.mark.parametrize(
    "options",
    [
        {"gate": "top-p", "top_p": 0.3},
        {"top_k": 3, "null_experts": 2},
        {"eval_capacity_factor": 0.6},
        {"gate": "expert-choice"},
    ],
    ids=str,
)
def test_a_token_that_is_no_number_spoils_no_other_sentence(options, execution):
    """Copies without an expert are together in a row."""
    torch.manual_seed(0)
    block = StratifiedMoE(D, 8, "4", execution=execution, **options).eval()
    x = torch.randn(4, 6, D)
    x[3, 5] = math.nan
    with torch.no_grad():
        y, _ = block(x)
    assert y[:3].isfinite().all() and y[3, 5].isnan().all()


def test_an_operation_in_place_keeps_the_hooks_of_the_output():
    """Such as those of `fully_shard`; a view would lose them."""
    seen, (x, mask) = [], make_input("some")
    y, _ = make_block("2-2")(x, mask)
    y.register_hook(seen.append)
    y += 1
    y.sum().backward()
    assert len(seen) == 1
