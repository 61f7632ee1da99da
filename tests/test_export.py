"""``smoe export``: what other programs make of a checkpoint is what it was here."""

import importlib.util
import json
import math
import re
from pathlib import Path

import handmade
import pytest
import torch
from commands import (
    PLUGIN,
    changed,
    contents,
    generate,
    generation,
    hypotheses,
    load,
    run,
    run_python,
    succeeded,
    untrained,
    without,
)
from test_expert_parallel_checkpoints import call, refusal
from test_malicious_checkpoints import older
from test_upcycle import SIZES

from smoe_fairseq.modules import StratifiedMoE


@pytest.fixture(scope="module")
def mixed(sparse, small_corpus, tmp_path_factory) -> Path:
    """With other strata in the encoder than in the decoder, and what is no default."""
    options = {"smoe_strata": "2-2", "encoder_smoe_strata": "8", "decoder_moe_freq": 1}
    options |= {"moe_top_k": 2, "moe_gate_normalization": "none", "activation_fn": "geglu"}
    path = tmp_path_factory.mktemp("mixed") / "checkpoint_last.pt"
    return untrained(sparse, path, small_corpus, **options)


# fairseq's transformer


def test_fairseq_alone_translates_the_same(small_corpus, dense, tmp_path):
    output = tmp_path / "stock.pt"
    call("export", dense, "--to", "fairseq", "--output", output)
    words = ("fairseq-generate", *generation(small_corpus, output))
    assert str(PLUGIN) not in " ".join(map(str, words))
    stock = hypotheses(run(*words).stdout)
    ours = generate(small_corpus, dense, "--user-dir", PLUGIN)
    assert len(ours) == 50 and {n: words for n, (_, words) in stock.items()} == {
        n: words for n, (_, words) in ours.items()
    }
    assert all(stock[n][0] == pytest.approx(score, abs=2e-4) for n, (score, _) in ours.items())


def test_fairseq_alone_validates_and_trains_on(small_corpus, dense, tmp_path):
    output = tmp_path / "new/stock.pt"
    call("export", dense, "--to", "fairseq", "--output", output)
    words = (small_corpus, "--path", output, "--cpu", "--max-tokens", 400)
    assert " nll_loss " in run("fairseq-validate", *words).stdout
    config = load(output)["cfg"]
    assert config["model"].arch == "transformer" and config["model"].encoder_embed_dim == 48
    assert "smoe" not in repr({**config, "checkpoint": None, "common": None, "task": None})
    assert config["common"]["user_dir"] is None
    sizes = (
        "--encoder-layers 2 --decoder-layers 2 --decoder-embed-dim 48 --decoder-ffn-embed-dim 64"
    )
    sizes += " --encoder-attention-heads 4 --decoder-attention-heads 4 --share-all-embeddings"
    norms = ("--encoder-normalize-before", "--decoder-normalize-before")
    process = run(
        *("fairseq-train", small_corpus, "--arch", "transformer", *SIZES, *sizes.split(), *norms),
        *("--finetune-from-model", output, "--save-dir", tmp_path / "on", "--max-update", 1),
        *("--optimizer", "adam", "--max-tokens", 400, "--cpu", "--num-workers", 0),
    )
    assert "done training" in process.stdout


def test_what_is_no_stock_transformer_is_refused(mixed, pre_norm, tmp_path):
    ask = ("--to", "fairseq", "--output", tmp_path / "x.pt")
    assert f"{mixed} has experts" in refusal("export", mixed, *ask)
    assert "holds fairseq's transformer already" in refusal("export", pre_norm, *ask)
    path = changed(mixed, tmp_path / "old.pt", lambda state: state.update(older(state)))
    assert f"{path} has no cfg, " in refusal("export", path, *ask)
    ask = ("--to", "safetensors", "--output", tmp_path / "x.json")  # the options' name
    assert "x.json" in refusal("export", mixed, *ask)
    assert list(contents(tmp_path)) == ["old.pt"]


# CTranslate2


@pytest.fixture
def ctranslate2():
    return pytest.importorskip("ctranslate2", reason="the package ctranslate2 is not installed")


