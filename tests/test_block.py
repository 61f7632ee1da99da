"""The block against the plain loops of reference.py, in float64."""

import math

import pytest
import torch
from reference import reference
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from smoe_fairseq.modules import StratifiedMoE, torch_features
from smoe_fairseq.modules.products import can_group

T, D, F = 18, 8, 6
STRATA = ["8", "4-4", "4-12", "2-2-2-2", "1-1-1"]
PADDING = {"none": [], "some": [0, 7, 16, 17], "all": list(range(T))}


def make_block(strata, **options):
    torch.manual_seed(sum(map(ord, strata)))
    options = {"second_expert_policy": "all", **options}
    block = StratifiedMoE(D, F, strata, **options).double()
    for parameter in block.parameters():  # gates that differ clearly, layer norms that do something
        torch.nn.init.normal_(parameter, std=0.7)
    return block


def make_input(padding="none"):
    torch.manual_seed(7)
    x = torch.randn(T, D, dtype=torch.float64, requires_grad=True)
    mask = torch.zeros(T, dtype=torch.bool)
    mask[PADDING[padding]] = True
    return x, mask


def watch_drops(block):
    """For each gate, the dropped copies {(row among the stratum's tokens, k)} of the next pass."""
    seen = []

    def hook(gate, inputs, routing):
        dropped = (routing.expert_TK == gate.num_experts).nonzero().tolist()
        seen.append({tuple(copy) for copy in dropped})

    for gate in block.gates:
        gate.register_forward_hook(hook)
    return seen


def objective(y, loss):
    """A scalar that every output takes part in, each time with the same weights."""
    torch.manual_seed(3)
    return (y * torch.randn_like(y)).sum() + 0.3 * loss


def gradients(y, loss, x, params):
    found = torch.autograd.grad(objective(y, loss), [x, *params.values()], allow_unused=True)
    names = ["x", *params]
    return {n: x.new_zeros(1) if g is None else g for n, g in zip(names, found, strict=True)}


def expected(block, x, mask, **options):
    """What ``reference`` says, and the gradients of it."""
    params = dict(block.named_parameters())
    y, loss, *others = reference(params, str(block.strata), x, mask, **options)
    return y, loss, *others, gradients(y, loss, x, params)


def assert_agrees(block, x, mask, want=None, **options):
    want = want or expected(block, x, mask, **options)
    params = dict(block.named_parameters())
    drops = watch_drops(block)
    y, stats = block(x, mask)
    want_y, want_loss, want_rc, want_dropped, visits, want_gradients = want
    assert torch.allclose(y, want_y, rtol=1e-10, atol=1e-10)
    assert torch.allclose(stats.balance_loss, want_loss, rtol=1e-10)
    assert torch.equal(stats.requested_capacity, want_rc)
    assert int(stats.dropped.sum()) == len(want_dropped)
    want_of_token = torch.zeros_like(stats.dropped_choices)
    for _, t, k in want_dropped:
        want_of_token[t, k] += 1
    assert torch.equal(stats.dropped_choices, want_of_token)
    if block.execution == "per-expert":
        rows = [(i, row, k) for i, found in enumerate(drops) for row, k in found]
        assert {(i, visits[i][row], k) for i, row, k in rows} == want_dropped
    for name, got in gradients(y, stats.balance_loss, x, params).items():
        assert torch.allclose(got, want_gradients[name].expand_as(got), atol=1e-9), name
    return want_dropped


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("normalization", ["after-drop", "before-drop", "none"])
@pytest.mark.parametrize(  # a gate of 1-1-1 sees one expert at last: two are refused, see below
    "strata, top_k",
    [(strata, k) for strata in STRATA for k in (1, 2) if (strata, k) != ("1-1-1", 2)],
)
def test_agrees_with_plain_loops(strata, top_k, normalization, padding):
    x, mask = make_input(padding)
    dropped = {}
    for factor in (0, 0.5, 1.0, 2.0):
        options = {"top_k": top_k, "capacity_factor": float(factor)}
        block = make_block(strata, gate_normalization=normalization, **options)
        want = expected(block, x, mask, normalization=normalization, **options)
        for execution in ("per-expert", "grouped"):
            block.execution = execution
            dropped[factor] = assert_agrees(block, x, mask, want)
    if padding != "all":
        assert dropped[0.5] and not dropped[0]  # the cases above are what they claim to be


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("execution", ["per-expert", "grouped"])
@pytest.mark.parametrize("strata", ["4-4", "2-2-2-2"])
def test_naive_stacking_agrees_with_plain_loops(strata, execution, padding):
    x, mask = make_input(padding)
    block = make_block(strata, stacked=True, capacity_factor=1.0)
    block.execution = execution
    assert_agrees(block, x, mask, stacked=True, capacity_factor=1.0)
    assert len(block.layer_norms) == 1
    assert [gate.weight.shape[0] for gate in block.gates] == list(block.strata.sizes)


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("execution", ["per-expert", "grouped"])
@pytest.mark.parametrize("gated", ["swiglu", "geglu", "reglu"])
def test_gated_experts_agree_with_plain_loops(gated, execution, padding):
    x, mask = make_input(padding)
    for strata, more in (("4-4", {}), ("4", {"shared_experts": 2, "residual": True})):
        block = make_block(strata, activation_fn=gated, capacity_factor=1.0, **more)
        block.execution = execution
        assert_agrees(block, x, mask, gated=gated, capacity_factor=1.0)
    assert block.experts.w1.shape == (4, 2 * F, D)


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


