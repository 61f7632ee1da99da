"""``smoe import``: other codes' MoE checkpoints, in files laid out as theirs, compute the same here."""

import re
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from commands import PLUGIN, contents, generate, load, put, untrained
from test_expert_parallel_checkpoints import call, refusal
from test_upcycle import loaded, outputs

from smoe_fairseq.models.transformer import moe_blocks


@pytest.fixture(scope="module")
def vanilla(sparse, small_corpus, tmp_path_factory) -> Path:
    """What fairseq's MoE branch trains, as a model of ours."""
    path = tmp_path_factory.mktemp("vanilla") / "checkpoint_last.pt"
    return untrained(sparse, path, small_corpus, smoe_strata="4", decoder_moe_freq=1)


NAMES = {  # ours within ``moe.``, and theirs within the layer
    r"layer_norms\.0\.(\w+)": r"final_layer_norm.\1",
    r"layer_norms\.(\d+)\.(\w+)": lambda m: f"hmoe_layernorms.{int(m[1]) - 1}.{m[2]}",
}
EXPERTS = {"w1": "fc1.weight", "b1": "fc1.bias", "w2": "fc2.weight", "b2": "fc2.bias"}


def as_theirs(source: Path, **options) -> dict:
    """The checkpoint of another code that holds the same model."""
    state = load(source)
    several = any(".gates.1." in name for name in state["model"])
    model = {}
    for name, tensor in state["model"].items():
        layer, moe, part = name.partition(".moe.")
        if not moe:
            model[name] = tensor
        elif part.startswith("gates."):
            number = part.split(".")[1]
            model[f"{layer}.moe_layer.gate{f'.{number}' * several}.wg.weight"] = tensor
        elif part.startswith("experts."):
            for number, expert in enumerate(tensor):
                theirs = EXPERTS[part.removeprefix("experts.")]
                model[f"{layer}.moe_layer.experts.{number}.{theirs}"] = expert.clone()
        else:
            pattern = next(p for p in NAMES if re.fullmatch(p, part))
            model[f"{layer}.{re.sub(pattern, NAMES[pattern], part)}"] = tensor
    values = {n: v for n, v in state["cfg"]["model"].items() if "moe_" not in n and "cmr_" not in n}
    values |= {"arch": "transformer_wmt_en_de_big", "moe_expert_count": 4, "moe_freq": 2}
    values |= {"moe_top1_expert": False, "moe_normalize_gate_prob_before_dropping": False}
    values |= {"moe_second_expert_policy": "sampling", "moe_cmr": False} | options
    criterion = {"_name": "moe_label_smoothed_cross_entropy"}
    cfg = {**state["cfg"], "model": Namespace(**values), "criterion": criterion}
    return {"cfg": cfg, "args": None, "model": model}


def split(state: dict, path: Path, ranks: int) -> Path:
    """As a set: ``-shared`` and a file per process, whose experts are counted from 0."""
    experts = {n: t for n, t in state["model"].items() if ".experts." in n}
    numbers = {n: int(n.split(".experts.")[1].split(".")[0]) for n in experts}
    local = (max(numbers.values()) + 1) // ranks
    shared = {n: t for n, t in state["model"].items() if n not in experts}
    torch.save({**state, "model": shared}, path.with_name(f"{path.stem}-shared.pt"))
    for rank in range(ranks):
        own = {
            n.replace(f".experts.{numbers[n]}.", f".experts.{numbers[n] % local}."): t
            for n, t in experts.items()
            if numbers[n] // local == rank
        }
        torch.save({**state, "model": own}, path.with_name(f"{path.stem}-rank-{rank}.pt"))
    return path


def assert_same(output: Path, original: Path, data: Path) -> None:
    made, source = (loaded(path, data) for path in (output, original))
    assert len(moe_blocks(made)) == len(moe_blocks(source)) > 0
    assert torch.equal(outputs(made), outputs(source))


