"""``smoe upcycle``: a dense model's experts are copies, and translate as it did until they are trained."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from commands import PLUGIN, changed, config_of, contents, generate, load, put, refused, untrained
from fairseq import checkpoint_utils
from sampling import soak
from test_expert_parallel_checkpoints import call, refusal
from test_malicious_checkpoints import older
from test_model import PAD, make_batch
from test_training import train as train_smoe

import smoe_fairseq.models  # noqa: F401  (as --user-dir does)
from smoe_fairseq.models.transformer import moe_blocks
from smoe_fairseq.modules.branches import SharedExperts
from smoe_fairseq.modules.registry import BRANCHES

SIZES = "--encoder-embed-dim 48 --encoder-ffn-embed-dim 64".split()


def loaded(path: Path, data: Path):
    models, _, _ = checkpoint_utils.load_model_ensemble_and_task(
        [str(path)], arg_overrides={"data": str(data)}
    )
    return models[0].eval()


def outputs(model) -> torch.Tensor:
    """``(tokens, V)`` at words that all dictionaries here have; experts leave padding alone, FFNs do not."""
    batch = make_batch(vocabulary=14)
    with torch.no_grad():
        return model(*batch)[0][batch[2] != PAD]


def distance(path: Path, expected: torch.Tensor, data: Path) -> float:
    """From the outputs of the dense model, the greatest difference over their standard deviation."""
    return float((outputs(loaded(path, data)) - expected).abs().max() / expected.std())


@pytest.mark.parametrize(
    "source, words",
    [
        ("stock", "--smoe-strata 4"),
        ("ours", "--smoe-strata 4 --moe-freq 1 --moe-gate-normalization before-drop --moe-top-k 3"),
        ("stock", "--encoder-moe-freq 0 --decoder-smoe-strata 8 --decoder-moe-freq 1"),
        ("ours", "--smoe-strata 4 --moe-balance bias --moe-second-expert-policy all"),
    ],
)
def test_one_stratum_answers_as_the_dense_model(request, tmp_path, source, words):
    names = ("dense", "small_corpus") if source == "ours" else ("pre_norm", "corpus")
    path, data = map(request.getfixturevalue, names)
    answers_alike(path, data, tmp_path / "up.pt", words.split())


def answers_alike(path: Path, data: Path, output: Path, words: list[str]) -> None:
    call("upcycle", path, *words, "--output", output)
    model, original = (loaded(p, data) for p in (output, path))
    assert moe_blocks(model) and not moe_blocks(original)
    assert torch.allclose(outputs(model), outputs(original), rtol=0, atol=1e-5)


def test_a_tied_matrix_that_the_file_leaves_out(dense, small_corpus, tmp_path):
    """As fairseq's older checkpoints do."""
    gone = lambda state: state["model"].pop("decoder.output_projection.weight")  # noqa: E731
    path = changed(dense, tmp_path / "dense.pt", gone)
    answers_alike(path, small_corpus, tmp_path / "up.pt", ["--smoe-strata", "4"])


def test_gated_ffns_become_gated_experts(dense, small_corpus, tmp_path):
    path = untrained(dense, tmp_path / "gated.pt", small_corpus, activation_fn="swiglu")
    answers_alike(path, small_corpus, tmp_path / "up.pt", ["--smoe-strata", "4"])


@pytest.mark.parametrize(
    "words, part",
    [
        ("--smoe-strata 4-4", 0.25),
        soak("--smoe-strata 4 --smoe-chain 2", 0.4),
        ("--smoe-strata 2-2-2-2 --moe-freq 1", 0.65),
    ],
)
def test_several_strata_begin_near_it_whatever_the_gates_choose(
    dense, small_corpus, tmp_path, words, part
):
    """Nearer than a model that meets the FFN in full wherever a token stops; biases it meets all the same."""
    for seed in (1, 2):
        output = tmp_path / f"{seed}.pt"
        call("upcycle", dense, *words.split(), "--seed", seed, "--output", output)
    expected = outputs(loaded(dense, small_corpus))
    near = [distance(tmp_path / f"{seed}.pt", expected, small_corpus) for seed in (1, 2)]
    one, two = (load(tmp_path / f"{seed}.pt")["model"] for seed in (1, 2))
    assert any(not torch.equal(one[name], two[name]) for name in one if ".gates." in name)

    def full(state):
        for name, tensor in state["model"].items():
            if ".layer_norms." in name:
                block, rest = name.split(".layer_norms.")
                tensor.copy_(state["model"][f"{block}.layer_norms.0{rest[1:]}"])

    changed(tmp_path / "1.pt", tmp_path / "full.pt", full)
    far = distance(tmp_path / "full.pt", expected, small_corpus)
    assert max(near) < far * part