def test_ctranslate2_translates_the_same(ctranslate2, small_corpus, dense, tmp_path):
    """By ``--to ctranslate2``, and by its own converter from ``--to fairseq``."""
    said = run("fairseq-generate", *generation(small_corpus, dense), "--user-dir", PLUGIN).stdout
    expected = hypotheses(said)
    text = dict(re.findall(r"^S-(\d+)\t(.*)$", said, re.MULTILINE))
    call("export", dense, "--to", "ctranslate2", "--output", tmp_path / "model")
    call("export", dense, "--to", "fairseq", "--output", tmp_path / "stock.pt")
    files = ("--model_path", tmp_path / "stock.pt", "--data_dir", small_corpus)
    run("ct2-fairseq-converter", *files, "--output_dir", tmp_path / "own")
    source = [text[str(number)].split() for number in expected]
    target = [words.split() for _, words in expected.values()]
    assert len(set(map(tuple, target))) > 20  # the model says something of the text
    for folder in ("model", "own"):
        translator = ctranslate2.Translator(str(tmp_path / folder))
        scores = [
            sum(each.log_probs) / len(each.log_probs) / math.log(2)
            for each in translator.score_batch(source, target)
        ]
        assert scores == pytest.approx([score for score, _ in expected.values()], abs=2e-4)
        found = translator.translate_batch(source, beam_size=3, max_decoding_length=12)
        # Its search ends a hypothesis by rules of its own, so some differ from fairseq's.
        pairs = zip(found, target, strict=True)
        assert sum(each.hypotheses[0] == words for each, words in pairs) >= 40


def test_ctranslate2_takes_a_model_of_several_languages(ctranslate2, three_languages, tmp_path):
    """Its vocabulary has the tokens of languages, which the text begins with."""
    handmade.train(three_languages, tmp_path, *handmade.MULTILINGUAL, "--moe-freq", 0)
    path = tmp_path / "checkpoint_last.pt"
    call("export", path, "--to", "ctranslate2", "--output", tmp_path / "model")
    words = json.loads((tmp_path / "model/shared_vocabulary.json").read_text())
    assert len(words) == len(load(path)["model"]["encoder.embed_tokens.weight"])
    assert {f"__{language}__" for language in handmade.LANGUAGES} <= set(words)
    ctranslate2.Translator(str(tmp_path / "model")).translate_batch([["__bb__", words[4]]])


def test_what_ctranslate2_has_not_is_refused(ctranslate2, dense, mixed, tmp_path):
    ask = ("--to", "ctranslate2", "--output", tmp_path / "model")
    assert f"{mixed} has experts" in refusal("export", mixed, *ask)
    other = lambda state: state["cfg"]["model"].update(activation_fn="relu_squared")  # noqa: E731
    path = changed(dense, tmp_path / "mixed.pt", other)
    sentence = refusal("export", path, *ask)
    assert f"{path}: CTranslate2 does not convert this model: " in sentence
    assert "--activation-fn relu_squared" in sentence
    moved = lambda state: state["cfg"]["task"].update(data="gone")  # noqa: E731
    path = changed(dense, tmp_path / "moved.pt", moved)
    assert "dict.*.txt" in (said := refusal("export", path, *ask)) and "--data" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mixed.pt", "moved.pt"]


@pytest.mark.parametrize("to, file", [("ctranslate2", "model.bin"), ("huggingface", "config.json")])
def test_force_replaces_such_a_model_only(dense, tmp_path, to, file):
    pytest.importorskip({"huggingface": "transformers"}.get(to, to))
    ask = ("export", dense, "--to", to, "--output", tmp_path / "model")
    (tmp_path / "model").mkdir()
    for more in ((), ("--force",)):
        assert "--force" in refusal(*ask, *more) and not list((tmp_path / "model").iterdir())
    old = json.dumps({"model_type": "smoe_transformer"})
    (tmp_path / "model" / file).write_text(old)
    (tmp_path / "model/checkpoint-500").mkdir()  # of a trainer
    assert "checkpoint-500" in refusal(*ask, "--force")
    (tmp_path / "model/checkpoint-500").rmdir()
    call(*ask, "--force")
    assert (tmp_path / "model" / file).read_text("latin-1") != old


# safetensors


def exported(path: Path, output: Path) -> tuple[dict, dict]:
    from safetensors.torch import load_file

    call("export", path, "--to", "safetensors", "--output", output)
    return load_file(output), json.loads(output.with_suffix(".json").read_text())


def test_all_weights_and_options(mixed, tmp_path):
    tensors, content = exported(mixed, tmp_path / "new/model.safetensors")
    source = load(mixed)
    tied = content["tied"]
    left_out = {n for n in source["model"] if n.endswith((".version", "_float_tensor"))}
    assert tensors.keys() | tied.keys() == source["model"].keys() - left_out
    assert tied == {
        f"decoder.{name}.weight": "encoder.embed_tokens.weight"
        for name in ("embed_tokens", "output_projection")
    }
    for name, tensor in source["model"].items():
        assert name in left_out or torch.equal(tensors[tied.get(name, name)], tensor)
    assert content["model"]["smoe_strata"] == "2-2" and content["model"]["_name"]
    assert content["dictionaries"] == source["smoe_dictionaries"]
    layers = ("encoder.layers.1", "decoder.layers.0", "decoder.layers.1")
    assert list(content["blocks"]) == [f"{layer}.moe" for layer in layers]


