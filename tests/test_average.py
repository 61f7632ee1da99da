"""``smoe average``: the mean of weights, of files and of sets, and what is no mean of anything."""

import os
import shlex
import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import PLUGIN, changed, generate, load, put
from test_expert_parallel import flags
from test_expert_parallel_checkpoints import call, refusal
from test_family_training import member_flags
from test_training import train as train_smoe

from smoe_fairseq.checkpoints import average, sets
from smoe_fairseq.checkpoints.content import fingerprint
from smoe_fairseq.checkpoints.model import of_training
from smoe_fairseq.checkpoints.reading import made_of
from smoe_fairseq.checkpoints.sets import Shards
from smoe_fairseq.compat.checkpoint_names import rank_file
from smoe_fairseq.models.options import SMoETransformerConfig
from smoe_fairseq.recipes.folders import whole_checkpoint

SAVED = (1, 2, 3, 4)  # updates


@pytest.fixture(scope="module")
def run_of_one(small_corpus, tmp_path_factory) -> Path:
    """The folder of a run with a checkpoint of each update."""
    folder = tmp_path_factory.mktemp("run-of-one")
    each = ("--save-interval-updates", 1, "--batch-size", 4, "--max-update", SAVED[-1])
    train_smoe(small_corpus, folder, *each, "--disable-validation")
    assert sorted(p.name for p in folder.glob("checkpoint_1_*")) == names()
    return folder


def names(updates=SAVED) -> list[str]:
    return [f"checkpoint_1_{update}.pt" for update in updates]


def assert_is_mean(path: Path, models: list[dict]) -> None:
    """That of numpy, in float64."""
    averaged = load(path)["model"]
    assert averaged.keys() == models[0].keys()
    for name, value in averaged.items():
        assert value.dtype == torch.float32
        mean = sum(model[name].double().numpy() for model in models) / len(models)
        assert np.array_equal(value.numpy(), mean.astype(np.float32)), name


W1 = "encoder.layers.1.moe.experts.w1"


def test_the_mean_is_that_of_numpy_in_float64_and_all_else_the_last_ones(run_of_one, tmp_path):
    files, output = [run_of_one / name for name in names((2, 3, 4))], tmp_path / "new/mean.pt"
    call("average", *files, "--output", output)
    averaged, states = load(output), [load(file) for file in files]
    models = [state["model"] for state in states]
    assert_is_mean(output, models)
    assert not any(torch.equal(averaged["model"][W1], model[W1]) for model in models)
    in_float32 = sum(model[W1] for model in models) / 3
    assert not torch.equal(averaged["model"][W1], in_float32)
    assert "last_optimizer_state" not in averaged
    assert averaged["optimizer_history"] == states[-1]["optimizer_history"]
    assert averaged["smoe_experts"]["num_updates"] == 4
    tied = [averaged["model"][f"{side}.embed_tokens.weight"] for side in ("encoder", "decoder")]
    assert tied[0].data_ptr() == tied[1].data_ptr()  # as in the files
    assert output.stat().st_size < os.path.getsize(files[0]) / 2


def test_the_newest_of_a_folder(run_of_one, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run_of_one, folder)
    call("average", folder, "--last", 3, "--output", tmp_path / "mean.pt")
    assert_is_mean(tmp_path / "mean.pt", [load(folder / n)["model"] for n in names((2, 3, 4))])

    for epoch, update in ((9, 1), (10, 2), (8, 3)):  # 10 is newer than 9
        shutil.copy(folder / names((update,))[0], folder / f"checkpoint{epoch}.pt")
    assert "--by epoch" in refusal("average", folder, "--last", 2, "--output", tmp_path / "x.pt")
    ask = ("average", folder, "--last", 2, "--by")
    call(*ask, "epoch", "--output", tmp_path / "epochs.pt")
    assert_is_mean(tmp_path / "epochs.pt", [load(folder / n)["model"] for n in names((1, 2))])
    for update in (7, 9):  # of a training before this one
        shutil.copy(folder / names((2,))[0], folder / names((update,))[0])
    assert names((9,))[0] in refusal(*ask, "update", "--output", tmp_path / "x.pt")


