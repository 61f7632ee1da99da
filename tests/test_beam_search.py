"""`BeamSearch` beside fairseq's `SequenceGenerator`, on models of every kind, all hypotheses of each."""

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator
from family import FAMILY
from sampling import soak, some
from test_model import make_task, tiny

from smoe_fairseq.errors import UsageError
from smoe_fairseq.models.transformer import moe_blocks
from smoe_fairseq.translate import packed
from smoe_fairseq.translate.int8 import quantize
from smoe_fairseq.translate.packed import PackedLinear, can_pack, pack
from smoe_fairseq.translate.search import BeamSearch, SearchOptions, best_of_many

SYSTEMS = FAMILY | {
    "dense": "--moe-freq 0",
    "smoe": "--smoe-strata 2-2-2-2",
    "stacked": "--smoe-strata 4-4 --moe-stacked",
    "cmr": "--smoe-strata 8 --moe-cmr",
    "released norms": "--smoe-strata 4-4 --smoe-norm released",
    "post-norm": "--moe-freq 0 --no-encoder-normalize-before --no-decoder-normalize-before",
    "learned positions": "--smoe-strata 8 --encoder-learned-pos --decoder-learned-pos",
    "embedding norm": "--smoe-strata 8 --layernorm-embedding",
    "two matrices": "--smoe-strata 8 --no-share-all-embeddings",
    "no positions": "--smoe-strata 8 --no-token-positional-embeddings",
}
VOCABULARY = 97  # which the groups of `best_of_many` do not divide
LENGTHS = (9, 3, 14, 1, 6, 9)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(3)


def sharp(*flags):
    """A model whose choices are far apart, so that no rounding decides, and which ends now and then."""
    model = tiny(*flags).eval()
    with torch.no_grad():
        for block in moe_blocks(model).values():
            for gate in block.gates:
                for parameter in gate.parameters():
                    torch.nn.init.normal_(parameter, std=0.5)
        # Not the embeddings, by which each token would be followed by itself.
        weight = torch.randn_like(model.decoder.output_projection.weight) / 2
        weight[2] *= 3  # the end of sentence
        model.decoder.output_projection.weight = torch.nn.Parameter(weight)
    return model


def batch(task) -> dict:
    pad, eos = task.source_dictionary.pad(), task.source_dictionary.eos()
    generator = torch.Generator().manual_seed(5)
    rows = torch.full((len(LENGTHS), max(LENGTHS) + 1), pad)
    for row, length in zip(rows, LENGTHS, strict=True):
        row[-1] = eos
        row[-1 - length : -1] = torch.randint(4, 90, (length,), generator=generator)
    return {"net_input": {"src_tokens": rows, "src_lengths": rows.ne(pad).sum(1)}}


def compare(model, task, prepare=lambda model: None, **options):
    """All hypotheses beside fairseq's; ``prepare`` changes the model after its search."""
    sample = batch(task)
    given = {n: options.pop(n) for n in ("bos_token", "prefix_tokens") if n in options}
    ours = SearchOptions(**{"beam": 4, "max_len_b": 20} | options)
    oracle = SequenceGenerator(
        *([model], task.target_dictionary, ours.beam),
        **{"len_penalty": ours.lenpen, "unk_penalty": ours.unkpen, "min_len": ours.min_len},
        **{name: getattr(ours, name) for name in ("max_len_b", "temperature")},
        no_repeat_ngram_size=ours.no_repeat_ngram_size,
    )
    expected = oracle.generate([model], sample, **given)
    prepare(model)
    found = BeamSearch(task.target_dictionary, ours).generate([model], sample, **given)
    for want, got in zip(expected, found, strict=True):
        assert [h["tokens"].tolist() for h in want] == [h["tokens"].tolist() for h in got]
        for a, b in zip(want, got, strict=True):
            assert b["score"] == pytest.approx(float(a["score"]), abs=1e-4)
            each = a["positional_scores"]
            assert torch.allclose(b["positional_scores"], each, atol=1e-3)
    return found


