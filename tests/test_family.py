"""The wider family of gates and options, each against plain loops in float64; see test_block.py."""

import math

import pytest
import reference_gates
import torch
from reference import reference
from test_block import PADDING, D, F, T, gradients, make_block, make_input

from smoe_fairseq.modules import StratifiedMoE
from smoe_fairseq.modules.gates.base import balanced_assignment

EXECUTIONS = pytest.mark.parametrize("execution", ["per-expert", "grouped"])
PADDED = pytest.mark.parametrize("padding", PADDING)
IDS = torch.arange(T) * 5 % 7
TABLE = torch.tensor([3, 0, 7, 3, 1, 6, 2])


def assert_agrees(block, x, mask, ids=None, gate_logits=None, **options):
    """Outputs, gradients, losses and statistics."""
    params = dict(block.named_parameters())
    every = {**params, **dict(block.named_buffers())}
    if options.get("gate") in ("threshold", "depths"):
        values = {f"gates.{i}.thresholds": g.threshold.value() for i, g in enumerate(block.gates)}
        every |= {name: value.tolist() for name, value in values.items()}
    flat, padding = x.reshape(-1, D), mask.reshape(-1)
    ids_T = None if ids is None else ids.reshape(-1).tolist()
    want = reference(every, str(block.strata), flat, padding, ids=ids_T, **options)
    want_y, want_loss, want_rc, want_dropped, _ = want
    want_gradients = gradients(want_y.view_as(x), want_loss, x, params)
    y, stats = block(x, mask, ids=ids, gate_logits=gate_logits)
    assert torch.allclose(y.reshape(-1, D), want_y, rtol=1e-10, atol=1e-10)
    assert torch.allclose(stats.balance_loss, want_loss, rtol=1e-10)
    assert torch.equal(stats.requested_capacity.reshape(-1), want_rc)
    assert stats.first_choices.sum() == want_rc.sum()
    assert int(stats.dropped.sum()) == len(want_dropped)
    want_of_token = torch.zeros_like(stats.dropped_choices).view(T, -1)
    for _, t, k in want_dropped:
        want_of_token[t, k] += 1
    assert torch.equal(stats.dropped_choices.view(T, -1), want_of_token)
    assert torch.equal(y[mask], x[mask])
    for name, got in gradients(y, stats.balance_loss, x, params).items():
        assert torch.allclose(got, want_gradients[name].expand_as(got), atol=1e-9), name
    return stats


def family_block(strata, execution, **options):
    block = make_block(strata, **{"capacity_factor": 0.0, **options})
    block.execution = execution
    return block


@PADDED
@EXECUTIONS
@pytest.mark.parametrize("normalization", ["after-drop", "before-drop"])
@pytest.mark.parametrize("strata, top_k", [("8", 3), ("8", 8), ("2-2-4", 3), ("3-3-3", 3)])
def test_more_than_two_experts(strata, top_k, normalization, execution, padding):
    x, mask = make_input(padding)
    for factor in (0.0, 1.0):
        options = {"top_k": top_k, "capacity_factor": factor}
        block = family_block(strata, execution, gate_normalization=normalization, **options)
        stats = assert_agrees(block, x, mask, normalization=normalization, **options)
        assert stats.chosen.shape == (len(block.gates), top_k)


@PADDED
@EXECUTIONS
@pytest.mark.parametrize("normalization", ["after-drop", "none"])
@pytest.mark.parametrize("chain, top_k", [(1, 2), (2, 1), (3, 2)])
def test_chain_of_experts(chain, top_k, normalization, execution, padding):
    """Every token stops at every gate, each of which sees all experts."""
    x, mask = make_input(padding)
    for factor in (0.0, 1.0):
        options = {"top_k": top_k, "capacity_factor": factor, "chain": chain}
        block = family_block("5", execution, gate_normalization=normalization, **options)
        stats = assert_agrees(block, x, mask, normalization=normalization, **options)
        assert torch.equal(stats.requested_capacity, chain * (~mask).long())
        assert stats.first_choices.sum(1).tolist() == [int((~mask).sum())] * chain
        assert block.experts.w1.shape[0] == 5 and len(block.layer_norms) == chain


