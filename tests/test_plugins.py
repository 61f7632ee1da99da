"""Parts from outside of the package: docs/plugins/balancing.py, by the recipes and in Python."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from commands import config_of, load, refused, run, run_step, smoe, succeeded, train
from plain_loops import PADDING, D, make_block, make_input
from sampling import soak
from serving import JSON, Serving
from test_recipes import ROOT

from smoe_fairseq import plugins
from smoe_fairseq.modules import StratifiedMoE
from smoe_fairseq.modules.registry import REGISTRIES

PLUGIN = ROOT / "docs/plugins/balancing.py"
METHOD = """plugins: [gates/balancing.py]
train: {moe-gate: sinkhorn, moe-gate-options: rounds=7, smoe-strata: 4-4, moe-branches: scale,
  moe-losses: confidence_loss=0.5}
"""
LOSS = """from smoe_fairseq.modules.losses import register_loss
@register_loss("{}")
def mine(block, stats):
    return {}
"""
SMALL = [
    *("--encoder-embed-dim", "32", "--encoder-ffn-embed-dim", "32", "--max-tokens", "500"),
    *("--max-update", "4", "--max-epoch", "1", "--warmup-updates", "2"),
]


@pytest.fixture(scope="module")
def balancing():
    """The plugin's module, imported here; afterwards nothing of it is left."""
    before = {kind: dict(registry) for kind, registry in REGISTRIES.items()}
    plugins.import_plugin(str(PLUGIN))
    import balancing

    yield balancing
    for kind, registry in REGISTRIES.items():
        for name in registry.keys() - before[kind].keys():
            del registry[name]
    plugins.imported.clear()


