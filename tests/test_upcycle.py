"""``smoe upcycle``: a dense model's experts are copies, and translate as it did until they are trained."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from commands import FAIRSEQ, generate, run, run_python
from fairseq import checkpoint_utils
from test_average import AVERAGE, KILLED, Program, changed
from test_checkpoint_files import FULL, contents, rotted
from test_expert_parallel import flags
from test_expert_parallel_checkpoints import call, refusal
from test_malicious_checkpoints import older
from test_model import PAD, make_batch
from test_training import PLUGIN, log_lines
from test_training import train as train_smoe

import smoe_fairseq.models  # noqa: F401  (as --user-dir does)
from smoe_fairseq.models.transformer import moe_blocks

SIZES = "--encoder-embed-dim 48 --encoder-ffn-embed-dim 64".split()


@pytest.fixture(scope="module")
def dense(small_corpus, tmp_path_factory) -> Path:
    """A dense model of ours, trained long enough to have something to lose."""
    folder = tmp_path_factory.mktemp("dense")
    more = ("--dropout", 0.05, "--disable-validation", "--save-interval", 1000)
    train_smoe(small_corpus, folder, "--moe-freq", 0, "--max-update", 40, *more)
    return folder / "checkpoint_last.pt"


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


def distance(path: Path, original: Path, data: Path) -> float:
    """Of the outputs, the greatest difference over their standard deviation."""
    ours, dense = (outputs(loaded(p, data)) for p in (path, original))
    return float((ours - dense).abs().max() / dense.std())


@pytest.mark.parametrize(
    "words",
    [
        "--smoe-strata 4",
        "--smoe-strata 4 --moe-freq 1 --moe-gate-normalization before-drop --moe-top-k 3",
        "--encoder-moe-freq 0 --decoder-smoe-strata 8 --decoder-moe-freq 1",
        "--smoe-strata 4 --moe-balance bias --moe-second-expert-policy all",
    ],
)
@pytest.mark.parametrize("source", ["ours", "stock"])
def test_one_stratum_answers_as_the_dense_model(request, dense, pre_norm, tmp_path, source, words):
    path = dense if source == "ours" else pre_norm
    data = request.getfixturevalue("small_corpus" if source == "ours" else "corpus")
    call("upcycle", path, *words.split(), "--output", tmp_path / "up.pt")
    model, original = (loaded(p, data) for p in (tmp_path / "up.pt", path))
    assert moe_blocks(model) and not moe_blocks(original)
    assert torch.allclose(outputs(model), outputs(original), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "words, part",
    [
        ("--smoe-strata 4-4", 0.25),
        ("--smoe-strata 4 --smoe-chain 2", 0.4),
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
    near = [distance(tmp_path / f"{seed}.pt", dense, small_corpus) for seed in (1, 2)]

    def full(state):
        for name, tensor in state["model"].items():
            if ".layer_norms." in name:
                block, rest = name.split(".layer_norms.")
                tensor.copy_(state["model"][f"{block}.layer_norms.0{rest[1:]}"])

    changed(tmp_path / "1.pt", tmp_path / "full.pt", full)
    far = distance(tmp_path / "full.pt", dense, small_corpus)
    assert near[0] != near[1] and max(near) < far * part


def test_a_whole_command_line(dense, small_corpus, tmp_path):
    """Translations are the dense model's, training goes on from its loss, over processes too."""
    output = tmp_path / "up.pt"
    strata = ("--smoe-strata", 4, "--moe-freq", 1)
    call("upcycle", dense, *strata, "--output", output)
    user_dir = ("--user-dir", PLUGIN)
    translations = generate(small_corpus, output, *user_dir)
    expected = generate(small_corpus, dense, *user_dir)
    assert {n: words for n, (_, words) in translations.items()} == {
        n: words for n, (_, words) in expected.items()
    }
    go_on = ("--max-update", 1, "--dropout", 0, "--lr", 1e-9, "--moe-capacity-factor", 0)
    first = {}
    for name, more in (
        ("up", (*strata, "--finetune-from-model", output)),
        ("dense", ("--moe-freq", 0, "--finetune-from-model", dense)),
        ("scratch", strata),
    ):
        process = train_smoe(small_corpus, tmp_path / name, *go_on, *more)
        first[name] = float(log_lines(process)[0]["nll_loss"])
    assert first["up"] == pytest.approx(first["dense"], abs=2e-3)
    assert first["scratch"] > first["up"] + 0.5