@pytest.mark.parametrize("length", [1, 3])
def test_a_chain_is_vanilla_layers_that_share_their_experts(length):
    """Of one, it is the vanilla layer."""
    x, mask = make_input("some")
    chain = make_block("8", chain=length)
    want, losses = x, []
    for i in range(length):
        layer = make_block("8")
        layer.experts = chain.experts
        layer.gates[0].load_state_dict(chain.gates[i].state_dict())
        layer.layer_norms[0].load_state_dict(chain.layer_norms[i].state_dict())
        want, stats = layer(want, mask)
        losses.append(stats.balance_loss)
    y, stats = chain(x, mask)
    assert torch.allclose(y, want, rtol=1e-12, atol=1e-12)
    assert torch.allclose(stats.balance_loss, sum(losses) / length)
    if length == 1:
        assert chain.state_dict().keys() == layer.state_dict().keys()


@EXECUTIONS
@pytest.mark.parametrize(
    "strata, options", [("4", {"chain": 3}), ("4-0-4", {}), ("4", {"gate_residual": "layers"})]
)
def test_a_batch_without_rows(strata, options, execution):
    block = family_block(strata, execution, **options)
    x = torch.zeros(0, D, dtype=torch.float64, requires_grad=True)
    y, stats = block(x)
    (y.sum() + stats.balance_loss).backward()
    assert y.shape == x.shape and float(stats.balance_loss) == 0 and not stats.first_choices.any()


@PADDED
@EXECUTIONS
@pytest.mark.parametrize("strata, top_k", [("4-0-4", 2), ("0-5", 3), ("2-0-0-3", 1)])
def test_strata_without_experts(strata, top_k, execution, padding):
    """Their gates see later experts alone; the gate behind them is never reached."""
    x, mask = make_input(padding)
    for factor in (0.0, 1.0):
        options = {"top_k": top_k, "capacity_factor": factor}
        block = family_block(strata, execution, **options)
        stats = assert_agrees(block, x, mask, **options)
        sizes = block.strata.sizes
        reached = stats.first_choices.sum(1) > 0
        assert not any(reached[i + 1] for i, size in enumerate(sizes[:-1]) if size == 0)


def test_further_experts_are_drawn_without_replacement():
    """One of six pairs beside the first expert: by the scores, as one is drawn after the other."""
    torch.manual_seed(0)
    gate = StratifiedMoE(D, F, "5", top_k=3, capacity_factor=0).double().gates[0]
    x = torch.randn(1, D, dtype=torch.float64)
    probs = gate.logits(x)[0].softmax(0).tolist()
    draws = 20_000
    first, second, third = gate(x.expand(draws, D)).expert_TK.unbind(1)
    top = max(range(5), key=lambda e: probs[e])
    assert (first == top).all() and (second != third).all()
    for a in range(5):
        for b in range(5):
            if top in (a, b) or a == b:
                continue
            want = probs[a] / (1 - probs[top]) * probs[b] / (1 - probs[top] - probs[a])
            got = ((second == a) & (third == b)).double().mean()
            assert abs(float(got) - want) < 0.015


@PADDED
@EXECUTIONS
@pytest.mark.parametrize("strata", ["8", "4-4", "2-2-2-2"])
@pytest.mark.parametrize("normalization", ["after-drop", "before-drop", "none"])
def test_null_experts(normalization, strata, execution, padding):
    x, mask = make_input(padding)
    options = {"top_k": 3, "capacity_factor": 1.0}
    block = family_block(
        strata, execution, gate_normalization=normalization, null_experts=3, **options
    )
    stats = assert_agrees(block, x, mask, normalization=normalization, **options)
    if padding != "all":
        true = stats.asked[:, :-3].sum()
        assert 0 < true < 3 * stats.requested_capacity.sum()  # some are null, not all
        assert torch.equal(stats.chosen.sum().double(), true)