def test_a_mean_is_of_the_last_checkpoints_whatever_their_times(run_of_one, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run_of_one, folder)

    def lines() -> tuple[str, ...]:
        mean, lines = whole_checkpoint(folder, "average:2")
        assert mean == folder / "averaged/checkpoint_average_2.pt"
        return lines

    call(*shlex.split(lines()[-1])[1:])
    assert lines() == ()
    for file in folder.rglob("*.pt"):  # as a copy without its times
        os.utime(file, (1, 1) if "average" in file.name else None)
    assert lines() == ()
    (folder / names()[-1]).unlink()
    os.utime(folder / names()[-3], (1, 1))
    assert names()[-3] in lines()[-1]
    (folder / "of-2-ranks").mkdir()  # where resharding keeps it
    (folder / names()[-3]).rename(folder / "of-2-ranks" / names()[-3])
    assert f"of-2-ranks/{names()[-3]}" in lines()[-1]


def test_a_folder_in_which_training_replaces_checkpoints(run_of_one, tmp_path, monkeypatch):
    """The newest that are there when the first is opened are averaged."""
    folder, original = tmp_path / "run", sets.weights_of
    folder.mkdir()
    for name in names((1, 2)):
        shutil.copy(run_of_one / name, folder)

    def weights_of(path):
        if path.name == "checkpoint_1_1.pt":
            shutil.copy(run_of_one / names()[2], folder)
            path.unlink()
        return original(path)

    monkeypatch.setattr(sets, "weights_of", weights_of)
    call("average", folder, "--last", 2, "--output", tmp_path / "mean.pt")
    assert_is_mean(tmp_path / "mean.pt", [load(run_of_one / n)["model"] for n in names((2, 3))])
    (folder / names()[2]).write_bytes(b"damaged")
    assert names()[2] in refusal("average", folder, "--last", 2, "--output", tmp_path / "x.pt")


def whole_model(path: Path) -> dict:
    return Shards.open(path, False).state_for(world_size=1)["model"]


@pytest.mark.soak
def test_sets_of_several_processes(ranks, small_corpus, tmp_path):
    """By the folder, by the names of sets, and by a shell's ``*``, which names every file."""
    folder = tmp_path / "run"
    each = ("--save-interval-updates", 1, "--expert-parallel", "--max-update", 3, "--store-ema")
    ranks.train(folder, 2, *flags(small_corpus, folder, *each))
    sets = [folder / name for name in names((2, 3))]
    call("average", folder, "--last", 2, "--output", tmp_path / "folder.pt")
    call("average", *sets, "--output", tmp_path / "sets.pt")
    files = [rank_file(path, rank) for path in sets for rank in (0, 1)]
    call("average", *files, "--output", tmp_path / "files.pt")
    for name in ("folder.pt", "sets.pt", "files.pt"):
        assert_is_mean(tmp_path / name, [whole_model(path) for path in sets])
    copies = [shutil.copy(rank_file(sets[1], r), rank_file(tmp_path / "c.pt", r)) for r in (0, 1)]
    call("average", *files, *map(Path, copies), "--output", tmp_path / "copies.pt")
    assert_is_mean(tmp_path / "copies.pt", [whole_model(path) for path in sets])
    content = load(tmp_path / "sets.pt")
    assert len(content["model"][W1]) == 8
    assert content["smoe_experts"]["world_size"] == 1 and "ema" not in content["extra_state"]
    assert len(generate(small_corpus, tmp_path / "sets.pt", "--user-dir", PLUGIN)) == 50
    rank_file(shutil.copy(files[0], tmp_path / "alone-rank-0.pt"), 0)
    words = "alone-rank-1.pt is missing: the set has 2 files"
    alone = tmp_path / "alone-rank-0.pt"
    assert words in refusal("average", alone, sets[0], "--output", tmp_path / "x.pt")
    assert not (tmp_path / "x.pt").exists()


def test_a_stock_model_and_numbers_of_16_bits(pre_norm, tmp_path):
    def times(factor):
        return lambda state: state.update(
            model={
                name: factor * (tensor if factor == 2 else tensor.half())  # one has 32 bits
                for name, tensor in state["model"].items()
            }
        )

    files = [changed(pre_norm, tmp_path / f"{n}.pt", times(n)) for n in (1, 2, -1)]
    call("average", *files, "--output", tmp_path / "mean.pt")
    assert_is_mean(tmp_path / "mean.pt", [load(file)["model"] for file in files])


def test_what_one_file_shares_and_another_does_not(run_of_one, tmp_path):
    """Embeddings that were tied first are each summed by themselves."""
    name = "decoder.embed_tokens.weight"
    files = [run_of_one / names()[0], run_of_one / names()[1]]
    tied = load(files[0])["model"][name]
    files.append(changed(files[1], tmp_path / "untied.pt", put(name, torch.ones_like(tied))))
    call("average", *files, "--output", tmp_path / "mean.pt")
    assert_is_mean(tmp_path / "mean.pt", [load(file)["model"] for file in files])