@pytest.mark.parametrize("ranks, named", [(1, ""), (2, "-shared"), (4, "-rank-2")])
def test_a_set_as_of_nllb(vanilla, small_corpus, tmp_path, capsys, ranks, named):
    split(as_theirs(vanilla), tmp_path / "model.pt", ranks)
    call("import", tmp_path / f"model{named}.pt", "--output", tmp_path / "new/ours.pt")
    assert f"ours.pt: 3 MoE layers, made from {ranks + 1} files" in capsys.readouterr().out
    assert_same(tmp_path / "new/ours.pt", vanilla, small_corpus)
    config = load(tmp_path / "new/ours.pt")["cfg"]["model"]
    expected = {"encoder_smoe_strata": "4", "encoder_moe_freq": 2, "decoder_moe_freq": 1}
    assert (expected | {"moe_gate_normalization": "after-drop"}).items() <= config.items()


def test_a_block_against_the_equations_by_their_names(vanilla, small_corpus, tmp_path):
    """Top-2 gating by what the files of the other code say, without anything of ours."""
    state = as_theirs(vanilla)
    split(state, tmp_path / "model.pt", 2)
    call("import", tmp_path / "model.pt", "--output", tmp_path / "ours.pt")
    x = torch.randn(2, 6, 48, generator=torch.Generator().manual_seed(3))
    block = moe_blocks(loaded(tmp_path / "ours.pt", small_corpus))["encoder.layer.1"]
    y, _ = block(x)
    layer = {n.removeprefix("encoder.layers.1."): t for n, t in state["model"].items()}
    norm = [layer[f"final_layer_norm.{p}"] for p in ("weight", "bias")]
    h = torch.nn.functional.layer_norm(x, (48,), *norm)
    gates = (h @ layer["moe_layer.gate.wg.weight"].T).softmax(-1)
    expected = x.clone()
    for sentence, position in torch.cartesian_prod(torch.arange(2), torch.arange(6)):
        token, scores = h[sentence, position], gates[sentence, position]
        best = scores.topk(2)
        for score, expert in zip(best.values / best.values.sum(), best.indices, strict=True):
            part = {p: layer[f"moe_layer.experts.{expert}.{p}"] for p in EXPERTS.values()}
            hidden = torch.relu(part["fc1.weight"] @ token + part["fc1.bias"])
            out = part["fc2.weight"] @ hidden + part["fc2.bias"]
            expected[sentence, position] += score * out
    assert torch.allclose(y, expected, atol=1e-5)


@pytest.mark.parametrize("strata, ranks", [("4", 0), ("2-1-3", 3)])
def test_the_papers_code(sparse, small_corpus, tmp_path, strata, ranks):
    """A single file, or a set; strata are read from the gates, norms are as released.

    That code normalises the output with one stratum, too.
    """
    decoder = "4" if strata == "4" else f"{strata},{strata[::-1]}"  # of two layers
    options = {"smoe_strata": strata, "decoder_smoe_strata": decoder, "decoder_moe_freq": 1}
    ours = untrained(sparse, tmp_path / "paper.pt", small_corpus, **options, smoe_norm="released")
    number = len(strata.split("-"))
    state = as_theirs(ours, arch="transformer_ed", hmoe_layer=number)
    assert f"decoder.layers.1.hmoe_layernorms.{number - 1}.weight" in state["model"]
    path = tmp_path / "model.pt"
    split(state, path, ranks) if ranks else torch.save(state, path)
    call("import", path, "--output", tmp_path / "ours.pt")
    assert_same(tmp_path / "ours.pt", ours, small_corpus)
    config = load(tmp_path / "ours.pt")["cfg"]["model"]
    assert (config["encoder_smoe_strata"], config["decoder_smoe_strata"]) == (strata, decoder)
    assert "released" in config.values()


def test_it_translates_and_half_precision_stays(vanilla, small_corpus, tmp_path):
    """Without what some versions of fairseq leave out of a file."""
    state = as_theirs(vanilla)
    for name in list(state["model"]):
        if name.endswith((".version", "_float_tensor", "output_projection.weight")):
            del state["model"][name]
    state["model"] = {name: tensor.half() for name, tensor in state["model"].items()}
    split(state, tmp_path / "model.pt", 4)
    call("import", tmp_path / "model.pt", "--output", tmp_path / "ours.pt")
    model = load(tmp_path / "ours.pt")["model"]
    assert model["encoder.layers.1.moe.experts.w1"].dtype == torch.float16
    tied = [model[f"decoder.{n}.weight"].data_ptr() for n in ("embed_tokens", "output_projection")]
    assert tied[0] == tied[1]
    assert len(generate(small_corpus, tmp_path / "ours.pt", "--user-dir", PLUGIN)) == 50