@pytest.mark.parametrize("execution", ["per-expert", "grouped"])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("strata", ["8", "2-2-2-2"])
def test_order_of_scores_agrees_with_plain_loops(strata, top_k, execution):
    x, mask = make_input("some")
    dropped = {}
    for order in ("sentence", "score"):
        options = {"drop_order": order, "top_k": top_k, "capacity_factor": 0.5}
        block = make_block(strata, **options)
        block.execution = execution
        dropped[order] = assert_agrees(block, x, mask, **options)
    assert dropped["sentence"] != dropped["score"]


def test_random_order_keeps_each_token_as_often():
    """All want expert 0, which takes four of sixteen; over many passes each is kept a quarter of them."""
    torch.manual_seed(0)
    gate = StratifiedMoE(D, F, "8", top_k=1, capacity_factor=2.0, drop_order="random").gates[0]
    torch.nn.init.zeros_(gate.weight)
    kept_T = sum((gate(torch.randn(16, D)).expert_TK[:, 0] == 0).long() for _ in range(2000))
    assert int(kept_T.sum()) == 4 * 2000
    assert (kept_T - 500).abs().max() < 100  # five standard deviations


def test_random_order_draws_nothing_in_evaluation():
    """The same input gives the same output: the tokens of highest score are kept."""
    block = make_block("4-4", drop_order="random", eval_capacity_factor=0.5).eval()
    x, mask = make_input("some")
    outputs = [block(x, mask)[0] for _ in range(2)]
    for gate in block.gates:
        gate.capacity.order = "score"
    for y in outputs:
        assert torch.equal(y, block(x, mask)[0])


@pytest.mark.parametrize("execution", ["per-expert", "grouped"])
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("strata", STRATA)
def test_norms_of_the_released_code_agree_with_plain_loops(strata, padding, execution):
    x, mask = make_input(padding)
    options = {"norms": "released", "top_k": 1, "capacity_factor": 1.0}
    block = make_block(strata, **options)
    block.execution = execution
    assert_agrees(block, x, mask, **options)
    assert len(block.layer_norms) == len(block.gates) + 1