@PADDED
@EXECUTIONS
@pytest.mark.parametrize("normalization", ["after-drop", "before-drop", "none"])
@pytest.mark.parametrize(
    "strata, null, copies, constants",
    [("8", 0, 2, 3), ("4-4", 2, 1, 2), ("2-2-2", 1, 0, 2), ("4", 0, 3, 0)],
)
def test_copy_and_constant_experts(
    strata, null, copies, constants, normalization, execution, padding
):
    """``E(x) = x`` and ``E(x) = softmax(W_c x) . [x; v]``, beside null experts and without."""
    x, mask = make_input(padding)
    options = {"top_k": 3, "capacity_factor": 1.0}
    kinds = {"null_experts": null, "copy_experts": copies, "constant_experts": constants}
    block = family_block(strata, execution, gate_normalization=normalization, **options, **kinds)
    stats = assert_agrees(block, x, mask, normalization=normalization, copies=copies, **options)
    if padding != "all":
        free = null + copies + constants
        assert (
            0 < stats.asked[:, :-free].sum() == stats.chosen.sum() < 3 * stats.first_choices.sum()
        )


@PADDED
@EXECUTIONS
@pytest.mark.parametrize("free", [{}, {"null_experts": 2}, {"constant_experts": 1}])
@pytest.mark.parametrize(
    "strata, chain, residual",
    [("8", 1, "layers"), ("4-4", 1, "layers"), ("3-3-3", 1, "strata"), ("5", 3, "strata")],
)
def test_gate_residual(strata, chain, residual, free, execution, padding):
    """Each gate adds a map of the logits of the last one that the token saw."""
    x, mask = make_input(padding)
    options = {"top_k": 2, "capacity_factor": 1.0, "chain": chain}
    block = family_block(strata, execution, gate_residual=residual, **options, **free)
    columns = block.strata.num_experts + sum(free.values())
    given = torch.randn(*x.shape[:-1], columns, dtype=torch.float64)
    earlier = list(given.view(T, -1)) if residual == "layers" else [torch.zeros(columns)] * T
    assert_agrees(block, x, mask, gate_logits=given, earlier=earlier, **options)
    assert (block.gates[0].residual_weight is None) == (residual == "strata")
    y, stats = block(x, mask)  # without logits of an earlier layer: as with zeros
    again, _ = block(x, mask, gate_logits=torch.zeros_like(given))
    assert torch.equal(y, again)
    if residual == "layers":
        seen = stats.gate_logits[~mask]
        h = torch.nn.functional.layer_norm(x[~mask], (D,), *_norm(block))
        rows = [getattr(block.gates[0], f"{n}weight", None) for n in ("", "simple_", "null_")]
        rows = torch.cat([each for each in rows if each is not None])
        assert torch.allclose(seen, h @ rows.T) and not stats.gate_logits[mask].any()
    else:
        assert stats.gate_logits is None


def test_a_gate_residual_begins_at_0():
    """So that a new block routes as one without it, draw for draw."""
    torch.manual_seed(1)
    plain = StratifiedMoE(D, F, "4-4")
    torch.manual_seed(1)
    block = StratifiedMoE(D, F, "4-4", gate_residual="layers")
    x = torch.randn(T, D)
    assert torch.equal(block.eval()(x, gate_logits=torch.randn(T, 8))[0], plain.eval()(x)[0])
    assert not any(gate.residual_weight.any() for gate in block.gates)