def test_options_that_both_have(vanilla, tmp_path):
    theirs = {"moe_top1_expert": True, "moe_normalize_gate_prob_before_dropping": True}
    theirs |= {"moe_eom": 0.2, "moe_fom": 0.1, "moe_batch_prioritized_routing": True}
    torch.save(as_theirs(vanilla, **theirs), tmp_path / "one.pt")
    call("import", tmp_path / "one.pt", "--output", tmp_path / "ours.pt")
    config = load(tmp_path / "ours.pt")["cfg"]["model"]
    expected = {"moe_top_k": 1, "moe_gate_normalization": "before-drop", "moe_drop_order": "score"}
    expected |= {"moe_eom": 0.2, "moe_fom": 0.1, "moe_eval_capacity_factor": 0.0}
    assert expected.items() <= config.items()


def drop(end: str):
    def change(state):
        state["model"] = {n: t for n, t in state["model"].items() if not n.endswith(end)}

    return change


def option(**values):
    return lambda state: vars(state["cfg"]["model"]).update(values)


WRONG = {  # by what the sentence names
    "--moe-cmr": option(moe_cmr=True),
    "--alternate-ffn-embed-dim 96": option(alternate_ffn_embed_dim=96),
    "encoder": option(encoder_normalize_before=False),
    "encoder.attn_ln.weight": put("encoder.attn_ln.weight", torch.ones(3)),
    "encoder.layer_norm.bias": drop("encoder.layer_norm.bias"),
    "(3,)": put("encoder.layer_norm.bias", torch.ones(3)),
    "moe_layer.gate": drop("wg.weight"),
    "encoder.layers.1 has 4 experts": drop("experts.3.fc1.weight"),
    "model.pt": lambda state: state.update(cfg={"model": {"arch": ["x"]}}),
    "experts of encoder.layers.1": put(
        "encoder.layers.1.moe_layer.experts.2.fc1.bias", torch.ones(3)
    ),
}


@pytest.mark.parametrize("words", WRONG)
def test_models_that_are_none_of_ours(vanilla, tmp_path, words):
    state = as_theirs(vanilla)
    WRONG[words](state)
    torch.save(state, tmp_path / "model.pt")
    before = contents(tmp_path)
    sentence = refusal("import", tmp_path / "model.pt", "--output", tmp_path / "ours.pt")
    assert words in sentence and str(tmp_path / "model.pt") in sentence
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name, advice", [("a.pt", "needs no"), ("a-rank-0.pt", "consolidate")])
def test_checkpoints_of_ours_need_no_import(sparse, tmp_path, name, advice):
    shutil.copy(sparse, tmp_path / name)
    sentence = refusal("import", tmp_path / "a.pt", "--output", tmp_path / "ours.pt")
    assert str(tmp_path / name) in sentence and advice in sentence


def test_sets_that_are_not_whole(vanilla, tmp_path):
    path = split(as_theirs(vanilla), tmp_path / "model.pt", 4)
    ask = ("import", path, "--output", tmp_path / "ours.pt")
    last = tmp_path / "model-rank-3.pt"
    last.rename(tmp_path / "away")
    assert "encoder.layers.1 has 4 experts, and the files 3" in refusal(*ask)
    (tmp_path / "away").rename(last)
    first = tmp_path / "model-rank-0.pt"
    first.rename(tmp_path / "away")
    assert f"{first} is missing: expected model-shared.pt and all -rank-N" in refusal(*ask)
    (tmp_path / "away").rename(first)
    (tmp_path / "model-shared.pt").rename(tmp_path / "away")
    assert "model-shared.pt is missing" in refusal(*ask)
    assert "none.pt is missing" in refusal("import", tmp_path / "none.pt", *ask[2:])
    assert "facebook/nllb-moe-54b: expected" in refusal("import", "facebook/nllb-moe-54b", *ask[2:])
    (tmp_path / "[1]").touch()  # it is there
    assert "(`hf download`)" not in refusal("import", tmp_path / "[1]", *ask[2:])
    (tmp_path / "away").rename(tmp_path / "model-shared.pt")
    assert f"--output: {last} " in refusal(*ask[:2], "--output", last, "--force")
    call(*ask)
