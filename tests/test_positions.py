"""Capacity must not follow the position in the sentence: it would take the ends of sentences away."""

import pytest
import torch
from test_model import PAD, tiny

from smoe_fairseq.analysis.capacity import by_position

B, S = 8, 20


def make_sample(seed=1):
    tokens = torch.randint(4, 96, (2, B, S), generator=torch.Generator().manual_seed(seed))
    net_input = {
        "src_tokens": tokens[0],
        "src_lengths": torch.full((B,), S),
        "prev_output_tokens": tokens[1],
    }
    return {"net_input": net_input, "target": tokens[1], "ntokens": B * S}


def overloaded(*flags):
    """A model whose gates send every token to expert 0, which takes a quarter of them.

    Where scores are to differ, every token goes to one of two experts.
    """
    model = tiny("--moe-top-k", "1", "--smoe-strata", "4", "--moe-capacity-factor", "1.0", *flags)
    for layer in (model.encoder.layers[1], model.decoder.layers[1]):
        torch.nn.init.zeros_(layer.moe.gates[0].weight)
        if "score" in flags:
            torch.nn.init.normal_(layer.moe.gates[0].weight[0], std=1e-3)
    return model.train()


def kept_of(layer, net_input, model):
    """``(B, S)``: whether the MoE layer changed a token; one that was dropped keeps its residual."""
    seen = []

    def keep(moe, inputs, output):
        x, y = (t.transpose(0, 1) if t.shape[0] == S else t for t in (inputs[0], output[0]))
        seen.append((x != y).any(-1))

    handle = layer.moe.register_forward_hook(keep)
    model(**net_input)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize("order", [None, "random", "score"])
def test_no_position_loses_more_than_another(order, side):
    """An expert takes forty of 160 tokens: 2 of 8 sentences, or tokens from all over."""
    model = overloaded(*(["--moe-drop-order", order] if order else []))
    torch.manual_seed(2)
    layer = getattr(model, side).layers[1]
    kept_NBS = torch.stack(
        [kept_of(layer, make_sample(seed)["net_input"], model) for seed in range(10)]
    )
    by_fifth = kept_NBS.view(-1, 5, S // 5).sum((0, 2)).tolist()
    if order == "score":
        assert sum(by_fifth) > 10 * 40
    else:
        assert sum(by_fifth) == 10 * 40
    if order is None:  # by sentence
        assert kept_NBS[:, : B // 4].all() and by_fifth == [80] * 5
    else:
        assert min(by_fifth) > max(by_fifth) / 1.6


@pytest.mark.parametrize("flags", [[], ["--checkpoint-activations"]])
def test_rows_are_sentences_without_a_copy(flags):
    """The layers keep ``(S, B, D)``, in the memory order of the embeddings' ``(B, S, D)``."""
    model = tiny("--encoder-layers", "4", "--moe-freq", "1", "--dropout", "0.1", *flags).train()
    contiguous = []
    for layer in [*model.encoder.layers, *model.decoder.layers]:
        layer.moe.register_forward_pre_hook(
            lambda moe, inputs: contiguous.append(inputs[0].is_contiguous())
        )
    model(**make_sample()["net_input"])
    assert contiguous == [True] * 6


def test_fifths_of_sentences_with_padding():
    """25 of the 48 tokens fit: the 20 of sentence 0, and half of the 10 of sentence 1."""
    model, sample = overloaded(), make_sample()
    source = sample["net_input"]["src_tokens"]
    source[1, :10] = PAD  # ten tokens, at positions 10 to 19: fifths of two
    source[2:, 3:] = PAD  # three tokens, in fifths 0, 1 and 3
    model.encoder.layers[1].moe.gates[0].capacity.factor = 25 * 4 / 48
    stats = model.encoder(**{k: v for k, v in sample["net_input"].items() if "src" in k})
    (stats,) = stats["moe_stats"]
    table = by_position(stats)
    assert table[0].tolist() == [12, 12, 6, 12, 6]
    assert table[1].tolist() == [6, 6, 1, 8, 2]