@pytest.mark.soak
def test_counts_are_the_last_ones_and_tables_have_to_agree(ranks, small_corpus, tmp_path, capsys):
    for member in ("bias", "hash"):
        folder = tmp_path / member
        more = ("--save-interval-updates", 1, "--max-update", 3)
        ranks.train(folder, 1, *member_flags(member, small_corpus, folder, *more), one=True)
        files = [folder / name for name in names((1, 2, 3))]
        capsys.readouterr()
        call("average", *files, "--output", folder / "mean.pt")
        said = "(*.steps) are those of" in capsys.readouterr().out
        assert said == (member == "bias")
        first, last, mean = (load(f)["model"] for f in (files[0], files[-1], folder / "mean.pt"))
        whole = [name for name, tensor in last.items() if not tensor.is_floating_point()]
        assert whole and all(torch.equal(mean[name], last[name]) for name in whole)
        differ = any(not torch.equal(first[name], last[name]) for name in whole)
        assert differ == (member == "bias")
    name = next(name for name in whole if name.endswith("table"))
    other = changed(files[1], tmp_path / "other.pt", put(name, last[name].flip(0)))
    sentence = refusal("average", files[0], other, "--output", tmp_path / "x.pt")
    assert f"{other}: {name} has other whole numbers" in sentence


OTHERS = {  # by what the sentence names
    f"{W1} is (8, 2, 3)": put(W1, torch.ones(8, 2, 3)),
    "torch.int64": lambda s: put(W1, s["model"][W1].long())(s),
    W1: lambda s: s["model"].pop(W1),
    "more is (1,)": put("more", torch.ones(1)),
    "--moe-top-k 1": lambda s: s["cfg"]["model"].update(moe_top_k=1),
    "--smoe-exit-bias 1.0": lambda s: s["cfg"]["model"].update(smoe_exit_bias=1.0),
    "dictionary": lambda s: s["smoe_dictionaries"]["source"].update(sha256="0"),
    f"{W1} has NaN": lambda s: s["model"][W1].view(-1)[3:4].fill_(float("inf")),
    "wide": put("wide", torch.ones(1).expand(10**13)),
}


@pytest.mark.parametrize("words", OTHERS)
def test_what_has_no_mean_is_refused(run_of_one, tmp_path, words):
    other = changed(run_of_one / names()[1], tmp_path / "other.pt", OTHERS[words])
    sentence = refusal("average", run_of_one / names()[0], other, "--output", tmp_path / "mean.pt")
    assert words in sentence and str(other) in sentence
    assert [path.name for path in tmp_path.iterdir()] == ["other.pt"]


def test_copies_of_a_file_count_once(run_of_one, tmp_path):
    one, two = (run_of_one / name for name in names()[:2])
    copies = [Path(shutil.copy(one, tmp_path / f"{name}.pt")) for name in ("best", "last")]
    output = tmp_path / "mean.pt"
    call("average", one, two, *copies, "--output", output)
    assert_is_mean(output, [load(file)["model"] for file in (one, two)])
    assert load(output)["optimizer_history"] == load(two)["optimizer_history"]
    for files in ([one], [one, copies[0]]):
        assert "is one checkpoint" in refusal("average", *files, "--output", tmp_path / "m.pt")


def test_requests_that_are_not_clear(run_of_one, tmp_path):
    one, two = (run_of_one / name for name in names()[:2])
    (tmp_path / "copies").mkdir()
    for name in ("checkpoint_1_1.pt", "checkpoint_9_99.pt"):
        copied = Path(shutil.copy(one, tmp_path / "copies" / name))
    for words, sentence in (
        ([one, two, one], f"{one} is named twice"),
        ([copied.parent, "--last", 2], f"{copied} is a copy"),
        ([run_of_one], "is a folder: add --last N"),
        ([one, two, "--by", "update"], "--by update: expected --last with it"),
        ([one, two, "--last", 2], "--last 2: expected one folder"),
        ([run_of_one, "--last", 1], "--last 1: expected 2 or more"),
        ([run_of_one, "--last", 9], "has 4 checkpoints"),
        ([run_of_one, "--last", 2, "--by", "epoch"], "has 0 checkpoints of an epoch"),
    ):
        assert sentence in refusal("average", *words, "--output", tmp_path / "mean.pt")
    assert list(tmp_path.iterdir()) == [copied.parent]


