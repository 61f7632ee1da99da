"""The criterion on the registered model: its loss beside fairseq's, metrics over unequal batches."""

import math

import pytest
import torch
from fairseq import metrics
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss
from fairseq.logging.meters import AverageMeter
from test_model import PAD, make_model, make_task, tiny

from smoe_fairseq.criterions.metrics import routing_sums
from smoe_fairseq.criterions.smoe_label_smoothed_cross_entropy import (
    LabelSmoothedNLL,
    SMoELabelSmoothedCrossEntropyCriterionConfig,
    cmr_budget_loss,
)
from smoe_fairseq.models.transformer import moe_blocks
from smoe_fairseq.modules import StratifiedMoE

ALPHA, EPSILON = 0.5, 0.1


def make_criterion(**options):
    given = {"sentence_avg": False, "label_smoothing": EPSILON, "moe_gate_loss_wt": ALPHA}
    cfg = SMoELabelSmoothedCrossEntropyCriterionConfig(**given | options)
    return CRITERION_REGISTRY["smoe_label_smoothed_cross_entropy"].build_criterion(cfg, make_task())


def make_sample(sentences, length, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, 96, (2, sentences, length), generator=generator)
    tokens[:, 0, length // 2 :] = PAD
    net_input = {
        "src_tokens": tokens[0],
        "src_lengths": tokens[0].ne(PAD).sum(1),
        "prev_output_tokens": tokens[1],
    }
    return {"net_input": net_input, "target": tokens[1], "ntokens": int(tokens[1].ne(PAD).sum())}


def balance_of(stats, *counted) -> float:
    """The loss of one batch's ``stats`` by the first choices of the batches ``counted``, by hand."""
    total = 0
    for layer in (0, 1):
        counts = sum(each[layer].first_choices for each in counted)
        shares = counts / counts.sum(1, keepdim=True)
        visible = torch.tensor([8, 4])
        total = total + (visible * (shares * stats[layer].mean_probs).sum(1)).mean() / 2
    return float(total)


def logged(logging_outputs):
    with metrics.aggregate(new_root=True) as meters:
        make_criterion().reduce_metrics(logging_outputs)
    return {n: m.avg for n, m in meters.items() if isinstance(m, AverageMeter)}


def test_loss_of_a_model_with_an_adaptive_softmax():
    """Its first output is features, from which fairseq's own criterion makes the loss."""
    flags = ["--arch", "transformer_tiny", "--adaptive-softmax-cutoff", "20,50", "--dropout", "0"]
    model = make_model(*flags).eval()
    sample = make_sample(3, 6, seed=1)
    loss, _, _ = make_criterion()(model, sample)
    features, _ = model(**sample["net_input"])
    target = sample["target"].flatten()
    log_probs = model.decoder.adaptive_softmax.get_log_prob(features, None).flatten(0, 1)
    want, _ = label_smoothed_nll_loss(log_probs, target.unsqueeze(1), EPSILON, PAD)
    assert float(loss) == pytest.approx(float(want), rel=1e-5)


def test_loss_of_a_model_whose_extra_output_is_no_dictionary():
    model, sample = make_model("--arch", "lstm", "--dropout", "0").eval(), make_sample(2, 6, seed=1)
    # It expects the longest sentence first.
    sample["net_input"] = {name: each.flip(0) for name, each in sample["net_input"].items()}
    sample["target"] = sample["target"].flip(0)
    loss, _, log = make_criterion()(model, sample)
    log_probs = model.get_normalized_probs(model(**sample["net_input"]), log_probs=True)
    target = sample["target"].flatten().unsqueeze(1)
    want, _ = label_smoothed_nll_loss(log_probs.flatten(0, 1), target, EPSILON, PAD)
    assert float(loss) == pytest.approx(float(want), rel=1e-5)
    assert not any(name.startswith("moe") for name in log)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_loss_and_gradient_are_fairseqs(epsilon, dtype):
    """`fairseq`'s own function differentiates through log_softmax; twice the gradient of a doubled loss."""
    torch.manual_seed(0)
    logits = (3 * torch.randn(12, 96)).to(dtype).requires_grad_()
    target = torch.randint(4, 96, (12,))
    target[[3, 11]] = PAD
    exact = torch.promote_types(dtype, torch.float32)
    lprobs = logits.log_softmax(-1, dtype=exact)
    want, want_nll = label_smoothed_nll_loss(lprobs, target, epsilon, ignore_index=PAD)
    (want_grad,) = torch.autograd.grad(2 * want, logits)
    loss, nll = LabelSmoothedNLL.apply(logits, target, epsilon, PAD)
    rounding = 8 * torch.finfo(exact).eps
    assert loss.item() == pytest.approx(want.item(), rel=rounding)
    assert nll.item() == pytest.approx(want_nll.item(), rel=rounding) and not nll.requires_grad
    for _ in range(2):  # what is kept for the backward pass stays as it is
        (grad,) = torch.autograd.grad(2 * loss, logits, retain_graph=True)
        assert grad.dtype == dtype
        torch.testing.assert_close(grad, want_grad)


def test_ignored_prefix_is_fairseqs():
    criterion, model, sample = make_criterion(), tiny().eval(), make_sample(3, 6, seed=1)
    criterion.ignore_prefix_size = 1
    net_output = model(**sample["net_input"])
    loss, nll = criterion.compute_loss(model, net_output, sample)
    lprobs = net_output[0][:, 1:].log_softmax(-1).reshape(-1, 96)
    target = sample["target"][:, 1:].reshape(-1)
    want = label_smoothed_nll_loss(lprobs, target, EPSILON, ignore_index=PAD)
    assert (loss.item(), nll.item()) == pytest.approx([w.item() for w in want])


def test_metrics_are_weighted_by_what_they_count():
    """Two batches of very different size in one update, as with --update-freq 2."""
    model = tiny("--smoe-strata", "2-2-2-2", "--moe-capacity-factor", "0.5").train()
    samples = [make_sample(2, 4, seed=1), make_sample(8, 20, seed=2)]
    stats = []
    for side in (model.encoder, model.decoder):
        side.layers[1].moe.register_forward_hook(lambda *call: stats.append(call[2][1]))
    logs = [make_criterion()(model, sample)[2] for sample in samples]
    got = logged(logs)

    requested = torch.cat([s.requested_capacity.flatten() for s in stats])
    assert got["requested_capacity"] == pytest.approx(
        float(requested[requested > 0].float().mean()), rel=1e-5
    )
    for k in (0, 1):
        dropped = sum(int(s.dropped[:, k].sum()) for s in stats)
        chosen = sum(int(s.chosen[:, k].sum()) for s in stats)
        assert dropped > 0
        assert got[f"overflow_expert{k + 1}"] == pytest.approx(100 * dropped / chosen, rel=1e-5)
    visible = torch.tensor([[8], [6], [4], [2]])
    idle = sum(
        int((s.first_choices[i, 8 - int(visible[i]) :] == 0).sum()) for s in stats for i in range(4)
    )
    assert got["unused_expert1_count"] == pytest.approx(idle / (4 * len(stats)))
    sizes = [sample["ntokens"] for sample in samples]
    balance = [float(stats[i].balance_loss + stats[i + 1].balance_loss) / 2 for i in (0, 2)]
    want = sum(b * n for b, n in zip(balance, sizes, strict=True)) / sum(sizes)
    assert got["moe_gate_loss"] == pytest.approx(want, rel=1e-5)
    assert got["nll_loss"] == pytest.approx(
        float(sum(log["nll_loss"] for log in logs)) / sum(sizes) / math.log(2), rel=1e-5
    )


def test_layers_that_route_nothing_are_not_averaged():
    """``--moe-gating-dropout``."""
    model = tiny("--smoe-strata", "8", "--moe-gating-dropout", "0.5").train()
    sample, stats, logs = make_sample(3, 6, seed=1), [], []
    for side in (model.encoder, model.decoder):
        side.layers[1].moe.register_forward_hook(lambda *call: stats.append(call[2][1]))
    for _ in range(8):
        logs.append(make_criterion(moe_z_loss_wt=0.1)(model, sample)[2])
    ran = [each for each in stats if each.first_choices.any()]
    assert 0 < len(ran) < len(stats) == 16
    got = logged(logs)
    for name, values in (
        ("unused_expert1_count", [each.unused.sum() for each in ran]),
        ("moe_gate_loss", [each.balance_loss for each in ran]),
        ("moe_z_loss", [each.z_loss for each in ran]),
    ):
        assert got[name] == pytest.approx(sum(values).item() / len(ran), rel=1e-5), name


def test_a_dense_model_logs_no_routing():
    _, _, log = make_criterion()(tiny("--moe-freq", "0"), make_sample(3, 6, seed=1))
    assert not any(name.startswith("moe") for name in log)
    assert "requested_capacity" not in logged([log])


def cmr_model():
    model = tiny("--smoe-strata", "8", "--moe-cmr").train()
    for layer in (model.encoder.layers[1], model.decoder.layers[1]):
        torch.nn.init.normal_(layer.moe.cmr.gate.weight, std=0.3)
    return model


def test_cmr_budget_is_of_each_batch_and_layer():
    """By hand; the gates are pulled to the budget from either side."""
    model, sample = cmr_model(), make_sample(8, 20, seed=2)
    stats = model(**sample["net_input"])[1]["moe_stats"]
    means = [float(s.cmr_gate_sum) / int(s.cmr_tokens) for s in stats]
    p = sum(means) / 2  # one layer is above it, the other below
    loss = cmr_budget_loss(stats, p)
    assert float(loss) == pytest.approx(sum(abs(mean - p) for mean in means) / 2, rel=1e-5)
    grads = torch.autograd.grad(loss, [s.cmr_gate_sum for s in stats])
    for grad, mean, s in zip(grads, means, stats, strict=True):
        direction = 1 if mean > p else -1
        assert float(grad) == pytest.approx(direction / 2 / int(s.cmr_tokens), rel=1e-5)


def test_cmr_and_z_loss_are_logged_and_added_to_the_loss():
    model, sample = cmr_model().eval(), make_sample(3, 6, seed=1)
    without = make_criterion(moe_gate_loss_wt=0.01, cmr_gate_loss_wt=0.0)
    weights = dict(moe_gate_loss_wt=0.01, moe_z_loss_wt=0.3, cmr_gate_loss_wt=0.2)
    criterion = make_criterion(**weights, cmr_gate_loss_p=0.8)
    plain, size, _ = without(model, sample)
    loss, _, log = criterion(model, sample)
    got = logged([log])
    added = 0.3 * got["moe_z_loss"] + 0.2 * got["cmr_gate_loss"]
    assert float(loss) == pytest.approx(float(plain) + size * float(added), rel=1e-5)
    stats = model(**sample["net_input"])[1]["moe_stats"]
    gates = sum(float(s.cmr_gate_sum) for s in stats) / sum(int(s.cmr_tokens) for s in stats)
    assert got["cmr_gate"] == pytest.approx(gates, rel=1e-5)


def test_layer_drop_logs_all_layers():
    """Fewer layers ran than the model has; what is logged has the names and shapes of a batch that ran
    all, since processes with other layers left out add theirs to it."""
    flags = ["--encoder-layers", "4", "--decoder-layers", "1", "--moe-freq", "1", "--moe-cmr"]
    model = tiny("--smoe-strata", "8", *flags, "--encoder-layerdrop", "0.6").train()
    sample, logs, ran = make_sample(3, 6, seed=1), [], []
    torch.manual_seed(0)
    for _ in range(8):
        ran.append(len(model(**sample["net_input"])[1]["moe_layers"]))
        loss, _, log = make_criterion()(model, sample)
        loss.backward()
        logs.append(log)
    assert len(set(ran)) > 2  # the case is what it claims to be
    shapes = [
        {k: v.shape for k, v in log.items() if k.startswith(("moe", "cmr")) and torch.is_tensor(v)}
        for log in logs
    ]
    assert all(other == shapes[0] for other in shapes) and len(shapes[0]) >= 6
    got = logged(logs)
    assert got["requested_capacity"] == 1
    assert {f"encoder.layer.{i}/requested_capacity" for i in range(4)} <= got.keys()


def test_blocks_have_names_of_their_own_wherever_they_are():
    """Those of a user's model: outside of layers, and two in one layer."""
    model = torch.nn.Module()
    model.first = StratifiedMoE(8, 8, "4")
    model.encoder = torch.nn.Module()
    pair = torch.nn.ModuleList(StratifiedMoE(8, 8, "4") for _ in range(2))
    model.encoder.layers = torch.nn.ModuleList([pair, StratifiedMoE(8, 8, "4")])
    blocks = moe_blocks(model)
    assert list(blocks) == ["first", "encoder.layers.0.0", "encoder.layers.0.1", "encoder.layer.1"]
    stats = [block.train()(torch.randn(2, 3, 8))[1] for block in blocks.values()]
    got = logged([{**LOG, **routing_sums(blocks, dict(zip(blocks, stats)))}])
    assert {f"{name}/requested_capacity" for name in blocks} <= got.keys()


LOG = {"loss": 0.0, "nll_loss": 0.0, "ntokens": 6, "nsentences": 2, "sample_size": 6}