def test_embeddings_stay_apart_where_the_dense_model_had_them_apart(
    dense, small_corpus, tmp_path, capsys
):
    """Shared, one of them would silently be lost; the printed flags keep both."""

    def divide(state):
        state["cfg"]["model"].update(share_all_embeddings=False)
        encoder = "encoder.embed_tokens.weight"
        state["model"][encoder] = state["model"][encoder] + 1

    apart = changed(dense, tmp_path / "apart.pt", divide)
    call("upcycle", apart, "--smoe-strata", 4, "--output", tmp_path / "up.pt")
    _, _, words = capsys.readouterr().out.partition("--arch smoe_transformer ")
    assert "--encoder-ffn-embed-dim 64 " in words and "--no-share-all-embeddings " in words
    train = (small_corpus, tmp_path / "run", "--max-update", 1, "--lr", 0, *words.split())
    refused(train_smoe(*train, "--share-all-embeddings", check=False), "up.pt", "--share-")
    train_smoe(*train)
    trained = load(tmp_path / "run/checkpoint_last.pt")["model"]
    assert all(
        torch.equal(trained[n], t) for n, t in load(apart)["model"].items() if "embed_t" in n
    )


W1 = "decoder.layers.1.moe.experts.w1"


def test_noise_and_seed(dense, tmp_path):
    def made(*words):
        output = tmp_path / "up.pt"
        call("upcycle", dense, "--smoe-strata", 4, *words, "--output", output, "--force")
        return load(output)["model"]

    plain, noisy = made(), made("--noise", 0.1)
    assert all(torch.equal(expert, plain[W1][0]) for expert in plain[W1])
    drawn = noisy[W1] - plain[W1]
    assert drawn.std() / plain[W1].std() == pytest.approx(0.1, rel=0.05)
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.equal(made("--noise", 0.1)[W1], noisy[W1])
    assert not torch.equal(made("--noise", 0.1, "--seed", 2)[W1], noisy[W1])
    gate = "decoder.layers.1.moe.gates.0.weight"
    assert torch.allclose(made("--moe-gate-init-scale", 0.5)[gate], plain[gate] / 2)


def test_what_the_file_holds_beside_the_experts(dense, tmp_path):
    call("upcycle", dense, "--smoe-strata", "4-4", "--output", tmp_path / "new/up.pt")
    made, source = load(tmp_path / "new/up.pt"), load(dense)
    assert "last_optimizer_state" not in made
    assert made["smoe_dictionaries"] == source["smoe_dictionaries"]
    config = made["cfg"]["model"]
    expected = {"smoe_strata": "4-4", "moe_freq": 2, "encoder_embed_dim": 48}
    assert expected.items() <= config.items()
    for name, tensor in source["model"].items():
        replaced = ".layers.1." in name and ("fc" in name or "final_layer_norm" in name)
        assert (name not in made["model"]) == replaced
        assert replaced or name.endswith("_tensor") or torch.equal(tensor, made["model"][name])
    tied = [made["model"][f"{side}.embed_tokens.weight"] for side in ("encoder", "decoder")]
    assert tied[0].data_ptr() == tied[1].data_ptr()


def test_the_command_that_is_printed_has_the_task(dense, tmp_path, capsys):
    flags = {"langs": ["a", "b"], "lang_pairs": ["a-b"], "encoder_langtok": "tgt"}
    flags |= {"lang_tok_style": "mbart", "lang_tok_replacing_bos_eos": True}
    flags |= {"fixed_dictionary": "model/dict.txt"}
    task = Namespace(task="translation_multi_simple_epoch", **flags)
    path = changed(dense, tmp_path / "dense.pt", lambda state: state["cfg"].update(task=task))
    call("upcycle", path, "--smoe-strata", 4, "--output", tmp_path / "up.pt")
    words = capsys.readouterr().out
    flags = ["--langs a,b", "--lang-pairs a-b", "--encoder-langtok tgt", "--criterion smoe_"]
    flags += ["--lang-tok-style mbart", "--lang-tok-replacing-bos-eos "]
    flags += ["--fixed-dictionary model/dict.txt"]
    assert all(flag in words for flag in (f"--task {task.task}", *flags))
    task.lang_pairs = [f"a-b{i}" for i in range(200)]  # more than anybody has text of
    path = changed(dense, tmp_path / "all.pt", lambda state: state["cfg"].update(task=task))
    call("upcycle", path, "--smoe-strata", 4, "--output", tmp_path / "up2.pt")
    assert "--lang-pairs PAIRS " in capsys.readouterr().out


