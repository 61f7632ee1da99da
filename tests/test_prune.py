"""``smoe prune``: which experts go, what is left of the checkpoint, and what is no request."""

import json
import math
import re
from pathlib import Path

import handmade
import pytest
import torch
from commands import PLUGIN, changed, contents, generate, load, run, smoe, untrained
from family import FAMILY
from plain_loops import make_block
from test_expert_parallel import flags
from test_expert_parallel_checkpoints import call, refusal
from test_training import train as train_smoe

from smoe_fairseq.analysis import inputs
from smoe_fairseq.analysis.prune import PrunedLayer, sizes_of_gate
from smoe_fairseq.analysis.prune import prune as prune_content
from smoe_fairseq.models.transformer import moe_blocks
from smoe_fairseq.modules.gates import GATES

NEVER, SELDOM = -100.0, -3.0  # logits beside those of the other experts
SIDES = ("encoder", "decoder")


@pytest.fixture(scope="module")
def trained(small_corpus, tmp_path_factory) -> Path:
    """A checkpoint of 2-2-2-2 whose translations differ from sentence to sentence."""
    folder = tmp_path_factory.mktemp("trained")
    flags = ("--max-update", 60, "--dropout", 0, "--disable-validation", "--store-ema")
    train_smoe(small_corpus, folder, *flags, "--save-interval", 1000)
    return folder / "checkpoint_last.pt"


def with_logits(source: Path, path: Path, logits: dict[int, float]) -> Path:
    """A checkpoint whose gates add these to the logits of experts, whatever the token.

    One component of what a gate gets is made 1 for all tokens.
    """

    def change(state):
        model = state["model"]
        for name, weight in model.items():
            if re.search(r"\.moe\.layer_norms\.\d+\.", name):
                weight[0] = float(name.endswith("bias"))
            if gate := re.search(r"\.moe\.gates\.(\d+)\.weight", name):
                weight[:, 0] = 0
                experts = len(model[f"{name[: gate.start()]}.moe.experts.b1"])
                # It sees the later ones, and in a stack its own.
                stacked = state["cfg"]["model"]["moe_stacked"]
                first = int(gate[1]) * len(weight) if stacked else experts - len(weight)
                for expert, logit in logits.items():
                    if first <= expert < first + len(weight):
                        weight[expert - first, 0] = logit

    return changed(source, path, change)


def prune(data: Path, path: Path, output: Path, *words) -> str:
    """What the command prints."""
    return smoe("prune", path, data, "--cpu", "--output", output, *words).stdout


def strata_of(path: Path) -> list[str]:
    settings = load(path)["cfg"]["model"]
    return [settings[f"{side}_smoe_strata"] for side in SIDES]


def kept_of(printed: str) -> dict[str, list[int]]:
    """By layer, of the command's table."""
    rows = re.findall(r"^(\w+ layer \d)  +(.*)$", printed, re.M)
    return {name: list(map(int, re.split("  +", cells)[2].split())) for name, cells in rows}


def assert_same_translations(data: Path, one: Path, other: Path) -> set[str]:
    """Which are returned."""
    # Models that have learnt nothing go on to the longest translation.
    short = ("--user-dir", PLUGIN, "--max-len-b", 8)
    before, after = (generate(data, path, *short) for path in (one, other))
    assert {i: text for i, (_, text) in before.items()} == {i: t for i, (_, t) in after.items()}
    assert all(abs(before[i][0] - after[i][0]) < 2e-4 for i in before)
    return {text for _, text in before.values()}


# What is taken out


def test_experts_that_were_never_chosen_go_without_a_trace(trained, small_corpus, tmp_path):
    path = with_logits(trained, tmp_path / "full.pt", {1: NEVER, 4: NEVER, 5: NEVER})
    output = tmp_path / "new/pruned.pt"
    printed = prune(small_corpus, path, output, "--min-load", 0)
    kept = [0, 2, 3, 6, 7]
    assert kept_of(printed) == {"encoder layer 1": kept, "decoder layer 1": kept}
    assert "2-2-2-2  1-2-0-2  " in printed and "1 4 5    0.0%" in printed
    assert "10 of 16 experts" in printed and "note:" not in printed
    assert strata_of(output) == ["1-2-0-2", "1-2-0-2"]
    assert len(assert_same_translations(small_corpus, path, output)) > 10


