"""The wider family in the registered model: who sees what, what is logged, refused and counted."""

import pytest
import torch
from family import FAMILY
from plain_loops import watched
from sampling import some
from test_criterion import ALPHA, balance_of, logged, make_criterion, make_sample
from test_model import PAD, assert_by_steps, make_batch, tiny

from smoe_fairseq.analysis.cost import count
from smoe_fairseq.errors import UsageError
from smoe_fairseq.models.transformer import moe_blocks

MEMBERS = pytest.mark.parametrize("member", FAMILY)


def member_model(member, *flags):
    model = tiny(*FAMILY[member].split(), *flags)
    for block in moe_blocks(model).values():
        for gate in block.gates:
            if "bias" in FAMILY[member]:
                gate.bias.steps += torch.arange(len(gate.bias.steps)) % 3
            for parameter in gate.parameters():  # gates that differ clearly
                torch.nn.init.normal_(parameter, std=0.5)
    return model


def gate_answers(model, *batch):
    """The output, and the experts of every token, by layer and stratum."""
    gates = {
        (name, i): gate for name, b in moe_blocks(model).items() for i, gate in enumerate(b.gates)
    }
    with watched(gates.values()) as seen:
        out, _ = model(*batch)
    return out, {key: r.expert_TK for key, (_, r) in zip(gates, seen, strict=True)}


@MEMBERS
def test_a_later_token_changes_nothing_before_it(member):
    """The choices of all layers, and the output bit by bit.

    It is computed in double precision: products of more rows or fewer differ in the last bits of each.
    """
    model = member_model(member).eval().double()
    src, lengths, tgt = make_batch()
    want, choices = gate_answers(model, src, lengths, tgt)
    changed = tgt.clone()
    changed[0, 3:] = (changed[0, 3:] + 17) % 90 + 4
    got, changed_choices = gate_answers(model, src, lengths, changed)
    assert torch.equal(got[0, :3].float(), want[0, :3].float())
    assert torch.equal(got[1:].float(), want[1:].float())
    first = "decoder.layer.1", 0  # all tokens are there, in their order
    assert torch.equal(choices[first][:3], changed_choices[first][:3])
    assert torch.equal(choices[first][6:], changed_choices[first][6:])
    assert not torch.allclose(got[0, 3:], want[0, 3:])


@pytest.mark.parametrize(
    "member",
    some(FAMILY, "null", "gate-residual", "hash", "expert-choice", "chain", "layers", first=1),
)
def test_decoding_step_by_step_equals_one_pass(member):
    """Three translations of one sentence."""
    model = member_model(member).eval()
    src, lengths, tgt = make_batch()
    encoder_out = model.encoder(src[:1].repeat(3, 1), lengths[:1].repeat(3))
    want, _ = model.decoder(tgt, encoder_out)
    assert_by_steps(model.decoder, tgt, want, encoder_out)


def test_a_gate_gets_the_logits_of_the_layer_before():
    model = member_model("gate-residual", "--moe-freq", "1").eval()
    given = {}
    for name, block in moe_blocks(model).items():
        block.register_forward_pre_hook(lambda _, args, name=name: given.update({name: args[4]}))
    _, extra = model(*make_batch())
    stats = dict(zip(extra["moe_layers"], extra["moe_stats"], strict=True))
    assert len(given) == 4
    for side in ("encoder", "decoder"):
        assert given[f"{side}.layer.0"] is None
        assert torch.equal(given[f"{side}.layer.1"], stats[f"{side}.layer.0"].gate_logits)


@MEMBERS
def test_a_sentence_does_not_depend_on_its_batch(member):
    model = member_model(member).eval()
    src, lengths, tgt = make_batch()
    want, _ = model(src, lengths, tgt)
    for i in (1, 2):  # which have padding, of the source and of the target
        s, t = src[i][src[i] != PAD].unsqueeze(0), tgt[i][tgt[i] != PAD].unsqueeze(0)
        got, _ = model(s, lengths[i : i + 1], t)
        assert torch.allclose(got[0], want[i, : t.shape[1]], atol=1e-5)


def test_a_hash_table_is_that_of_its_seed():
    flags, name = FAMILY["hash"].split(), "encoder.layers.1.moe.gates.0.table"
    one, other = (tiny(*flags, "--moe-hash-seed", seed).state_dict()[name] for seed in "12")
    assert one.bincount(minlength=8).min() > 0 and not torch.equal(one, other)