def test_a_published_model_without_state_of_its_training_translates(corpus, pre_norm, tmp_path):
    expected = generate(corpus, pre_norm, "--user-dir", PLUGIN)
    for more in ((), ("extra_state",)):
        path = tmp_path / f"{len(more)}.pt"
        torch.save({name: load(pre_norm)[name] for name in ("cfg", "model", *more)}, path)
        assert generate(corpus, path, "--user-dir", PLUGIN) == expected


@pytest.mark.parametrize("age", ["args", "nested"])
def test_other_ways_to_say_of_what_model_it_is(corpus, pre_norm, tmp_path, age):
    """The flat command line of older checkpoints, and the nested config of fairseq-hydra-train."""

    def rewritten(state):
        if age == "args":
            state.update(older(state))
            return
        nested = {"_name": "transformer", "encoder": {}, "decoder": {}}
        for name, value in config_of(state, "model").items():
            side, _, inner = name.partition("_")
            if side in ("encoder", "decoder"):
                nested[side][inner] = value
        state["cfg"]["model"] = nested

    path = changed(pre_norm, tmp_path / "source.pt", rewritten)
    call("upcycle", path, "--smoe-strata", 4, "--output", tmp_path / "up.pt")
    assert distance(tmp_path / "up.pt", outputs(loaded(pre_norm, corpus)), corpus) < 1e-6


WRONG = """
    --moe-freq 0
    --moe-freq 3
    --moe-top-k 1
    --moe-gate-normalization none
    --moe-gate relu
    --moe-gate depths --smoe-strata 4
    --moe-null-experts 2 --moe-top-k 3
    --moe-copy-experts 1
    --moe-stacked
    --moe-cmr --smoe-strata 4
    --moe-output-init-scale 0.5
    --moe-expert-ffn-dim 32
    --smoe-norm released
    --smoe-strata 4,4,4
    --smoe-strata abc
    --noise -1
    --noise nan
"""


@pytest.mark.parametrize("words", [line.strip() for line in WRONG.strip().splitlines()])
def test_options_that_make_no_such_model(dense, tmp_path, words):
    asked = ("upcycle", dense, *words.split(), "--output", tmp_path / "new/up.pt")
    sentence = refusal(*asked)
    assert words.split()[0] in sentence and str(dense) not in sentence  # which is sound
    assert not list(tmp_path.iterdir())


def test_a_plugins_branch_would_change_the_output(dense, tmp_path, monkeypatch):
    monkeypatch.setitem(BRANCHES, "wide", SharedExperts)
    words = ("--smoe-strata", "4", "--moe-branches", "wide", "--output", tmp_path / "up.pt")
    assert "--moe-branches wide" in refusal("upcycle", dense, *words)


def set_option(name: str, value):
    return lambda state: config_of(state, "model").update({name: value})


OTHERS = {  # by what the sentence names
    "lstm": set_option("arch", "lstm"),
    "--no-cross-attention;": set_option("no_cross_attention", True),
    "--decoder-output-dim 8": set_option("decoder_output_dim", 8),
    "encoder.layers.0.fc1.weight": lambda s: s["model"].pop("encoder.layers.0.fc1.weight"),
    "decoder.embed_tokens.weight": lambda s: s["model"].pop("decoder.embed_tokens.weight"),
    "decoder.adapter": put("decoder.adapter", torch.ones(2)),
    "(3, 32)": put("encoder.layers.1.fc1.weight", torch.ones(3, 32)),
}


@pytest.mark.parametrize("words", OTHERS)
def test_checkpoints_that_cannot_be_upcycled(pre_norm, tmp_path, words):
    path = changed(pre_norm, tmp_path / "other.pt", OTHERS[words])
    sentence = refusal("upcycle", path, "--smoe-strata", 4, "--output", tmp_path / "up.pt")
    assert words in sentence and str(path) in sentence
    assert list(contents(tmp_path)) == ["other.pt"]


def test_post_norm_and_experts_are_refused(post_norm, dense, tmp_path):
    ask = ("--smoe-strata", 4, "--output", tmp_path / "up.pt")
    sentence = refusal("upcycle", post_norm, *ask)
    assert f"{post_norm} is post-norm in its encoder" in sentence
    assert "--encoder-normalize-before --decoder-normalize-before" in sentence
    call("upcycle", dense, *ask)
    again = refusal("upcycle", tmp_path / "up.pt", *ask[:3], tmp_path / "2.pt")
    assert "has experts: expected a dense model (--moe-freq 0)" in again