@PADDED
@EXECUTIONS
@pytest.mark.parametrize("strata", ["8", "4-4", "1-1-1"])
@pytest.mark.parametrize("top_p, factor", [(0.4, 0.0), (0.8, 1.0), (1.0, 0.0)])
def test_top_p(top_p, factor, strata, execution, padding):
    x, mask = make_input(padding)
    block = family_block(strata, execution, gate="top-p", top_p=top_p, capacity_factor=factor)
    options = {"gate": "top-p", "top_p": top_p, "capacity_factor": factor}
    stats = assert_agrees(block, x, mask, **options)
    params = dict(block.named_parameters())
    entropy = []
    if strata == "8":
        for row in x[~mask]:
            h = torch.nn.functional.layer_norm(row, (D,), *_norm(block))
            p = (params["gates.0.weight"] @ h).softmax(0)
            entropy.append(-(p * p.log()).sum())
        want = sum(entropy) / max(len(entropy), 1)
        assert torch.allclose(stats.entropy, torch.as_tensor(want).double())


def _norm(block):
    return block.layer_norms[0].weight, block.layer_norms[0].bias


@PADDED
@EXECUTIONS
@pytest.mark.parametrize("strata, top_k", [("8", 2), ("4-4", 3), ("1-1-1", 1)])
@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_relu(factor, strata, top_k, execution, padding):
    x, mask = make_input(padding)
    options = {"top_k": top_k, "capacity_factor": factor}
    block = family_block(strata, execution, gate="relu", **options)
    for gate in block.gates:
        gate.coefficient.steps += 100
    stats = assert_agrees(block, x, mask, gate="relu", **options)
    real = x[~mask]
    if padding != "all":
        assert 0 < stats.chosen.sum() < stats.first_choices.sum() * block.choices
    if strata == "8" and padding != "all":
        params = dict(block.named_parameters())
        inputs = torch.nn.functional.layer_norm(real, (D,), *_norm(block))
        stats = block(x, mask)[1]
        want = 1e-8 * 1.2**100 * reference_gates.relu_l1(params, 0, inputs, top_k)
        assert torch.allclose(stats.l1, want, rtol=1e-4)
        weight = params["gates.0.weight"]
        got, want = (
            torch.autograd.grad(loss, weight, retain_graph=True)[0] for loss in (stats.l1, want)
        )
        assert torch.allclose(got, want, rtol=1e-4)
    elif padding == "all":
        assert float(stats.l1.detach()) == 0


def test_the_l1_coefficient_goes_towards_the_goal():
    """By 1.2, once per update, by the mean over all strata; the number of experts follows by gradient."""
    block = make_block("4-4", gate="relu", top_k=2)
    for copies, first, second in (([9, 8], 4, 4), ([9, 8], 5, 4), ([8, 8], 4, 4), ([1, 1], 4, 4)):
        block.end_update(torch.tensor([[copies[0], first], [copies[1], second]]))
        want = {9: 1, 1: -1, 8: 0}[copies[0]] if first == 4 else -1
        assert [int(gate.coefficient.steps) for gate in block.gates] == [want] * 2
        for gate in block.gates:
            assert float(gate.coefficient.value()) == pytest.approx(1e-8 * 1.2**want)
            gate.coefficient.steps.zero_()
    for _ in range(1000):
        block.end_update(torch.tensor([[9, 1], [9, 1]]))
    assert block.gates[0].coefficient.value().isfinite()

    block = make_block("8", gate="relu", top_k=2, capacity_factor=0.0)
    block.gates[0].coefficient.steps += 80
    x = torch.randn(64, D, dtype=torch.float64)
    want, _ = block(x)
    descent, seen = torch.optim.Adam(block.gates.parameters(), lr=0.01), []
    for _ in range(200):
        y, stats = block(x)
        descent.zero_grad()
        ((y - want.detach()).square().mean() + stats.l1).backward()
        descent.step()
        block.end_update(stats.observed)
        seen.append(float(stats.chosen.sum()) / 64)
    assert seen[0] > 3 and sum(seen[-50:]) / 50 == pytest.approx(2, abs=0.3)


