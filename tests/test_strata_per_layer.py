"""Strata that differ between MoE layers: ``--smoe-strata 4,2-2`` and one flag for each side."""

import pytest
from test_cost import cost
from test_expert_parallel import checkpoint, compare, flags
from test_model import make_batch, tiny

from smoe_fairseq.checkpoints.reading import RECORD, Record
from smoe_fairseq.models.transformer import moe_blocks

DEEP = ["--encoder-layers", "6", "--decoder-layers", "4"]  # MoE layers: 3 and 2
# On two processes, each of which has half of the encoder's experts and a replica of the decoder's one.
UNEQUAL = ["--encoder-smoe-strata", "4-4", "--decoder-smoe-strata", "1", "--moe-top-k", "1"]


def strata_of(model) -> list[str]:
    return [str(block.strata) for block in moe_blocks(model).values()]


@pytest.mark.parametrize(
    "words, encoder, decoder",
    [
        ("--smoe-strata 2-2", ["2-2"] * 3, ["2-2"] * 2),
        ("--encoder-smoe-strata 4,2-2,3-0-3", ["4", "2-2", "3-0-3"], ["4-4"] * 2),
        ("--smoe-strata 2,6 --encoder-smoe-strata 5", ["5"] * 3, ["2", "6"]),
        ("--smoe-strata 2,6 --encoder-moe-freq 3", ["2", "6"], ["2", "6"]),
        ("--smoe-strata 2,6 --encoder-moe-freq 0", [], ["2", "6"]),
    ],
)
def test_each_layer_has_its_strata(words, encoder, decoder):
    model = tiny(*DEEP, *words.split()).train()
    assert strata_of(model) == encoder + decoder
    out, extra = model(*make_batch())
    out.sum().backward()
    for block, stats in zip(moe_blocks(model).values(), extra["moe_stats"], strict=True):
        assert stats.first_choices.shape == (len(block.strata), block.strata.num_experts)
        assert block.experts.w1.shape[0] == sum(block.strata.sizes)
        assert block.experts.w1.grad.abs().sum() > 0


def test_cost_adds_up_what_layers_cost_by_themselves():
    base = ["--arch", "smoe_transformer_base"]
    found = cost(*base, "--encoder-smoe-strata", "4,2-2,8", "--decoder-smoe-strata", "4-0-4")
    every = {s: cost(*base, "--smoe-strata", s) for s in ("4", "2-2", "8", "4-0-4")}
    for key in ("parameters", "active_parameters", "requested_capacity"):
        layers = [every[s][key] for s in ("4", "2-2", "8", *3 * ["4-0-4"])]
        assert found[key] == pytest.approx(sum(layers) / 6)
    assert found["requested_capacity"] == pytest.approx((1 + 1.5 + 1 + 3 * 1.5) / 6)


@pytest.mark.soak
def test_two_processes_equal_one(ranks, small_corpus, tmp_path):
    """With clipping, which needs the norm over all experts, each counted once."""
    one, two = tmp_path / "one", tmp_path / "two"
    more = [*UNEQUAL, "--max-update", 3, "--clip-norm", 0.5]
    ranks.train(one, 1, *flags(small_corpus, one, *more, "--update-freq", 2), one=True)
    ranks.train(two, 2, *flags(small_corpus, two, *more, "--expert-parallel"))
    compare(two, one, logged=1e-5, parameters=2e-5)
    held = [
        [len(state["model"][f"{side}.layers.1.moe.experts.w1"]) for side in ("encoder", "decoder")]
        for state in checkpoint(two).states
    ]
    assert held == [[4, 1], [4, 1]]


def test_a_layer_that_cannot_be_spread_is_named(ranks, small_corpus, tmp_path):
    words = ["--decoder-smoe-strata", "3", "--expert-parallel"]
    started = ranks.start(tmp_path, 2, *flags(small_corpus, tmp_path / "new", *words))
    started.refused("--decoder-smoe-strata 3 with --expert-parallel: 3 experts cannot be spread")


def test_a_record_names_the_layers_with_another_number_of_experts():
    state = {"save": "1", "num_updates": 3, "num_experts": 8, "world_size": 4, "rank": 0}
    state |= {"parameters": ["encoder.layers.1.moe.experts.w1"], "other_layers": {}}
    name = "encoder.layers.1.moe.experts.w1 exp_avg"
    assert Record.of({RECORD: state}).placement(name, 4, 1).local == range(2, 4)
    state["other_layers"] = {"encoder.layers.1.moe": 4}
    assert Record.of({RECORD: state}).placement(name, 4, 1).local == range(1, 2)
    assert Record.of({RECORD: state}).numbers_of_experts == [4, 8]