def test_balanced_hash_table_follows_the_dictionary(monkeypatch):
    """By descending counts each to the lightest expert: loads as even as the most frequent one allows."""
    import test_model

    plain = test_model.make_task

    def make_task(vocabulary):
        task = plain(vocabulary)
        counts = task.source_dictionary.count
        counts[:] = [0 if i < 4 else 1000 // i for i in range(len(counts))]
        return task

    with pytest.raises(UsageError) as error:
        member_model("hash", "--moe-hash-table", "balanced")
    assert "--moe-hash-table balanced: " in str(error.value)
    monkeypatch.setattr(test_model, "make_task", make_task)
    model = member_model("hash", "--moe-hash-table", "balanced")
    table = model.decoder.layers[1].moe.gates[0].table
    counts = torch.tensor(make_task(96).source_dictionary.count)
    loads = torch.zeros(8).long().index_add_(0, table, counts)
    assert table[4:12].tolist() == list(range(8))  # the most frequent ones, each by itself
    assert loads.max() - loads.min() <= counts[4] - counts[12]


@pytest.mark.parametrize("member", some(FAMILY, "null", "base", "update"))
def test_activation_checkpointing_changes_nothing(member):
    results = []
    for flags in ([], ["--checkpoint-activations"]):
        model = member_model(member, *flags).train()
        torch.manual_seed(1)
        criterion = make_criterion()
        loss, _, log = criterion(model, make_sample(4, 6, seed=1))
        loss.backward()
        asked = {k: v for k, v in log.items() if k.startswith("moe_asked")}
        assert len(asked) == (
            2 if member in ("bias", "sigmoid", "relu", "threshold", "depths") else 0
        )
        results.append((loss, asked, {n: p.grad for n, p in model.named_parameters()}))
    (loss, asked, grads), (checkpointed_loss, checkpointed_asked, checkpointed_grads) = results
    assert torch.equal(loss, checkpointed_loss)
    assert all(torch.equal(asked[k], checkpointed_asked[k]) for k in asked)
    for name in grads:
        assert torch.allclose(grads[name], checkpointed_grads[name], atol=1e-5), name


@pytest.mark.parametrize("member", some(FAMILY, "top-p", "base", "shared", "update", first=1))
def test_half_precision(member):
    model = member_model(member).to(torch.bfloat16).train()
    out, extra = model(*make_batch())
    assert out.dtype == torch.bfloat16
    (out.float().mean() + extra["moe_stats"][0].balance_loss).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def gate_gradient(member, alpha):
    model = member_model(member).train()
    criterion = make_criterion()
    criterion.moe_gate_loss_wt = alpha
    torch.manual_seed(1)
    loss, size, log = criterion(model, make_sample(4, 6, seed=1))
    loss.backward()
    gradients = [p.grad for n, p in model.named_parameters() if ".gates." in n]
    return gradients, float(loss.detach()), float(log["moe_gate_loss"]) / size


@pytest.mark.parametrize("member", some(FAMILY, "top-p", "bias", "base"))
def test_who_learns_by_the_balance_loss(member):
    """Its weight changes the loss and the gates' gradients just where there is one."""
    (with_loss, loss, own), (without, plain, _) = (gate_gradient(member, a) for a in (ALPHA, 0.0))
    learns = member not in ("hash", "base", "bias", "sigmoid", "relu", "threshold", "depths")
    assert (loss != plain) == learns
    assert own >= 0.5  # logged all the same
    same = [torch.equal(a, b) for a, b in zip(with_loss, without, strict=True)]
    assert all(same) != learns or not same
    blocks = moe_blocks(member_model(member)).values()
    trained = [block.config.learns_balance for block in blocks]
    assert trained == [learns and member != "expert-choice", learns]


def test_entropy_loss_is_logged_and_added():
    model, sample = member_model("top-p").eval(), make_sample(4, 6, seed=1)
    criterion = make_criterion()
    criterion.moe_entropy_loss_wt = 0.0
    plain, size, _ = criterion(model, sample)
    criterion.moe_entropy_loss_wt = 0.3
    loss, _, log = criterion(model, sample)
    entropy = sum(stats.entropy for stats in model(**sample["net_input"])[1]["moe_stats"]) / 2
    assert float(loss - plain) == pytest.approx(float(0.3 * size * entropy), rel=1e-4)
    assert float(log["moe_entropy_loss"]) == pytest.approx(float(size * entropy), rel=1e-5)


def test_balance_over_an_update_by_hand():
    """The second batch's loss has the first choices of both, until the next update begins."""
    model = member_model("update").train()
    criterion = make_criterion()
    criterion.train()
    samples = [make_sample(2, 4, seed=1), make_sample(5, 9, seed=2)]

    def losses(*begun):
        seen, found = [], []
        for sample, begins in zip(samples, begun, strict=True):
            if begins:
                criterion.begin_update()
            torch.manual_seed(3)
            found.append(criterion(model, sample)[2]["moe_gate_loss"] / sample["ntokens"])
            torch.manual_seed(3)
            seen.append(model(**sample["net_input"])[1]["moe_stats"])
        return found, seen

    found, seen = losses(True, False)
    assert float(found[0]) == pytest.approx(balance_of(seen[0], seen[0]), rel=1e-5)
    assert float(found[1]) == pytest.approx(balance_of(seen[1], *seen), rel=1e-5)
    alone, seen = losses(True, True)
    batch = sum(stats.balance_loss for stats in seen[1]) / 2
    assert float(alone[1]) == pytest.approx(float(batch), rel=1e-5) != float(found[1])
    samples[1] = {**samples[1], "is_dummy": True}
    dummy, _ = losses(True, False)
    assert float(dummy[1]) != float(found[1])  # it is not counted
    assert float(dummy[1]) == pytest.approx(balance_of(seen[1], seen[0]), rel=1e-5)


@pytest.mark.parametrize(
    "flags, factor",
    [
        ("--smoe-strata 4-4", 2.0),
        ("--moe-gate depths --smoe-strata 1 --moe-top-k 1", 0.5),
        ("--moe-gate top-p --smoe-strata 4-4", 0.0),
        ("--moe-gate relu --smoe-strata 4-4", 0.0),
        ("--moe-gate relu --smoe-strata 4-4 --moe-capacity-factor 2.0", 2.0),
    ],
)
def test_the_capacity_of_a_gate_where_none_is_given(flags, factor):
    gate = tiny(*flags.split()).decoder.layers[1].moe.gates[0]
    assert getattr(gate, "capacity", gate).factor == factor


def test_a_chain_may_choose_an_expert_again():
    """Two passes of 2 among 8: an expert is left out by both with probability (6 / 8)^2."""
    found = count(tiny("--smoe-strata", "8", "--smoe-chain", "2"))
    expert = EXPERT + 128 + 256  # with its biases
    idle = found.parameters - found.active_parameters
    assert idle == pytest.approx(2 * 8 * (6 / 8) ** 2 * expert)
    assert found.requested_capacity == 2


EXPERT = 2 * 128 * 256  # weights of a tiny expert
COPIES = {  # by MoE layer; of the others: test_cost.py
    "null": (3 * 8 / 11) + (3 * 4 / 7) * 0.5,
    "residual": 1,
    "shared": 3 * 32 / 256,
    "chain": 2 * 3,
    "layers": 2 * (1.5 + 1.25) / 2,  # the gate behind a stratum without experts is never reached
}
BESIDE = {"residual": 1.0, "shared": 2 * 32 / 256}  # in experts of full width


@pytest.mark.parametrize("member", COPIES)
def test_cost_by_hand(member):
    found = count(tiny(*FAMILY[member].split()))
    assert found.flops["experts"] == pytest.approx(2 * 2 * COPIES[member] * EXPERT)
    dense = count(tiny("--moe-freq", "0")).flops["ffn"]
    assert found.flops["ffn"] == pytest.approx(dense / 2 + 2 * 2 * BESIDE.get(member, 0) * EXPERT)


def test_overflow_is_of_choices_that_have_an_order():
    """Where experts choose, there is no first choice: what the decoder drops is not thinned by theirs."""
    model = tiny(
        *"--smoe-strata 4 --moe-gate expert-choice --moe-capacity-factor 1".split()
    ).train()
    found = logged([make_criterion()(model, make_sample(6, 10, seed=1))[2]])
    for which in ("overflow_expert1", "overflow_expert2"):
        assert found[which] == found[f"decoder.layer.1/stratum.0/{which}"] > 0
    assert "overflow_further" not in found
    assert not [name for name in found if name.startswith("encoder") and "overflow" in name]
    assert found["encoder.layer.1/stratum.0/experts_per_token"] > 0