def test_parts_that_are_not_registered_are_named():
    for options in ({"gate": "sinkhorn"}, {"branches": "scale"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            StratifiedMoE(D, D, **options)
    with pytest.raises(ValueError, match="gate_options"):
        StratifiedMoE(D, D, gate_options="rounds=3")
    said = smoe("cost", "--moe-gate", "sinkhorn", check=False)
    assert said.returncode == 2 and "SMOE_PLUGINS" in said.stderr


@pytest.mark.parametrize("term", [soak("0.5"), "stats.balance_loss.expand(2)"])
def test_a_loss_that_is_no_scalar_is_named(small_corpus, tmp_path, term):
    (tmp_path / "own.py").write_text(LOSS.format("mine", term))
    words = ["--user-dir", f"{ROOT}/smoe_fairseq:{tmp_path}/own.py", "--moe-losses", "mine=0.1"]
    words += ["--arch", "smoe_transformer_tiny", "--criterion", "smoe_label_smoothed_cross_entropy"]
    refused(train(small_corpus, tmp_path / "run", *words, check=False), "mine")
    assert not list(tmp_path.rglob("checkpoint*.pt"))


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """A folder with a run of a method that names the plugin, and the environment of its recipes."""
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(prepared / "data", folder / "data")
    shutil.copytree(prepared / "configs", folder / "configs")
    (folder / "configs/gates").mkdir()
    shutil.copy(PLUGIN, folder / "configs/gates")
    (folder / "configs/methods/balanced.yaml").write_text(METHOD)
    given = {"CONFIG_DIR": str(folder / "configs"), "OMP_NUM_THREADS": "1", "GPUS": "0"}
    search = "--beam 1 --max-len-a 0 --max-len-b 5".split()
    for step, flags in (("train", SMALL), ("evaluate", search)):
        # Not in this process, which would keep the plugin.
        succeeded(run_step(step, "tiny", "balanced", *flags, cwd=folder, **given))
    return folder, given


def test_a_run_is_trained_evaluated_and_tabled_with_its_flops(trained):
    folder, given = trained
    log = (folder / "runs/tiny/balanced/train.log").read_text()
    assert "confidence_loss" in log and "experts_per_token" in log
    assert json.loads((folder / "runs/tiny/balanced/scores.json").read_text())["scores"]
    assert " balanced" in run_step("table", "tiny", cwd=folder, **given).stdout
    flags = "--arch smoe_transformer_tiny --smoe-strata 4-4 --vocab-size 100 --json".split()
    costs = [
        json.loads(run("smoe", "cost", *flags, *own, SMOE_PLUGINS=str(PLUGIN)).stdout)
        for own in (["--moe-gate", "sinkhorn"], [])
    ]
    assert costs[0] == costs[1]  # top-2 each


@pytest.mark.soak
def test_a_study_analyses_a_method_that_names_a_plugin(trained):
    folder, given = trained
    said = run_step("study", "tiny", "balanced", "--dry-run", cwd=folder, **given)
    *_, analyze = succeeded(said).stdout.rstrip().split(" && ")
    succeeded(run("/bin/bash", "-c", analyze, cwd=folder, fresh=True))
    assert (folder / "runs/tiny/balanced/routing/blocks.csv").exists()


def test_commands_read_the_checkpoint_if_the_plugin_is_named(trained, monkeypatch, balancing):
    folder, _ = trained
    path, gates = "runs/tiny/balanced", str(folder / "configs/gates/balancing.py")
    best = f"{path}/checkpoint_best.pt"
    data = "data/tiny/bin"
    for words, made in (
        (["analyze", data, "--path", best, "--output", "report"], "report"),
        (["prune", best, data, "--keep", "0.5", "--output", "pruned.pt"], "pruned.pt"),
        (["export", path, "--to", "huggingface", "--output", "hf"], "hf/config.json"),
    ):
        smoe(*words, cwd=folder)
        assert (folder / made).exists()
    words = ("translate", path, "--from", "en", "--to", "fr")
    refused(run("smoe", *words, check=False, cwd=folder), "balancing")
    said = run("smoe", *words, cwd=folder, stdin="a dog\n", SMOE_PLUGINS=gates)
    assert said.stdout.strip()
    monkeypatch.setenv("SMOE_PLUGINS", gates)
    with Serving(path, folder=folder) as server:
        body = json.dumps({"text": "a dog", "source": "en", "target": "fr"})
        status, _, answer = server.request("POST", "/translate", body, JSON)
    assert status == 200 and said.stdout.split("\n")[0] in answer.decode()
    config = json.loads((folder / "hf/config.json").read_text())
    assert config["moe_gate_options"] == "rounds=7"
    assert config["plugins"]["gate sinkhorn"] == "balancing"
    assert config["moe_losses"] == {"confidence_loss": 0.5}


MISSING = ["nowhere.py", "no_such_module", "smoe_fairseq/nowhere.py", f"{ROOT}/docs", "a.py,b.py"]


@pytest.mark.parametrize("named", MISSING)
def test_a_plugin_that_is_missing_is_named(named, monkeypatch):
    monkeypatch.setenv("SMOE_PLUGINS", named)
    said = refused(smoe("path", check=False), named)
    assert "__init__.py" in said
    assert ("/" in named or named.endswith(".py")) == (str(Path(named).absolute()) in said)


GATE = "from smoe_fairseq.modules.gates import register_gate\n@register_gate('mine')\n"
OTHERS = [  # a plugin, and what the sentence names
    (PLUGIN.read_text().replace('"sinkhorn"', '"topk"'), "topk"),
    *((LOSS.format(name, 0), name) for name in ("nll_loss", "moe_l1_loss", "moe_z_loss", "a=b")),
    *((GATE + gate, "own.py") for gate in ("class G:\n    pass\n", "class G\n")),
    *((f"\n{line}\n", "own.py: ") for line in ("x = y", "1 / 0", "import none_such")),
]


@pytest.mark.parametrize("content, named", OTHERS, ids=range(len(OTHERS)))
def test_a_name_that_is_taken_or_another_class_is_refused(tmp_path, content, named):
    (tmp_path / "own.py").write_text(content)
    refused(run("smoe", "path", check=False, SMOE_PLUGINS=str(tmp_path / "own.py")), named)


@pytest.mark.parametrize("method", ["logits", "combine"])
def test_an_output_of_another_shape_is_refused(method):
    block = StratifiedMoE(D, D, strata="4", shared_experts=1)
    part = block.gates[0] if method == "logits" else block.branches[0]
    setattr(part, method, lambda x, *_: x[:, :1])
    with pytest.raises(ValueError, match=method):
        block(torch.randn(3, D))


def test_a_default_that_the_plugin_changes_is_not_that_of_an_older_checkpoint(
    small_corpus, tmp_path
):
    words = ["--user-dir", f"{ROOT}/smoe_fairseq:{tmp_path}/own.py", "--moe-gate", "sinkhorn"]
    words += ["--arch", "smoe_transformer_tiny", "--max-update", "2"]
    words += ["--criterion", "smoe_label_smoothed_cross_entropy"]
    (tmp_path / "own.py").write_text(PLUGIN.read_text())
    succeeded(train(small_corpus, tmp_path / "run", *words))
    saved = config_of(load(tmp_path / "run/checkpoint_last.pt"), "model")
    assert saved["moe_gate_options"] == "rounds=20"
    succeeded(train(small_corpus, tmp_path / "run", *words, "--max-update", "3"))
    changed = PLUGIN.read_text().replace('"rounds": 20', '"rounds": 2')
    (tmp_path / "own.py").write_text(changed)
    said = train(small_corpus, tmp_path / "run", *words, "--max-update", "4", check=False)
    refused(said, "--moe-gate-options rounds=20")


@pytest.mark.parametrize("wrong", ["rounds=many", "rounds=nan", "turns=3", "rounds=1,rounds=3"])
def test_numbers_of_a_gate_are_checked(wrong, balancing):
    with pytest.raises(ValueError, match="gate_options"):
        StratifiedMoE(D, D, gate="sinkhorn", gate_options=wrong)


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("strata, top_k", [("8", 2), ("4-4", 1)])
@pytest.mark.parametrize("gate, rounds", [("sinkhorn", 20), ("sinkhorn", 1), ("quantile", 0)])
def test_choices_are_those_of_plain_loops(gate, rounds, strata, top_k, padding, balancing):
    x, mask = make_input(padding)
    own = {"gate_options": f"rounds={rounds}"} if rounds == 1 else {}
    block = make_block(strata, gate=gate, top_k=top_k, capacity_factor=0.0, branches="scale", **own)
    first = block.gates[0]
    for _ in range(2):
        h = block.layer_norms[0](x)[~mask]
        p = (h @ first.weight.t()).softmax(1).tolist()
        b = first.threshold.value().tolist() if gate == "quantile" else [0.0] * 8
        chosen = (
            balanced(p, rounds)
            if gate == "sinkhorn"
            else [[q - c for q, c in zip(r, b)] for r in p]
        )
        best = [sorted(range(8), key=lambda e: -row[e])[:top_k] for row in chosen]
        found = first(h, None).choice_TK
        assert found.tolist() == best
        y, stats = block(x, mask)
        assert torch.equal(y[mask], x[mask]) and "scale" in block.extra
        block.end_update(stats.observed)
        if gate == "quantile" and p:
            cutoff = [sorted(row)[-top_k - 1] for row in chosen]
            for e, got in enumerate(first.threshold.value().tolist()):
                over = sorted((r[e] - a for r, a in zip(p, cutoff)), reverse=True)
                want = over[round(top_k * len(p) / 8)]
                step = first.threshold.step
                want = want if b == [0.0] * 8 else b[e] + step * (want - b[e])
                assert got == pytest.approx(want, abs=1e-4)


def balanced(p: list[list[float]], rounds: int) -> list[list[float]]:
    for _ in range(rounds):
        for e in range(8):
            total = sum(row[e] for row in p)
            for row in p:
                row[e] /= total
        p = [[q / sum(row) for q in row] for row in p]
    return p