MEMBERS = "bias chain expert-choice layers simple threshold top-p".split()
MEMBERS = {name: FAMILY[name] for name in MEMBERS} | {"stacked": "--smoe-strata 4-4 --moe-stacked"}


@pytest.mark.soak
@pytest.mark.parametrize("member", MEMBERS)
def test_so_they_do_in_the_family(ranks, small_corpus, tmp_path, member):
    """Where the softmax over all experts has a part in it, it is 0 here for the two that go."""
    words = [*MEMBERS[member].split(), "--max-update", 3]
    ranks.train(tmp_path, 1, *flags(small_corpus, tmp_path, *words), one=True)
    last, path, output = (tmp_path / f"{n}.pt" for n in ("checkpoint_last", "full", "pruned"))
    half = kept_of(prune(small_corpus, last, output, "--keep", 0.5))
    assert {len(experts) for experts in half.values()} == {4}
    assert len(generate(small_corpus, output, "--user-dir", PLUGIN)) == 50
    if member == "expert-choice":  # no expert is never chosen
        return
    gone = {1, 2} if member == "stacked" else {1, 4}  # later layers of a stack have no norm
    with_logits(last, path, dict.fromkeys(gone, NEVER))
    printed = prune(small_corpus, path, output, "--min-load", 0, "--force")
    assert not gone & {expert for experts in kept_of(printed).values() for expert in experts}
    by_softmax = member in ("bias", "top-p")
    assert ("note: these gates use" in printed) == by_softmax

    # These alone: of others that the references did not choose, a search may have chosen some.
    model, _ = inputs.load(path, small_corpus)
    layers = {
        name: PrunedLayer(
            block.strata,
            sorted({*range(block.strata.num_experts)} - gone),
            sizes_of_gate(block),
        )
        for name, block in moe_blocks(model).items()
    }
    torch.save(prune_content(path, layers), output)
    assert_same_translations(small_corpus, path, output)


def test_a_plugins_gate_need_not_say_which_tensors_have_experts(monkeypatch):
    class Own(GATES["topk"]):
        def __init__(self, config, embed_dim, num_experts, own_experts):
            super().__init__(config, embed_dim, num_experts, own_experts)
            self.own = torch.nn.Parameter(torch.ones(2, num_experts))
            self.other = torch.nn.Parameter(torch.ones(6))

    monkeypatch.setitem(GATES, "own", Own)
    block = make_block("2-4", gate="own", balance="bias", second_expert_policy="all")
    layer = PrunedLayer(block.strata, [0, 3, 4], sizes_of_gate(block))
    whole = {
        f"gates.{n}.{m}": t for n, g in enumerate(block.gates) for m, t in g.state_dict().items()
    }
    kept = {name: layer.pruned(name, tensor) for name, tensor in whole.items()}
    assert torch.equal(kept["gates.0.own"], whole["gates.0.own"][:, [0, 3, 4]])
    assert torch.equal(kept["gates.1.own"], whole["gates.1.own"][:, [1, 2]])
    for name in ("gates.1.weight", "gates.1.bias.steps"):
        assert torch.equal(kept[name], whole[name][[1, 2]])
    assert kept["gates.1.other"] is whole["gates.1.other"]


@pytest.mark.soak
@pytest.mark.parametrize(
    "words, kept",
    [
        (("--min-load", 0), [0, 1]),  # a second choice is one
        (("--min-load", 3), [0, 1]),  # as many as a gate chooses, whatever the load
        (("--keep", 0.75), [0, 1, 2]),  # of equals the first
    ],
)
def test_first_and_second_choices(two_choices, small_corpus, tmp_path, words, kept):
    """All tokens choose expert 0 and then expert 1."""
    printed = prune(small_corpus, two_choices, tmp_path / "pruned.pt", *words)
    assert kept_of(printed) == {"encoder layer 1": kept, "decoder layer 1": kept}
    assert_same_translations(small_corpus, two_choices, tmp_path / "pruned.pt")