def test_norms_of_the_released_code_leave_a_skipped_batch_in_scale():
    """Gating dropout skips gates and experts, not the norm that all tokens leave by."""
    x, mask = make_input("some")
    block = make_block("2-2", norms="released", gating_dropout=0.999)
    torch.manual_seed(0)
    y, stats = block(5 * x, mask)
    assert not stats.requested_capacity.any()
    assert torch.allclose(y[~mask], block.layer_norms[-1](5 * x)[~mask])
    assert torch.equal(y[mask], 5 * x[mask])


@pytest.mark.parametrize("execution", ["per-expert", "grouped"])
def test_dropout_of_the_layer_is_of_all_that_it_adds(execution):
    x, mask = make_input("some")
    block = make_block("2-2-2-2", capacity_factor=0, dropout=0.25, dropout_per="layer")
    block.execution = execution
    added = block.eval()(x, mask)[0] - x
    with_dropout = block.train()(x, mask)[0] - x
    left_out = with_dropout.isclose(torch.zeros(()).double())
    assert torch.allclose(with_dropout[~left_out], added[~left_out] / 0.75)
    assert 0.1 < left_out[~mask].double().mean() < 0.4 and left_out[mask].all()


def test_evaluation_drops_nothing_and_draws_nothing():
    x, mask = make_input("some")
    block = make_block("2-2-2-2", capacity_factor=0.1, second_expert_policy="sampling").eval()
    dropped = assert_agrees(block, x, mask, capacity_factor=0)
    assert not dropped
    assert torch.equal(block(x, mask)[0], block(x, mask)[0])


def test_evaluation_capacity_factor_limits_evaluation():
    x, mask = make_input("some")
    block = make_block("4-4", capacity_factor=0.0, eval_capacity_factor=0.5).eval()
    assert assert_agrees(block, x, mask, capacity_factor=0.5)


def test_sampled_second_expert_follows_the_scores():
    """The second expert is drawn from the scores of all experts but the first (design, section 2)."""
    torch.manual_seed(0)
    block = StratifiedMoE(D, F, "4", second_expert_policy="sampling").double()
    draws = 20_000
    x = torch.randn(1, D, dtype=torch.float64)
    routing = block.gates[0](x.expand(draws, D))
    probs = block.gates[0].logits(x)[0].softmax(0)
    first = int(probs.argmax())
    assert (routing.first_choice_T == first).all()
    want = probs.clone().index_fill(0, torch.tensor([first]), 0)
    want = want / want.sum()
    block.gates[0].capacity.factor = 0.0
    second = block.gates[0](x.expand(draws, D)).expert_TK[:, 1]
    got = torch.bincount(second, minlength=4) / draws
    assert torch.allclose(got.double(), want, atol=0.015)


def test_random_second_expert_is_taken_by_its_weight():
    torch.manual_seed(0)
    gate = (
        StratifiedMoE(
            D, F, "4", second_expert_policy="random", capacity_factor=0, gate_normalization="none"
        )
        .double()
        .gates[0]
    )
    torch.nn.init.normal_(gate.weight, std=0.8)
    x = torch.randn(1, D, dtype=torch.float64)
    second = gate.logits(x)[0].softmax(0).sort(descending=True).values[1]
    assert 2 * second < 0.9  # otherwise nothing would be left to chance
    routing = gate(x.expand(20_000, D))
    taken = (routing.expert_TK[:, 1] < 4).double().mean()
    assert abs(taken - 2 * second) < 0.015
    assert int(routing.chosen_TK[:, 1].sum()) == int((routing.expert_TK[:, 1] < 4).sum())
    assert not routing.dropped_TK.any()


def test_any_leading_shape_and_uneven_sizes():
    """Sizes that a grouped product cannot take (rows of 16 bytes) work all the same."""
    torch.manual_seed(0)
    block = StratifiedMoE(7, 5, "2-3", second_expert_policy="all").eval()
    x = torch.randn(4, 3, 7)
    y, stats = block(x)
    flat, _ = block(x.reshape(12, 7))
    assert stats.requested_capacity.shape == (4, 3)
    assert torch.allclose(y.reshape(12, 7), flat)


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