CHOSEN = "smoe,dense,gate-residual,chain,hash,two matrices".split(",")  # others are packed below


@pytest.mark.parametrize("system", some(SYSTEMS, *CHOSEN))
def test_every_system_has_fairseqs_hypotheses(system):
    found = compare(sharp(*SYSTEMS[system].split()), make_task(96))
    lengths = {len(h["tokens"]) for hypotheses in found for h in hypotheses}
    fewest = {"depths": 2, "gate-residual": 2, "gated": 1}.get(system, 3)  # as it happens
    assert len(lengths) >= fewest
    assert all(len(hypotheses) == 4 for hypotheses in found)


@pytest.mark.parametrize(
    "options",
    [
        {"beam": 1},
        {"beam": 7, "lenpen": 0.3},
        {"lenpen": 2.0, "min_len": 5},
        {"max_len_b": 3},
        {"unkpen": 5.0, "max_len_b": 8},
        {"unkpen": -20.0, "max_len_b": 8},
        soak({"beam": 200, "max_len_b": 6}),
        {"beam": 90, "max_len_b": 4},
        {"temperature": 1.7},
        *({"min_len": 12, "no_repeat_ngram_size": size} for size in (1, 2, 3)),
        {"bos_token": 7},
        {"prefix_tokens": torch.tensor([[8], [9], [10], [11], [12], [13]])},
        {"prefix_tokens": torch.arange(8, 20).view(6, 2)},
    ],
)
def test_every_option_means_the_same(options):
    compare(sharp("--smoe-strata", "4-4"), make_task(96), **options)


def test_the_limit_is_of_each_sentence():
    """Where fairseq takes the longest of the batch, so that it counts who is translated beside it."""
    model, task = sharp("--smoe-strata", "4-4"), make_task(96)
    with torch.no_grad():
        model.decoder.output_projection.weight[2] = 0
    sample = batch(task)
    search = BeamSearch(task.target_dictionary, SearchOptions(max_len_a=1.0, max_len_b=2))
    found = search.generate([model], sample)
    # Before the limit nothing ends; there everything does.
    lengths = sample["net_input"]["src_lengths"]
    assert [len(h[0]["tokens"]) for h in found] == (lengths + 3).tolist()


def test_a_model_that_has_diverged_is_named():
    model, task = sharp("--smoe-strata", "4-4"), make_task(96)
    with torch.no_grad():
        model.decoder.output_projection.weight.fill_(float("nan"))
    search = BeamSearch(task.target_dictionary, SearchOptions(max_len_b=4))
    with pytest.raises(UsageError, match="it has diverged"):
        search.generate([model], batch(task))