def test_files_of_one_name_in_two_folders(run_of_one, tmp_path):
    other = Path(shutil.copy(run_of_one / names()[1], tmp_path / names()[0]))
    call("average", run_of_one / names()[0], other, "--output", tmp_path / "mean.pt")
    models = [load(run_of_one / name)["model"] for name in names()[:2]]
    assert_is_mean(tmp_path / "mean.pt", models)
    known = made_of(tmp_path / "mean.pt")
    assert set(known.values()) == {fingerprint(path) for path in (run_of_one / names()[0], other)}


def test_what_may_differ(run_of_one, tmp_path, capsys):
    """Settings of training; a language that one lacks, as when it was fine-tuned; what fairseq sets when
    training starts; seeds, with a warning.
    """

    def change(state):
        state["cfg"]["model"].update(dropout=0.5, moe_capacity_factor=1.0, freeze="encoder")
        state["cfg"]["model"].update(max_target_positions=90)
        state["smoe_dictionaries"].pop("target")
        state["cfg"]["common"].update(seed=7)
        task = {"langtoks": {"main": ("tgt", None)}, "langs": ["a", "b"], "lang_dict": "langs.txt"}
        state["cfg"]["task"].update(task)

    files = [run_of_one / names()[0], changed(run_of_one / names()[1], tmp_path / "o.pt", change)]
    call("average", *files, "--output", tmp_path / "mean.pt")
    assert_is_mean(tmp_path / "mean.pt", [load(file)["model"] for file in files])
    (warning,) = (x for x in capsys.readouterr().err.splitlines() if x.startswith("warning: "))
    assert "--seed" in warning and all(str(file) in warning for file in files)
    assert of_training({}) < {*SMoETransformerConfig.names()}
    for n in (0, 1):  # experts that choose tokens do so within their limit, in evaluation, too
        gate = {"moe_gate": "expert-choice", "moe_capacity_factor": n + 1.0}
        set_gate = lambda state: state["cfg"]["model"].update(gate)  # noqa: B023, E731
        files[n] = changed(run_of_one / names()[n], tmp_path / f"{n}.pt", set_gate)
    named = refusal("average", *files, "--output", tmp_path / "mean.pt", "--force")
    assert "--moe-capacity-factor" in named


def test_settings_may_be_of_the_model_or_of_its_sides(run_of_one, tmp_path):
    def change(state):
        model = state["cfg"]["model"]
        for name in ("moe_freq", "smoe_strata"):
            for side in ("encoder", "decoder"):
                model[f"{side}_{name}"] = model[name]
        model.update(moe_freq=7, smoe_strata="9-9")

    one, two = (run_of_one / name for name in names()[:2])
    other = changed(two, tmp_path / "other.pt", change)
    call("average", one, other, "--output", tmp_path / "mean.pt")
    assert_is_mean(tmp_path / "mean.pt", [load(file)["model"] for file in (one, two)])


def test_what_cannot_be_written_is_known_before_the_work(tmp_path, monkeypatch):
    """On a file system that may be read only, and below a file; what is read is not even there."""
    files = ["no-checkpoint-1.pt", "no-checkpoint-2.pt"]
    (tmp_path / "file").touch()
    sentence = refusal("average", *files, "--output", tmp_path / "file/sub/mean.pt")
    assert f"mean.pt cannot be written: {tmp_path / 'file'} is not a folder" in sentence
    monkeypatch.setattr("os.access", lambda path, _: Path(path) != tmp_path)
    sentence = refusal("average", *files, "--output", tmp_path / "new/mean.pt")
    assert f"mean.pt cannot be written: no permission in {tmp_path}" in sentence
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_memory_holds_one_sum_and_one_checkpoint(run_of_one, tmp_path, monkeypatch):
    """Of sets, whose experts are copied: the one before has gone when the next is read."""
    for name in names((1, 2)):
        call("reshard", run_of_one / name, "--world-size", 2, "--output", tmp_path / name)
    alive, original = [], sets.weights_of

    def weights_of(path):
        assert not [one for one in alive if one() is not None]
        state = original(path)
        alive.append(weakref.ref(state["model"][W1]))
        return state

    monkeypatch.setattr(sets, "weights_of", weights_of)
    average.average([tmp_path / name for name in names((1, 2))])
    assert len(alive) == 2