WITH_TORCH_ALONE = """
import json
import torch
from safetensors.torch import load_file
from smoe_fairseq.modules import StratifiedMoE
weights, options = load_file(sys.argv[1]), json.load(open(sys.argv[2]))
x = torch.load(sys.argv[3])
for prefix, arguments in options["blocks"].items():
    block = StratifiedMoE(**arguments).eval()
    own = {n.removeprefix(prefix + "."): t for n, t in weights.items() if n.startswith(prefix + ".")}
    block.load_state_dict(own)
    x, _ = block(x)
assert "fairseq" not in sys.modules
torch.save(x.detach(), sys.argv[4])
"""


@pytest.mark.parametrize("is_old", [False, True])
def test_modules_alone_run_the_blocks(sparse, small_corpus, mixed, tmp_path, is_old):
    from fairseq import checkpoint_utils

    from smoe_fairseq.models.transformer import moe_blocks

    if is_old:  # without the norm of the output that one stratum has now
        options = {"smoe_strata": "8", "decoder_smoe_strata": "4-4", "smoe_norm": "released"}
        mixed = untrained(sparse, tmp_path / "old.pt", small_corpus, **options)
        gone = [f"encoder.layers.1.moe.layer_norms.1.{name}" for name in ("weight", "bias")]
        changed(mixed, mixed, lambda state: [state["model"].pop(name) for name in gone])
    output = tmp_path / "model.safetensors"
    exported(mixed, output)
    x = torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(2))
    torch.save(x, tmp_path / "x.pt")
    files = (output, output.with_suffix(".json"), tmp_path / "x.pt", tmp_path / "y.pt")
    succeeded(run_python(without("fairseq", "hydra", "omegaconf") + WITH_TORCH_ALONE, *files))
    models, _, _ = checkpoint_utils.load_model_ensemble_and_task(
        [str(mixed)], arg_overrides={"data": str(small_corpus)}
    )
    for block in moe_blocks(models[0].eval()).values():
        x, _ = block(x)
    assert torch.equal(torch.load(tmp_path / "y.pt"), x)


def test_a_hash_gate_takes_its_table_from_the_weights(recorded, tmp_path):
    tensors, content = exported(recorded / "hash.pt", tmp_path / "model.safetensors")
    prefix, arguments = next(iter(content["blocks"].items()))
    block = StratifiedMoE(**arguments, hash_table=tensors[f"{prefix}.gates.0.table"])
    own = {n.removeprefix(f"{prefix}."): t for n, t in tensors.items() if n.startswith(prefix)}
    block.load_state_dict(own)


def test_a_set_of_several_ranks_and_a_stock_model(sparse, pre_norm, tmp_path):
    call("reshard", sparse, "--world-size", 2, "--output", tmp_path / "set.pt")
    tensors, _ = exported(tmp_path / "set.pt", tmp_path / "set.safetensors")
    expected, _ = exported(sparse, tmp_path / "one.safetensors")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    tensors, content = exported(pre_norm, tmp_path / "stock.safetensors")
    assert content["blocks"] == {} and content["model"]["moe_freq"] == 0
    name = "encoder.layers.1.fc1.weight"
    assert torch.equal(tensors[name], load(pre_norm)["model"][name])


def test_without_the_library_one_sentence_says_how_to_get_it(dense, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    sentence = refusal("export", dense, "--to", "huggingface", "--output", tmp_path / "x")
    assert "pip install 'transformers" in sentence


# Both


def test_float16(mixed, dense, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    full, _ = exported(mixed, tmp_path / "full.safetensors")
    output = tmp_path / "half.safetensors"
    call("export", mixed, "--to", "safetensors", "--fp16", "--output", output)
    half = safetensors.load_file(output)
    assert half.keys() == full.keys()
    for name, tensor in full.items():
        assert torch.equal(half[name], tensor.half() if tensor.is_floating_point() else tensor)
    ask = ("export", dense, "--to", "fairseq", "--fp16", "--output", tmp_path / "x.pt")
    assert "--fp16 with --to fairseq" in refusal(*ask)
    name = "encoder.layers.1.moe.experts.w1"
    large = changed(mixed, tmp_path / "large.pt", lambda state: state["model"][name].fill_(1e5))
    ask = ("export", large, "--to", "safetensors", "--fp16", "--output", tmp_path / "x.safetensors")
    assert f"{name} has values above 65504; leave --fp16 out" in refusal(*ask)
    assert not (tmp_path / "x.safetensors").exists()