@pytest.mark.parametrize(("size", "number"), [(20025, 10), (4005, 2), (641, 20), (30, 20), (7, 7)])
def test_the_best_of_many(size, number):
    x = torch.randn(5, size)
    x[0, 3:6] = float("-inf")
    values, indices = best_of_many(x, number)
    expected = x.topk(number)
    assert torch.equal(values, expected.values) and torch.equal(indices, expected.indices)
    x[2, size // 2] = float("nan")
    assert best_of_many(x, number)[0].isnan().any(1).tolist() == [False, False, True, False, False]


@pytest.mark.skipif(not can_pack(), reason="this torch has no packed products")
@pytest.mark.parametrize("min_weights", [0, packed.MIN_WEIGHTS])
def test_packed_weights_force_a_target_as_before(min_weights, monkeypatch):
    """No token sees later ones: `BatchTranslator` and the page read the requested capacity so."""
    monkeypatch.setattr(packed, "MIN_WEIGHTS", min_weights)
    model = sharp("--smoe-strata", "2-2-2-2")
    inputs = batch(make_task(VOCABULARY))["net_input"]
    inputs["prev_output_tokens"] = inputs["src_tokens"].flip(1)
    with torch.no_grad():
        logits, extra = model(**inputs)
        pack(model)
        found, of_packed = model(**inputs)
    real = inputs["prev_output_tokens"].ne(1)
    torch.testing.assert_close(found[real], logits[real], atol=1e-4, rtol=1e-4)
    for want, got in zip(extra["moe_stats"], of_packed["moe_stats"], strict=True):
        assert torch.equal(want.requested_capacity, got.requested_capacity)


@pytest.mark.skipif(not can_pack(), reason="this torch has no packed products")
@pytest.mark.parametrize("system", some(SYSTEMS, "smoe", "dense", "cmr", "post-norm", "shared"))
def test_packed_weights_translate_as_fairseq_does(system, monkeypatch):
    monkeypatch.setattr(packed, "MIN_WEIGHTS", 0)

    def prepare(model):
        for _ in range(2):  # a second time nothing is left to pack
            pack(model)

    model = sharp(*SYSTEMS[system].split())
    compare(model, make_task(96), prepare)
    layer = model.decoder.layers[0]
    assert isinstance(model.decoder.output_projection, PackedLinear)
    assert isinstance(layer.encoder_attn.q_proj, PackedLinear)
    assert isinstance(layer.self_attn.qkv, PackedLinear)
    assert all(not block.experts.w1.numel() for block in moe_blocks(model).values())
    with pytest.raises(ValueError, match="load it again"):
        quantize(model)


def test_sentences_draw_different_numbers():
    """Of equal probabilities, all sentences would else have the same samples."""
    model, task = sharp("--smoe-strata", "4-4"), make_task(96)
    torch.nn.init.zeros_(model.decoder.output_projection.weight)
    asked = SearchOptions(1, sampling=True, max_len_b=6)
    found = BeamSearch(task.target_dictionary, asked).generate([model], batch(task))
    samples = {tuple(hypotheses[0]["tokens"].tolist()) for hypotheses in found}
    assert len(samples) == len(LENGTHS)


@pytest.mark.parametrize("options", [{}, {"sampling_topk": 3}, {"sampling_topp": 0.6}])
def test_samples_follow_the_probabilities_and_the_seed(options):
    model, task = sharp("--smoe-strata", "4-4"), make_task(96)
    sample, draws = batch(task), 400

    def samples(seed: int, beam: int = 4, sample: dict = sample) -> list[list[list[int]]]:
        asked = SearchOptions(beam, sampling=True, seed=seed, max_len_b=6, **options)
        found = BeamSearch(task.target_dictionary, asked).generate([model], sample)
        return [[h["tokens"].tolist() for h in hypotheses] for hypotheses in found]

    assert samples(1) == samples(1) != samples(2)
    one = {"net_input": {name: value[2:3] for name, value in sample["net_input"].items()}}
    assert samples(1, sample=one) == [samples(1)[2]]  # in any company
    # The first token of many draws, beside its probability.
    first = [ids[0] for seed in range(draws // 80) for ids in samples(seed, 80, one)[0]]
    encoder_out = model.encoder(one["net_input"]["src_tokens"])
    with torch.no_grad():
        logits, _ = model.decoder(torch.tensor([[2]]), encoder_out)
    probs = logits[0, 0].softmax(0)
    probs[[1, task.target_dictionary.eos()]] = 0  # padding, and an end before `min_len`
    order = probs.argsort(descending=True)
    if options.get("sampling_topk"):
        probs[order[3:]] = 0
    elif options.get("sampling_topp"):
        probs[order[1 + int((probs[order].cumsum(0) < 0.6).sum()) :]] = 0
    assert all(probs[i] > 0 for i in first)
    share = torch.bincount(torch.tensor(first), minlength=len(probs)) / len(first)
    assert (share - probs / probs.sum()).abs().max() < 0.1