@pytest.fixture(scope="module")
def two_choices(ranks, small_corpus, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two-choices")
    words = ["--smoe-strata", "4", "--max-update", 1]
    ranks.train(folder, 1, *flags(small_corpus, folder, *words), one=True)
    return with_logits(folder / "checkpoint_last.pt", folder / "full.pt", {0: 100, 1: 50})


# What is left of the checkpoint


@pytest.fixture(scope="module")
def halved(trained, small_corpus, tmp_path_factory) -> tuple[Path, dict[str, list[int]]]:
    """A checkpoint, and the experts that are left in it."""
    output = tmp_path_factory.mktemp("halved") / "checkpoint.pt"
    printed = prune(small_corpus, trained, output, "--keep", 0.5)
    assert "8 of 16 experts" in printed
    return output, kept_of(printed)


def test_all_that_stays_keeps_its_bits(trained, halved):
    output, kept = halved
    before, after = load(trained), load(output)
    assert before["model"].keys() == after["model"].keys()
    for name, tensor in before["model"].items():
        experts = kept[f"{name.split('.')[0]} layer 1"]
        if ".moe.experts." in name:
            tensor = torch.stack([tensor[e] for e in experts])
        elif ".moe.gates." in name:
            first = 8 - len(tensor)
            tensor = torch.stack([tensor[e - first] for e in experts if e >= first])
        assert torch.equal(after["model"][name], tensor), name
    assert "last_optimizer_state" not in after and "ema" in before["extra_state"]
    assert "ema" not in after["extra_state"]
    assert after["optimizer_history"] == before["optimizer_history"]
    tied = [after["model"][f"{side}.embed_tokens.weight"] for side in SIDES]
    assert tied[0].data_ptr() == tied[1].data_ptr()  # as in the file before
    assert output.stat().st_size < trained.stat().st_size / 2


@pytest.mark.soak
def test_every_other_command_takes_it(halved, small_corpus, tmp_path):
    path, _ = halved
    encoder, decoder = strata_of(path)
    of_run = (small_corpus, "--path", path, "--cpu")
    run("fairseq-validate", *of_run, "--user-dir", PLUGIN, "--max-tokens", 400)
    handmade.analyze(small_corpus, path, tmp_path / "analysis")
    found = json.loads((tmp_path / "analysis/run.json").read_text())["strata"]
    assert found == {"encoder.layer.1": encoder, "decoder.layer.1": decoder}
    cost = json.loads(smoe("cost", "--path", path, "--json").stdout)
    names = {name for name in load(path)["smoe_experts"]["parameters"]}
    tied = {"decoder.embed_tokens.weight", "decoder.output_projection.weight"}
    sizes = [t.numel() for n, t in load(path)["model"].items() if n in names - tied]
    assert cost["parameters"] == sum(sizes)
    train_smoe(
        *(small_corpus, tmp_path / "finetuned", "--finetune-from-model", path, "--max-update", 1),
        *("--encoder-smoe-strata", encoder, "--decoder-smoe-strata", decoder, "--lr", 0),
        "--disable-validation",
    )
    model, finetuned = load(path)["model"], load(tmp_path / "finetuned/checkpoint_last.pt")["model"]
    assert all(torch.equal(finetuned[name], model[name]) for name in names)


def test_its_record_lets_it_be_spread_over_processes(two_choices, small_corpus, tmp_path):
    full = with_logits(two_choices, tmp_path / "full.pt", {0: 100, 1: 50, 2: 20, 3: 10})
    path = changed(full, tmp_path / "uneven.pt", even_out_encoder)
    words = ("--min-load", 0, "--sentences", 9, "--gen-subset", "train")
    printed = prune(small_corpus, path, tmp_path / "pruned.pt", *words)
    assert "over train of src-tgt" in printed
    assert strata_of(tmp_path / "pruned.pt") == ["4", "2"]
    record = load(tmp_path / "pruned.pt")["smoe_experts"]
    assert record["num_experts"] == 4 and record["other_layers"] == {"decoder.layers.1.moe": 2}
    words = ("--world-size", 2, "--output", tmp_path / "set.pt")
    call("reshard", tmp_path / "pruned.pt", *words)
    shares = [load(tmp_path / f"set-rank-{rank}.pt")["model"] for rank in (0, 1)]
    assert [len(s["encoder.layers.1.moe.experts.w1"]) for s in shares] == [2, 2]
    assert [len(s["decoder.layers.1.moe.experts.w1"]) for s in shares] == [1, 1]
    sentence = refusal("reshard", tmp_path / "pruned.pt", "--world-size", 3, *words[2:], "--force")
    assert "cannot be spread evenly over 3 ranks" in sentence


def even_out_encoder(state) -> None:
    """In the encoder the gate has a logit for each token alone."""
    state["model"]["encoder.layers.1.moe.gates.0.weight"][:, 0] = 0


# What is no request


def test_requests_that_are_not_clear(trained, pre_norm, corpus, small_corpus, tmp_path):
    output = tmp_path / "pruned.pt"
    for words, named in {
        "": "--keep",
        "--keep 1 --min-load 0": "--min-load",
        **{each: each for each in ("--keep 0", "--keep 1.5", "--keep nan", "--min-load inf")},
        "--min-load 0 --over all": "--over all",
        "--keep 1 --lang-pairs en-xx": "--lang-pairs en-xx",
        "--keep 1 --gen-subset test2": "--gen-subset test2",
    }.items():
        ask = ("prune", trained, small_corpus, *words.split(), "--output", output)
        assert named in refusal(*ask)
    dense = ("prune", pre_norm, corpus, "--keep", 0.5, "--output", output)
    assert f"{pre_norm} is a dense model: expected one with MoE layers" in refusal(*dense)
    missing = ("prune", trained, tmp_path / "none", "--keep", 0.5, "--output", output)
    assert f"{tmp_path / 'none'} is missing" in refusal(*missing)
    itself = ("prune", trained.parent, small_corpus, "--keep", 1, "--output", trained, "--force")
    assert str(trained) in refusal(*itself)
    assert not list(tmp_path.iterdir())


def test_a_model_that_has_diverged_is_named(trained, small_corpus, tmp_path):
    name = "encoder.layers.1.moe.gates.0.weight"
    path = changed(trained, tmp_path / "nan.pt", lambda state: state["model"][name].fill_(math.nan))
    ask = ("prune", path, small_corpus, "--keep", 0.5, "--output", tmp_path / "pruned.pt")
    assert f"{path}: {name} has NaN or infinite values" in refusal(*ask)
    assert [file.name for file in tmp_path.iterdir()] == ["nan.pt"]


@pytest.mark.soak
@pytest.mark.parametrize(
    "options, why",
    [
        ({"moe_gate": "hash", "smoe_strata": "8"}, "--moe-gate hash,"),
        ({"moe_gate": "hash-topk", "smoe_strata": "8"}, "--moe-gate hash-topk,"),
        ({"moe_gate_residual": "layers"}, "--moe-gate-residual"),
    ],
)
def test_gates_that_need_all_experts_are_refused(sparse, small_corpus, tmp_path, options, why):
    path = untrained(sparse, tmp_path / "untrained.pt", small_corpus, **options)
    ask = ("prune", path, small_corpus, "--min-load", 0, "--output", tmp_path / "pruned.pt")
    said = refusal(*ask)
    assert str(path) in said and why in said
    assert not (tmp_path / "pruned.pt").exists()


@pytest.mark.soak
def test_a_set_is_consolidated_first(trained, small_corpus, tmp_path):
    call("reshard", trained, "--world-size", 2, "--output", tmp_path / "set.pt")
    before = contents(tmp_path)
    for name in ("set.pt", "set-rank-0.pt"):
        ask = ("prune", tmp_path / name, small_corpus, "--keep", 0.5)
        words = refusal(*ask, "--output", tmp_path / "pruned.pt")
        assert f"{tmp_path / name} is of a set with --expert-parallel" in words
        assert f"by smoe consolidate {tmp_path / 'set.pt'} --output FILE" in words
    assert contents(tmp_path) == before
    call("consolidate", tmp_path / "set.pt", "--output", tmp_path / "whole.pt")
    prune(small_corpus, tmp_path / "whole.pt", tmp_path / "pruned.pt", "--keep", 0.5)
