"""The registered language model: against plain loops and fairseq's own, who sees what, what is refused."""

import pytest
import torch
from family import FAMILY
from reference_lm import language_model
from sampling import some
from test_criterion import ALPHA, EPSILON, make_criterion
from test_model import PAD, assert_by_steps, assert_train_alike, make_model, parameters

from smoe_fairseq.analysis.cost import count
from smoe_fairseq.models.transformer import moe_blocks

TASK = ("--task", "language_modeling")
MEMBERS = {n: flags for n, flags in FAMILY.items() if n != "expert-choice"}
MEMBERS["layers"] = "--decoder-layers 6 --smoe-strata 4-0-4,2-6,8"
MEMBERS["cmr"] = "--smoe-strata 8 --moe-cmr"


def tiny_lm(*flags):
    return make_model(*TASK, "--arch", "smoe_transformer_lm_tiny", "--dropout", "0", *flags)


def member_model(member, *flags):
    model = tiny_lm(*MEMBERS[member].split(), *flags).eval()
    for block in moe_blocks(model).values():
        for gate in block.gates:
            for parameter in gate.parameters():  # gates that differ clearly
                torch.nn.init.normal_(parameter, std=0.5)
    return model


def make_text(padding=True):
    """Three texts of six tokens, one of them shorter and padded on the right."""
    tokens = torch.randint(4, 96, (3, 6), generator=torch.Generator().manual_seed(5))
    if padding:
        tokens[2, 4:] = PAD
    return tokens


def make_sample(tokens):
    target = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], PAD)], dim=1)
    net_input = {"src_tokens": tokens, "src_lengths": tokens.ne(PAD).sum(1)}
    return {"net_input": net_input, "target": target, "ntokens": int(target.ne(PAD).sum())}


def test_offloaded_activations_are_checkpointed():
    layers = tiny_lm("--offload-activations").decoder.layers
    assert all(hasattr(layer, "precheckpoint_forward") for layer in layers)


@pytest.mark.parametrize("strata", ["4-4", "2-1-3"])
def test_outputs_and_loss_are_those_of_plain_loops(strata):
    sizes = "--decoder-embed-dim 16 --decoder-ffn-embed-dim 12 --decoder-attention-heads 2".split()
    model = tiny_lm("--smoe-strata", strata, *sizes).eval().double()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # layer norms that are not the same, biases that are not 0
            torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
    tokens = make_text()
    sample = make_sample(tokens)
    sentences = [[t for t in row if t != PAD] for row in tokens.tolist()]
    params = {name: value.detach() for name, value in model.state_dict().items()}
    with torch.no_grad():
        want, balance = language_model(params, sentences, strata, heads=2)
        logits, extra = model(**sample["net_input"])
        loss, sample_size, _ = make_criterion()(model, sample)
    for row, log_probs in zip(logits.log_softmax(-1), want):
        assert torch.allclose(row[: len(log_probs)], log_probs, atol=1e-5)
    assert extra["moe_layers"] == ["decoder.layer.1"]
    expected = ALPHA * sample_size * float(balance)
    for log_probs, target in zip(want, sample["target"].tolist()):
        for scores, token in zip(log_probs, target):
            if token != PAD:
                others = (scores.sum() - scores[token]) / 95
                expected -= float((1 - EPSILON) * scores[token] + EPSILON * others)
    assert sample_size == sample["ntokens"] == 13
    assert float(loss) == pytest.approx(expected, rel=1e-6)


def test_dense_model_is_fairseqs_transformer_lm():
    sizes = "--decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32"
    ours_sizes = "--decoder-embed-dim 32 --decoder-ffn-embed-dim 48 --decoder-layers 2 --dropout 0"
    ours_sizes += " --decoder-attention-heads 4"
    ours = make_model(
        *TASK, "--arch", "smoe_transformer_lm", "--moe-freq", "0", *ours_sizes.split()
    )
    stock = make_model(
        *(*TASK, "--arch", "transformer_lm", *sizes.split(), *ours_sizes.split()),
        *("--decoder-normalize-before", "--share-decoder-input-output-embed"),
    )
    ours.load_state_dict(stock.state_dict())  # by the same names
    assert parameters(ours) == parameters(stock)
    assert_train_alike(ours, stock, make_text())


UNLIMITED = ("--moe-capacity-factor", "0", "--moe-second-expert-policy", "all")


@pytest.mark.parametrize("member", MEMBERS)
def test_in_training_only_a_limit_and_base_look_ahead(member):
    """Without a limit on the experts what comes later is nothing to a token, but where all are balanced."""
    limit = UNLIMITED[2:] if member == "depths" else UNLIMITED  # its factor is no limit
    model = member_model(member, *limit).double().train()
    tokens = make_text()
    changed = tokens.clone()
    changed[0, 3:] = (changed[0, 3:] + 17) % 90 + 4
    want, got = (model(text)[0][0, :3].float() for text in (tokens, changed))
    assert torch.equal(got, want) == (member not in ("base", "depths"))


@pytest.mark.parametrize("member", some(MEMBERS, "null", "hash", "base", "chain", "cmr", first=1))
def test_step_by_step_equals_at_once(member):
    model = member_model(member)
    tokens = make_text(padding=False)
    assert not assert_by_steps(model.decoder, tokens, model(tokens)[0])["moe_stats"]


@pytest.mark.parametrize(
    "flags, tables", [("", 1), ("--no-share-decoder-input-output-embed --decoder-learned-pos", 2)]
)
def test_parameters_are_counted(flags, tables):
    """An encoder's are not among them; each table of embeddings is there once."""
    flags = flags.split()
    with torch.device("meta"):
        model = make_model(*TASK, "--arch", "smoe_transformer_lm_base", *flags, vocabulary=9000)
    assert count(model).parameters == parameters(model)
    shapes = [p.shape for p in model.parameters()]
    assert sum(shape == (9000, 512) for shape in shapes) == tables
    assert model.max_positions() == 1024 and not hasattr(model, "encoder")


@pytest.mark.parametrize(
    "flags, longest",
    [
        ("--decoder-learned-pos", 1024),
        ("--tokens-per-sample 64 --decoder-learned-pos --add-bos-token", 65),
        ("--tokens-per-sample 64 --decoder-learned-pos --max-target-positions 99", 99),
    ],
)
def test_positions_are_the_tasks(flags, longest):
    flags += " --decoder-embed-dim 16 --decoder-attention-heads 2 --decoder-layers 2"
    model = make_model(*TASK, "--arch", "smoe_transformer_lm", *flags.split())
    assert model.max_positions() == longest
    model(torch.full((1, longest), 5))  # so many are taken