def test_state_dict_has_the_contracts_names_and_shapes():
    shapes = {n: tuple(p.shape) for n, p in StratifiedMoE(D, F, "2-4").state_dict().items()}
    assert shapes == {
        "layer_norms.0.weight": (D,),
        "layer_norms.0.bias": (D,),
        "layer_norms.1.weight": (D,),
        "layer_norms.1.bias": (D,),
        "gates.0.weight": (6, D),
        "gates.1.weight": (4, D),
        "experts.w1": (6, F, D),
        "experts.b1": (6, F),
        "experts.w2": (6, D, F),
        "experts.b2": (6, D),
    }


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


def test_sizes_that_cannot_be_are_named():
    for sizes, name in (
        ((0, 4), "embed_dim"),
        ((4, -1), "ffn_embed_dim"),
        ((4 / 2, 4), "embed_dim"),
    ):
        with pytest.raises(ValueError, match=f"^{name} {min(sizes)}"):
            StratifiedMoE(*sizes)


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
    assert can_group(block.experts.w1) or not torch_features.grouped_mm
    assert torch.allclose(y, grouped_y, atol=1e-5)
    for a, b in zip(stats, grouped_stats, strict=True):
        assert a is b is None or torch.allclose(a, b)
    for name in grads:
        assert torch.allclose(grads[name], grouped_grads[name], atol=1e-4), name


@pytest.mark.parametrize("execution", ["per-expert", "grouped"])
def test_a_pass_for_the_inputs_alone_leaves_nothing_behind(execution):
    """`torch.autograd.grad` of x first, then `backward`: the gradients of one pass, not of two."""
    x, mask = make_input("some")
    block = make_block("2-2-2-2", capacity_factor=0)
    block.execution = execution
    params = dict(block.named_parameters())
    y, stats = block(x, mask)
    want = gradients(y, stats.balance_loss, x, params)

    y, stats = block(x, mask)
    total = objective(y, stats.balance_loss)
    (x_grad,) = torch.autograd.grad(total, x, retain_graph=True)
    total.backward()
    assert torch.allclose(x_grad, want["x"]) and torch.allclose(x.grad, want["x"])
    for name, parameter in params.items():
        assert torch.allclose(parameter.grad, want[name].expand_as(parameter)), name


@pytest.mark.parametrize("execution", ["per-expert", "grouped"])
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


@pytest.mark.parametrize("execution", ["per-expert", "grouped"])
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


@pytest.mark.parametrize("execution", ["per-expert", "grouped"])
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


@pytest.mark.parametrize("execution", ["per-expert", "grouped"])
def test_second_derivatives_are_refused(execution):
    """They would lack what goes through the experts' weights; where torch differentiates, they are right."""
    if execution == "grouped" and torch_features.grouped_mm is None:
        pytest.skip("torch has no grouped product")
    block = StratifiedMoE(D, 8, "4-4", capacity_factor=0)
    block.execution = execution
    y, _ = block(torch.randn(5, D))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(y.square().sum(), [block.experts.w1], create_graph=True)


@pytest.mark.parametrize("execution", ["per-expert", "grouped"])
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


def test_an_interrupted_pass_leaves_nothing_behind():
    x, mask = make_input("some")
    block = make_block("2-2-2-2", capacity_factor=0)
    params = dict(block.named_parameters())
    y, stats = block(x, mask)
    want = gradients(y, stats.balance_loss, x, params)

    y, stats = block(x, mask)
    total = objective(y, stats.balance_loss)
    handle = block.gates[0].weight.register_hook(lambda grad: 1 / 0)  # after the experts' products
    with pytest.raises(ZeroDivisionError):
        total.backward(retain_graph=True)
    handle.remove()
    block.zero_grad()
    total.backward()
    for name in ("experts.w1", "experts.b1", "experts.w2", "experts.b2"):
        assert torch.allclose(params[name].grad, want[name]), name