def test_processes_take_their_own_experts(ranks, dense, small_corpus, tmp_path):
    call("upcycle", dense, "--smoe-strata", "4-4", "--output", tmp_path / "up.pt")
    more = (*SIZES, "--smoe-strata", "4-4", "--expert-parallel", "--max-update", 1, "--lr", 1e-9)
    words = flags(small_corpus, tmp_path / "run", *more)
    ranks.train(tmp_path / "run", 2, *words, "--finetune-from-model", tmp_path / "up.pt")
    source = load(tmp_path / "up.pt")["model"]["encoder.layers.1.moe.experts.w1"]
    for rank in (0, 1):
        model = load(tmp_path / f"run/checkpoint_last-rank-{rank}.pt")["model"]
        own = model["encoder.layers.1.moe.experts.w1"]
        assert own.shape[0] == 4 and torch.allclose(own, source[:4], atol=1e-6)


def load(path: Path) -> dict:
    return torch.load(path, weights_only=True)


W1 = "decoder.layers.1.moe.experts.w1"


def test_noise_and_seed(dense, tmp_path):
    def made(*words):
        call(
            "upcycle", dense, "--smoe-strata", 4, *words, "--output", tmp_path / "up.pt", "--force"
        )
        return load(tmp_path / "up.pt")["model"]

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
    assert (config["smoe_strata"], config["moe_freq"], config["encoder_embed_dim"]) == (
        "4-4",
        2,
        48,
    )
    for name, tensor in source["model"].items():
        replaced = ".layers.1." in name and ("fc" in name or "final_layer_norm" in name)
        assert (name not in made["model"]) == replaced
        assert replaced or name.endswith("_tensor") or torch.equal(tensor, made["model"][name])
    tied = [made["model"][f"{side}.embed_tokens.weight"] for side in ("encoder", "decoder")]
    assert tied[0].data_ptr() == tied[1].data_ptr()


@pytest.mark.parametrize("age", ["args", "nested"])
def test_other_ways_to_say_of_what_model_it_is(corpus, pre_norm, tmp_path, age):
    """The flat command line of older checkpoints, and the nested config of fairseq-hydra-train."""

    def rewritten(state):
        if age == "args":
            state.update(older(state))
            return
        flat = state["cfg"]["model"]
        values = dict(flat if isinstance(flat, dict) else vars(flat))
        nested = {"_name": "transformer", "encoder": {}, "decoder": {}}
        for name, value in values.items():
            side, _, inner = name.partition("_")
            if side in ("encoder", "decoder"):
                nested[side][inner] = value
        state["cfg"]["model"] = nested

    path = changed(pre_norm, tmp_path / "source.pt", rewritten)
    call("upcycle", path, "--smoe-strata", 4, "--output", tmp_path / "up.pt")
    assert distance(tmp_path / "up.pt", pre_norm, corpus) < 1e-6


WRONG = {
    "--moe-freq 0": "--moe-freq 0: no layer would have experts; expected 1 or more",
    "--moe-freq 3": "--moe-freq 3 for the encoder: expected 0 (dense) to its 2 layers",
    "--moe-top-k 1": "--moe-top-k 1: a token's experts have to weigh one in all",
    "--moe-top-k 9": "--moe-top-k 9: a gate of --smoe-strata 4-4 sees 4 experts",
    "--moe-gate-normalization none": "--moe-gate-normalization none: a token's experts have",
    "--moe-gate relu": "--moe-gate relu: a token's experts have to weigh one in all",
    "--moe-gate threshold": "--moe-gate threshold: a token's experts have to weigh one in all",
    "--moe-gate depths --smoe-strata 4": "--moe-gate depths: a token's experts have to weigh one in all",
    "--moe-gate top-p": "--moe-gate top-p: a token's experts have to weigh one in all",
    "--moe-null-experts 2 --moe-top-k 3": "--moe-null-experts 2: a token's experts have to weigh",
    "--moe-copy-experts 1": "--moe-copy-experts 1: a token's experts have to weigh one in all",
    "--moe-stacked": "--moe-stacked: the FFN would count twice; expected none",
    "--moe-cmr --smoe-strata 4": "--moe-cmr: the FFN would count twice; expected none",
    "--moe-output-init-scale 0.5": "--moe-output-init-scale 0.5: experts are copies of the FFN",
    "--moe-expert-ffn-dim 32": "--moe-expert-ffn-dim 32: experts are copies of the FFN; expected 0",
    "--smoe-norm released": " released: it normalises what the dense model left as it was",
    "--smoe-strata 4,4,4": "--smoe-strata 4,4,4: expected one value of the encoder, which has 1",
    "--noise -1": "--noise -1.0: expected 0 or a positive number",
    "--noise nan": "--noise nan: expected 0 or a positive number",
}


@pytest.mark.parametrize("words", WRONG)
def test_options_that_make_no_such_model(dense, tmp_path, words):
    asked = ("upcycle", dense, *words.split(), "--output", tmp_path / "new/up.pt")
    assert WRONG[words] in refusal(*asked)
    assert not list(tmp_path.iterdir())