@PADDED
@EXECUTIONS
@pytest.mark.parametrize("strata, top_k", [("8", 2), ("4-4", 3), ("1-1-1", 1)])
@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_threshold(factor, strata, top_k, execution, padding):
    """Before the first update thresholds are 0, then scores of that rank, by batch and active tokens."""
    x, mask = make_input(padding)
    options = {"top_k": top_k, "capacity_factor": factor, "gate": "threshold"}
    block = family_block(strata, execution, **options)
    stats = assert_agrees(block, x, mask, **options)
    block.end_update(stats.observed)
    if padding == "all":
        assert not any(gate.threshold.value().any() for gate in block.gates)
    elif strata == "8":
        params = dict(block.named_parameters())
        inputs = torch.nn.functional.layer_norm(x[~mask], (D,), *_norm(block))
        for row, found in zip(params["gates.0.weight"], block.gates[0].threshold.value()):
            scores = [float(row.detach() @ token.detach()) for token in inputs]
            want = reference_gates.score_of_rank(scores, 8, top_k)
            assert float(found) == pytest.approx(want, abs=2**-16)
    stats = assert_agrees(block, x, mask, **options)
    if strata == "8" and factor == 0 and padding != "all":
        tokens = int((~mask).sum())
        assert stats.asked is None and int(stats.chosen.sum()) == 8 * round(top_k * tokens / 8)


def test_thresholds_are_means_over_batches_and_updates():
    """By tokens over the batches of an update, by the step over updates; none without tokens."""
    block = make_block("4", gate="threshold", top_k=1, threshold_step=0.25)
    threshold = block.gates[0].threshold
    batches = [torch.randn(n, D, dtype=torch.float64) for n in (8, 24)]
    found = [block(x)[1].observed for x in batches]
    units = [observed[0, :4] / observed[0, 4] * 2**-16 for observed in found]
    block.end_update(sum(found))
    first = (8 * units[0] + 24 * units[1]) / 32
    assert torch.allclose(threshold.value().double(), first.double(), atol=1e-4)
    block.end_update(found[0])
    want = first + 0.25 * (units[0] - first)
    assert torch.allclose(threshold.value().double(), want.double(), atol=1e-4)
    block.end_update(torch.zeros_like(found[0]))
    assert torch.allclose(threshold.value().double(), want.double(), atol=1e-4)
    assert block.half().gates[0].threshold.steps.dtype == torch.long  # as exact as before


@PADDED
@EXECUTIONS
@pytest.mark.parametrize("strata, factor", [("1", 0.5), ("1", 0.125), ("4", 1.5), ("1", 2.0)])
def test_mixture_of_depths(strata, factor, execution, padding):
    """``x + r f(x)`` for the best tokens of each sentence, in evaluation for those above a threshold."""
    x, mask = make_input(padding)
    x, mask = x.detach().view(3, 6, D).requires_grad_(), mask.view(3, 6)
    sentences = torch.arange(3).repeat_interleave(6).tolist()
    options = {"gate": "depths", "sentences": sentences, "factor": factor}
    block = family_block(strata, execution, gate="depths", top_k=1, capacity_factor=factor)
    experts = block.strata.num_experts
    stats = assert_agrees(block, x, mask, training=True, **options)
    if padding == "none":
        assert int(stats.chosen.sum()) == 3 * experts * min(math.ceil(factor * 6 / experts), 6)
    block.end_update(stats.observed)
    block.eval()
    stats = assert_agrees(block, x, mask, training=False, **options)
    if padding == "none":  # as many in all, and no token depends on another one
        assert int(stats.chosen.sum()) == experts * min(round(factor * T / experts), T)
        for one in ((slice(1), slice(2)), (0, slice(3)), (2, 4)):
            assert torch.allclose(block(x)[0][one], block(x[one])[0], atol=1e-12)


@PADDED
@EXECUTIONS
@pytest.mark.parametrize("training", [True, False])
def test_hash(training, execution, padding):
    x, mask = make_input(padding)
    block = family_block("8", execution, gate="hash", hash_table=TABLE).train(training)
    stats = assert_agrees(block, x, mask, ids=IDS, gate="hash")
    assert "gates.0.table" in block.state_dict() and not list(block.gates.parameters())
    assert float(stats.z_loss) == 0


