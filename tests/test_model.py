"""The registered model, built as fairseq builds it from flags."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from commands import sentence_of
from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import build_model

import smoe_fairseq.models  # noqa: F401  (as --user-dir does)
from smoe_fairseq.models import memory

PAD = 1


def make_task(vocabulary=96):
    class Task:
        source_dictionary = target_dictionary = Dictionary()

    for i in range(vocabulary - len(Task.source_dictionary)):
        Task.source_dictionary.add_symbol(f"w{i}")
    return Task


@functools.cache
def parsed(*flags):
    """Options of a model. hydra, which takes ten times as long, gives these two their task's options, too."""
    args = options.parse_args_and_arch(options.get_training_parser(), ["data", *flags])
    by_hydra = args.arch in ("smoe_transformer_lm", "transformer_lm")
    return convert_namespace_to_omegaconf(args).model if by_hydra else args


def configured(*flags):
    return copy.deepcopy(parsed(*flags))


def make_model(*flags, vocabulary=96):
    torch.manual_seed(0)
    return build_model(configured(*flags), make_task(vocabulary))


def tiny(*flags):
    return make_model("--arch", "smoe_transformer_tiny", "--dropout", "0", *flags)


def sentence_against(*flags) -> str:
    """With which a model of these flags is refused."""
    return sentence_of(tiny, *flags)


def make_batch(vocabulary=96):
    generator = torch.Generator().manual_seed(5)
    src = torch.randint(4, vocabulary, (3, 7), generator=generator)
    tgt = torch.randint(4, vocabulary, (3, 6), generator=generator)
    src[1, :3] = PAD  # left-padded source, right-padded target: fairseq's defaults
    tgt[2, 4:] = PAD
    return src, src.ne(PAD).sum(1), tgt


def assert_by_steps(decoder, tokens, want, encoder_out=None) -> dict:
    """To where the shortest of three lines ends, in another order at every step, as a search has them."""
    state, order = {}, torch.arange(3)
    for step in range(1, int(tokens.ne(PAD).sum(1).min()) + 1):
        got, extra = decoder(tokens[order, :step], encoder_out, incremental_state=state)
        assert torch.allclose(got[:, 0], want[order, step - 1], atol=1e-5)
        turn = torch.tensor([2, 0, 1])
        order = order[turn]
        decoder.reorder_incremental_state_scripting(state, turn)
    return extra


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def assert_train_alike(ours, stock, *batch) -> None:
    """The same outputs and gradients in training."""
    want, got = (model.train()(*batch)[0] for model in (stock, ours))
    assert torch.allclose(got, want, atol=1e-6)
    got.sum().backward(), want.sum().backward()
    for name, parameter in ours.named_parameters():
        assert torch.allclose(parameter.grad, stock.get_parameter(name).grad, atol=1e-4), name


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_dense_model_is_fairseqs_transformer(norm):
    sizes = (
        "--encoder-embed-dim 32 --encoder-ffn-embed-dim 48 --encoder-layers 2 --decoder-layers 2"
    )
    sizes += " --encoder-attention-heads 4 --decoder-attention-heads 4 --dropout 0"
    pre = ["--encoder-normalize-before", "--decoder-normalize-before"]
    flags = ["--share-all-embeddings", *sizes.split()]
    stock = make_model("--arch", "transformer", *flags, *(pre if norm == "pre" else []))
    off = ["--no-encoder-normalize-before", "--no-decoder-normalize-before"]
    ours = make_model(
        "--arch", "smoe_transformer", "--moe-freq", "0", *flags, *([] if norm == "pre" else off)
    )

    ours.load_state_dict(stock.state_dict())  # by the same names
    copies = [n for n, _ in stock.named_parameters() if n not in dict(ours.named_parameters())]
    assert all(name.split(".")[-1].count("_") >= 1 and ".layers." in name for name in copies)
    unused = sum(stock.get_parameter(name).numel() for name in copies)
    assert parameters(ours) == parameters(stock) - unused

    batch = make_batch()
    assert_train_alike(ours, stock, *batch)
    stock.eval(), ours.eval()
    for kept in (False, True):
        want, got = (each.encoder(*batch[:2], kept)["encoder_states"] for each in (stock, ours))
        assert len(got) == len(want) == 3 * kept
        assert all(torch.allclose(*states, atol=1e-5) for states in zip(got, want, strict=True))
    want, want_extra = stock(*batch)
    got, got_extra = ours(*batch)
    assert torch.allclose(got, want, atol=1e-5)
    assert torch.allclose(got_extra["attn"][0], want_extra["attn"][0], atol=1e-6)


@pytest.mark.parametrize(
    "flags, encoder, decoder",
    [
        ("--moe-freq 1", [0, 1, 2, 3], [0, 1, 2, 3]),
        ("--moe-freq 2", [1, 3], [1, 3]),
        ("--moe-freq 3 --decoder-moe-freq 0", [2], []),
        ("--encoder-moe-freq 4", [3], [1, 3]),
    ],
)
def test_moe_freq_places_the_moe_layers(flags, encoder, decoder):
    model = tiny("--encoder-layers", "4", "--decoder-layers", "4", *flags.split())
    assert [i for i, layer in enumerate(model.encoder.layers) if layer.is_moe] == encoder
    assert [i for i, layer in enumerate(model.decoder.layers) if layer.is_moe] == decoder
    _, extra = model(*make_batch())
    assert len(extra["moe_stats"]) == len(encoder) + len(decoder)
    real = make_batch()[0].ne(PAD)
    if encoder:
        assert torch.equal(extra["moe_stats"][0].requested_capacity > 0, real)


@pytest.mark.parametrize("execution", ["per-expert", "grouped"])
def test_autocast(execution):
    model = tiny("--smoe-strata", "2-2-2-2")
    for layer in [*model.encoder.layers, *model.decoder.layers]:
        if layer.is_moe:
            layer.moe.execution = execution
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, extra = model(*make_batch())
    assert extra["moe_stats"][0].balance_loss.dtype == torch.float32
    (out.float().mean() + extra["moe_stats"][0].balance_loss).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_each_rank_of_a_machine_builds_its_model(monkeypatch):
    monkeypatch.setattr(memory, "machine_memory", lambda: 2**24)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    tiny()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert "in each of 8 ranks, of which" in sentence_against()


def test_the_former_name_of_smoe_norm_is_known():
    flags = ("--arch", "smoe_transformer_tiny", "--moe-norms", "released")
    assert parsed(*flags).smoe_norm == "released"


def test_a_released_checkpoint_of_one_stratum_without_a_norm_of_the_output_loads_as_it_was():
    """Versions before had none with one stratum, where the two values of --smoe-norm were the same."""
    flags = ["--encoder-smoe-strata", "8", "--decoder-smoe-strata", "4-4", "--smoe-norm"]
    before, now = (tiny(*flags, norms).eval() for norms in ("paper", "released"))
    state = now.state_dict()
    output_norm = [n for n in state if n.startswith("encoder.layers.1.moe.layer_norms.1.")]
    assert len(output_norm) == 2
    for name in output_norm:
        del state[name]
    before.encoder.load_state_dict({n[8:]: t for n, t in state.items() if n.startswith("encoder.")})
    now.load_state_dict(dict(state))
    tokens, lengths = make_batch()[:2]
    with torch.no_grad():
        outputs = [model.encoder(tokens, lengths)["encoder_out"][0] for model in (now, before)]
    assert torch.equal(*outputs)
    assert now.state_dict().keys() == state.keys()
    assert len(now.decoder.layers[1].moe.layer_norms) == 3