def set_option(name: str, value):
    def change(state):
        model = state["cfg"]["model"]
        (model if isinstance(model, dict) else vars(model))[name] = value

    return change


OTHERS = {
    "holds a model of architecture lstm: expected fairseq's transformer, or": set_option(
        "arch", "lstm"
    ),
    "was trained with --no-cross-attention True, which smoe_transformer has not": set_option(
        "no_cross_attention", True
    ),
    "lacks encoder.layers.0.fc1.weight, which a model of its options has": lambda s: s["model"].pop(
        "encoder.layers.0.fc1.weight"
    ),
    "lacks decoder.embed_tokens.weight: expected a transformer": lambda s: s["model"].pop(
        "decoder.embed_tokens.weight"
    ),
    "has decoder.adapter, for which smoe_transformer has no place": lambda s: s["model"].update(
        {"decoder.adapter": torch.ones(2)}
    ),
    "encoder.layers.1.fc1.weight is (3, 32), which its options do not make": lambda s: s[
        "model"
    ].update({"encoder.layers.1.fc1.weight": torch.ones(3, 32)}),
    "more in its model is no tensor of real numbers": lambda s: s["model"].update(more="x"),
    "its model has no options": lambda s: s["cfg"].update(model=None),
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
    assert (
        f"{post_norm} is post-norm in its encoder: experts take the place of pre-norm" in sentence
    )
    assert "--encoder-normalize-before --decoder-normalize-before" in sentence
    call("upcycle", dense, *ask)
    again = refusal(
        "upcycle", tmp_path / "up.pt", "--smoe-strata", 4, "--output", tmp_path / "2.pt"
    )
    assert "has experts already: expected a dense model (--moe-freq 0)" in again


def test_damaged_and_malicious_files(dense, tmp_path):
    (tmp_path / "cut.pt").write_bytes(dense.read_bytes()[:5000])
    rotted(dense, tmp_path / "rotted.pt")
    trace = tmp_path / "trace"
    changed(dense, tmp_path / "bad.pt", lambda state: state.update(more=Program(trace)))
    before = contents(tmp_path)
    for name, words in (
        ("cut.pt", "is cut off or not a checkpoint"),
        ("rotted.pt", "is damaged: "),
        ("bad.pt", "holds eval (a type or function), which is not loaded"),
        ("none.pt", "is missing"),
    ):
        ask = ("upcycle", tmp_path / name, "--output", tmp_path / "up.pt")
        assert f"{tmp_path / name} {words}" in refusal(*ask)
    assert contents(tmp_path) == before


def test_nothing_is_overwritten_unasked(dense, tmp_path):
    source, output = shutil.copy(dense, tmp_path), tmp_path / "up.pt"
    output.write_text("old")
    ask = ("upcycle", source, "--smoe-strata", 4, "--output")
    assert "is there already; --force" in refusal(*ask, output)
    assert f"--output: {source} is what is read" in refusal(*ask, source, "--force")
    assert output.read_text() == "old"
    call(*ask, output, "--force")
    assert load(output)["model"]


def test_without_room_and_after_a_kill_what_was_there_stays(dense, tmp_path):
    output = tmp_path / "up.pt"
    output.write_text("old")
    ask = ("upcycle", dense, "--smoe-strata", 4, "--output", output, "--force")
    result = run_python(FULL + AVERAGE, *ask, server=FAIRSEQ)
    assert result.returncode == 1 and "Traceback" not in result.stdout
    words = f"error: --output {output} cannot be saved: File too large; files"
    assert result.stdout.splitlines()[-1].startswith(words)
    assert contents(tmp_path) == {"up.pt": b"old"}
    assert run_python(KILLED + AVERAGE, *ask, server=FAIRSEQ).returncode == -9
    assert sorted(contents(tmp_path).values()) == [b"half", b"old"]
    assert (tmp_path / "up.pt").read_text() == "old"
    call(*ask)
    assert list(contents(tmp_path)) == ["up.pt"] and load(output)["model"]


def test_the_command_as_typed(dense, tmp_path):
    output = tmp_path / "up.pt"
    words = ("--smoe-strata", "4-4", "--moe-freq", 1, "--output", output)
    said = run("smoe", "upcycle", dense, *words).stdout
    assert " INFO " not in said
    assert f"{output}: 4 MoE layers, whose experts are copies of the FFNs of {dense}" in said
    shown = re.search(r"--arch smoe_transformer (.+)$", said, re.M)[1]
    assert shown == f"SIZES --smoe-strata 4-4 --moe-freq 1 --finetune-from-model {output}"