@PADDED
@EXECUTIONS
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("top_k, normalization", [(1, "none"), (2, "after-drop"), (3, "none")])
def test_the_first_by_hash(top_k, normalization, training, execution, padding):
    x, mask = make_input(padding)
    options = {"top_k": top_k, "gate": "hash-topk", "capacity_factor": 0.7 if training else 0}
    given = {"hash_table": TABLE, "gate_normalization": normalization} | options
    block = family_block("8", execution, **given).train(training)
    assert_agrees(
        block, x, mask, ids=IDS, normalization=normalization, training=training, **options
    )


@PADDED
@EXECUTIONS
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("strata", ["2", "4", "5"])
def test_base(strata, training, execution, padding):
    """18 tokens, or 14: a multiple of 2, of neither 4 nor 5."""
    x, mask = make_input(padding)
    block = family_block(strata, execution, gate="base").train(training)
    stats = assert_agrees(block, x, mask, gate="base", training=training)
    real, experts = int((~mask).sum()), int(strata)
    loads = stats.first_choices[0]
    if training:
        assert loads.max() - loads.min() == (1 if real % experts else 0)


@PADDED
@EXECUTIONS
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("factor, eval_factor", [(2.0, 0.0), (0.7, 1.0), (8.0, 0.0)])
def test_expert_choice(factor, eval_factor, training, execution, padding):
    x, mask = make_input(padding)
    x, mask = x.detach().view(3, 6, D).requires_grad_(), mask.view(3, 6)
    block = family_block(
        *("8", execution),
        gate="expert-choice",
        capacity_factor=factor,
        eval_capacity_factor=eval_factor,
    ).train(training)
    stats = assert_agrees(
        block,
        x,
        mask,
        gate="expert-choice",
        training=training,
        factor=factor if training else eval_factor or factor,
        sentences=[t // 6 for t in range(T)],
    )
    if factor == 0.7 and training and padding == "none":
        assert (
            stats.chosen.sum() < T
        )  # the case is what it claims to be: some tokens have no expert


@EXECUTIONS
@pytest.mark.parametrize("gate", ["topk", "base"])
@pytest.mark.parametrize("beside", ["residual", "shared_experts", "both"])
def test_networks_beside_the_experts(beside, gate, execution):
    """With experts of another width than the residual network; the shared ones are as wide as experts."""
    x, mask = make_input("some")
    options = {"residual": beside != "shared_experts", "expert_ffn_dim": 4}
    options |= {"shared_experts": 0 if beside == "residual" else 3, "top_k": 1}
    block = family_block("4", execution, gate=gate, **options)
    assert_agrees(block, x, mask, gate=gate, top_k=1)
    widths = {n: p.shape[0] for n, p in block.named_parameters() if n.endswith("fc1.weight")}
    want = {"residual": {"residual.fc1.weight": F}, "shared_experts": {"shared.fc1.weight": 12}}
    assert widths == want.get(beside, {**want["residual"], **want["shared_experts"]})
    assert block.experts.w1.shape == (4, 4, D)


@PADDED
@EXECUTIONS
@pytest.mark.parametrize("strata, top_k", [("8", 1), ("4-4", 2), ("2-2-2-2", 2)])
def test_bias_selects_and_does_not_weigh(strata, top_k, execution, padding):
    x, mask = make_input(padding)
    options = {"top_k": top_k, "balance": "bias", "bias_step": 0.05}
    block = family_block(strata, execution, **options)
    plain = make_block(strata, top_k=top_k, capacity_factor=0.0)
    biases = []
    for i, gate in enumerate(block.gates):
        gate.bias.steps += torch.arange(gate.num_experts) ** 2 % 11 + i
        steps = gate.bias.steps.tolist()
        biases.append([0.05 * (n - sum(steps) / len(steps)) for n in steps])
    plain.load_state_dict({n: v for n, v in block.state_dict().items() if "bias.steps" not in n})
    stats = assert_agrees(block, x, mask, top_k=top_k, bias=biases)
    if padding != "all":
        assert not torch.equal(stats.first_choices, plain(x, mask)[1].first_choices)
    assert torch.equal(stats.observed.sum(1), stats.chosen.sum(1))


@PADDED
@EXECUTIONS
@pytest.mark.parametrize(
    "strata, top_k, biased",
    [("8", 3, True), ("4-4", 2, False), ("2-6", 1, True), ("8", 2, False)],
)
def test_sigmoid_scores(strata, top_k, biased, execution, padding):
    """``s = sigmoid(Wx)``, the best k of ``s + b``, weights ``s / sum s``; the loss of ``s`` over its sum."""
    x, mask = make_input(padding)
    options = {"balance": "bias", "bias_step": 0.05} if biased else {}
    block = family_block(strata, execution, top_k=top_k, scores="sigmoid", **options)
    biases = None
    if biased:
        biases = []
        for i, gate in enumerate(block.gates):
            gate.bias.steps += torch.arange(gate.num_experts) ** 2 % 11 + i
            biases.append(gate.bias.value().double().tolist())
    if (strata, top_k) == ("8", 2):  # scores of about e^-60
        with torch.no_grad():
            block.layer_norms[0].weight[0], block.layer_norms[0].bias[0] = 0.0, 1.0
            block.gates[0].weight[:, 0] = -60.0
    assert_agrees(block, x, mask, top_k=top_k, scores="sigmoid", bias=biases)


def test_bias_goes_towards_those_with_less_than_the_mean():
    block = make_block("2-2", balance="bias", bias_step=0.5)
    asked = torch.tensor([[5, 3, 4, 4], [9, 1, 0, 0]])
    block.end_update(asked)
    assert block.gates[0].bias.steps.tolist() == [-1, 1, 0, 0]
    assert block.gates[1].bias.steps.tolist() == [-1, 1]
    block.end_update(torch.zeros_like(asked))  # an update without tokens
    assert torch.equal(block.gates[1].bias.value(), torch.tensor([-0.5, 0.5]))
    half = block.to(torch.bfloat16)
    for _ in range(300):
        half.end_update(asked)
    assert half.gates[1].bias.value().tolist() == [-150.5, 150.5]


@pytest.mark.parametrize(
    "tokens, experts", [(0, 4), (1, 4), (5, 2), (7, 3), (8, 4), (9, 4), (3, 1)]
)
def test_balanced_assignment_is_the_best(tokens, experts):
    from reference_gates import best_balanced

    torch.manual_seed(tokens)
    for scale in (0, 0.1, 5):  # of what makes one expert better for all
        affinity = torch.randn(tokens, experts).double() + scale * torch.randn(experts)
        found = balanced_assignment(affinity)
        loads = found.bincount(minlength=experts)
        assert loads.max() <= -(-tokens // experts) and loads.min() >= tokens // experts
        want = sum(affinity[t, e] for t, e in enumerate(best_balanced(affinity.tolist())))
        got = affinity.gather(1, found.unsqueeze(1)).sum()
        assert float(got) == pytest.approx(float(want), abs=1e-9)


@pytest.mark.parametrize(
    "affinity",
    [
        torch.zeros(100, 8),
        torch.arange(8.0).expand(100, 8),
        torch.full((100, 8), torch.nan),
        torch.randn(100, 8).masked_fill(torch.rand(100, 8) < 0.1, -torch.inf),
        1e30 * torch.randn(100, 8),
    ],
    ids=["equal", "the same order", "no numbers", "some infinite", "large"],
)
def test_balanced_assignment_of_odd_affinities(affinity):
    assert (
        sorted(balanced_assignment(affinity).bincount(minlength=8).tolist()) == [12] * 4 + [13] * 4
    )
