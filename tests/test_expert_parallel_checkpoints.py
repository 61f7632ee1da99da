"""Sets of checkpoint files: for any number of processes, as one file, and when something is wrong."""

import shutil
from pathlib import Path

import pytest
import torch
from commands import PLUGIN, changed, contents, generate, load, refused, run, smoe
from test_expert_parallel import checkpoint, flags, furthest, whole

from smoe_fairseq.checkpoints.sets import Shards
from smoe_fairseq.cli import main
from smoe_fairseq.compat.checkpoint_names import rank_file
from smoe_fairseq.errors import UsageError
from smoe_fairseq.models.checks import same_bits
from smoe_fairseq.recipes.training.reshard import reshard

UPDATES = 2


@pytest.fixture(scope="module")
def set_of_2(ranks, small_corpus, tmp_path_factory) -> Path:
    """Folder of a run on 2 ranks, with the optimizer's state."""
    folder = tmp_path_factory.mktemp("set-of-2")
    arguments = flags(small_corpus, folder, "--expert-parallel", "--max-update", UPDATES)
    ranks.train(folder, 2, *arguments)
    return folder


@pytest.fixture(scope="module")
def resharded(set_of_2, tmp_path_factory) -> dict[str, Path]:
    """The same for 4 processes, of that for 1, of that for 2 again; and consolidated."""
    top = tmp_path_factory.mktemp("resharded")
    folders = {"2": set_of_2, **{name: top / name for name in ("4", "1", "2 again")}}
    for one, other in zip(list(folders)[:-1], list(folders)[1:], strict=True):
        command = ["reshard", folders[one] / "checkpoint_last.pt", "--world-size", other[0]]
        call(*command, "--output", folders[other] / "checkpoint_last.pt")
    folders["consolidated"] = top / "consolidated"
    output = folders["consolidated"] / "checkpoint_last.pt"
    call("consolidate", set_of_2 / "checkpoint_last.pt", "--output", output)
    return folders


def call(*words) -> None:
    assert main([str(word) for word in words]) == 0


def refusal(*words) -> str:
    return refused(smoe(*words, check=False))


def test_resharding_to_and_fro_changes_no_bit(resharded):
    before, after = checkpoint(resharded["2"]), checkpoint(resharded["2 again"])
    for one, other in zip(before.states, after.states, strict=True):
        tensors = [list(shards.tensors(s)) for shards, s in ((before, one), (after, other))]
        assert [name for name, _, _ in tensors[0]] == [name for name, _, _ in tensors[1]]
        assert len({name for name, _, experts in tensors[0] if experts}) == 2 * 4 * 3
        for (name, tensor, _), (_, again, _) in zip(*tensors, strict=True):
            assert same_bits(tensor, again), name
        assert one["smoe_experts"] == other["smoe_experts"]
        assert one["optimizer_history"] == other["optimizer_history"]
        position = [s["extra_state"]["train_iterator"] for s in (one, other)]
        assert position[0] == position[1] and position[0]["iterations_in_epoch"] == UPDATES


@pytest.mark.soak
def test_the_consolidated_checkpoint_needs_no_flag(small_corpus, resharded):
    path = resharded["consolidated"] / "checkpoint_last.pt"
    content = load(path)
    assert "last_optimizer_state" not in content
    whole_model = whole(resharded["2"])
    assert all(torch.equal(content["model"][name], value) for name, value in whole_model.items())
    assert len(generate(small_corpus, path, "--user-dir", PLUGIN)) == 50


def test_finetuning_from_a_whole_checkpoint(ranks, small_corpus, resharded, tmp_path):
    """Each process takes its experts of it."""
    source = resharded["consolidated"] / "checkpoint_last.pt"
    arguments = flags(small_corpus, tmp_path, "--expert-parallel", "--lr", 0, "--max-update", 1)
    ranks.train(tmp_path, 2, *arguments, "--finetune-from-model", source)
    assert furthest(whole(tmp_path), whole(resharded["2"])) == 0


def test_a_larger_set_of_the_same_name_goes_with_force(resharded, tmp_path):
    for path in resharded["4"].glob("*.pt"):
        shutil.copy(path, tmp_path)
    output, elsewhere = tmp_path / "checkpoint_last.pt", resharded["1"] / "checkpoint_last.pt"
    command = ["reshard", elsewhere, "--world-size", 2]
    assert "--force" in refusal(*command, "--output", output)
    call(*command, "--output", output, "--force")
    assert sorted(p.name for p in tmp_path.glob("*.pt")) == [
        f"checkpoint_last-rank-{rank}.pt" for rank in (0, 1)
    ]
    Shards.open(output).check_agreement()
    shutil.copy(elsewhere, output)  # a set beside it would be another checkpoint of its name
    assert str(output) in refusal(*command, "--output", output, "--force")


DAMAGES = {
    "cut": lambda one, other: other.write_bytes(other.read_bytes()[:-3000]),
    "swapped": lambda one, other: [
        file.write_bytes(content)
        for file, content in zip((one, other), (other.read_bytes(), one.read_bytes()))
    ],
    "missing": lambda one, other: other.unlink(),
    # Of another run, after as many updates.
    "foreign": lambda _, other: changed(other, other, lambda s: s["smoe_experts"].update(save="0")),
    "of stock fairseq": lambda _, other: changed(other, other, lambda s: s.pop("smoe_experts")),
}

TRAINED = ("cut", "swapped", "of stock fairseq")  # of the others training makes the same checks


@pytest.mark.parametrize("damage", DAMAGES)
def test_bad_files_are_named(ranks, small_corpus, resharded, tmp_path, damage):
    folder, output = tmp_path / "run", tmp_path / "out" / "checkpoint_last.pt"
    shutil.copytree(resharded["2"], folder)
    path = folder / "checkpoint_last.pt"
    DAMAGES[damage](*(rank_file(path, rank) for rank in range(2)))
    words = f"rank-{int(damage != 'swapped')}.pt"
    before = contents(folder)
    assert words in refusal("consolidate", path, "--output", output)
    assert words in refusal("reshard", path, "--world-size", 4, "--output", output)
    assert not output.parent.exists()
    if damage in TRAINED:
        arguments = flags(small_corpus, folder, "--expert-parallel", "--max-update", 6)
        ranks.start(tmp_path / "logs", 2, *arguments).refused(words)
    assert contents(folder) == before


@pytest.mark.parametrize("name", ["4", "1"])
def test_another_number_of_processes_is_told_what_to_do(
    ranks, small_corpus, resharded, tmp_path, name
):
    folder = shutil.copytree(resharded[name], tmp_path / "run")
    arguments = flags(small_corpus, folder, "--expert-parallel", "--max-update", 6)
    ranks.start(tmp_path / "logs", 2, *arguments).refused("smoe reshard")


def test_a_run_without_a_file_of_its_set_does_not_resume(resharded, tmp_path):
    for file in resharded["2"].glob("*-rank-0.pt"):
        shutil.copy(file, tmp_path)
    with pytest.raises(UsageError, match="checkpoint_last-rank-1.pt is missing"):
        reshard(tmp_path, 2)


def test_a_run_of_one_rank_becomes_one_of_two(resharded, tmp_path):
    reshard(folder := shutil.copytree(resharded["1"], tmp_path / "run"), 2)
    ranks = [f"checkpoint_last-rank-{rank}.pt" for rank in (0, 1)]
    assert sorted(contents(folder)) == [*ranks, "of-1-ranks/checkpoint_last.pt"]


def test_bad_requests_get_one_sentence(resharded, tmp_path):
    path, out = resharded["4"] / "checkpoint_last.pt", tmp_path / "out.pt"
    assert "--world-size 0" in refusal("reshard", path, "--world-size", 0, "--output", out)
    sentence = refusal("reshard", path, "--world-size", 3, "--output", out)
    assert "accepted are 1, 2, 4, 8 ranks" in sentence
    assert "none.pt is missing" in refusal(
        "reshard", tmp_path / "none.pt", "--world-size", 2, "--output", out
    )
    assert "none-rank-0.pt is missing" in refusal(
        "consolidate", tmp_path / "none.pt", "--output", out
    )
    (tmp_path / "one.pt").touch()
    said = refusal("consolidate", tmp_path / "one.pt", "--output", out)
    assert f"{tmp_path / 'one.pt'} is" in said and "missing" not in said
    (tmp_path / "one.pt").unlink()
    assert f"--output: {path} " in refusal("consolidate", path, "--output", path)
    assert not path.exists()
    assert not list(tmp_path.iterdir())


def test_flattened_optimizer_state_is_called_so(resharded, tmp_path):
    """As ``--fp16`` without ``--fp16-no-flatten-grads`` keeps it, which takes a GPU to train with."""

    def flatten(state):
        optimizer = state["last_optimizer_state"]
        optimizer["param_groups"][0]["params"] = [0]
        optimizer["state"] = {0: {"exp_avg": torch.zeros(100)}}

    path, out = tmp_path / "fp16.pt", tmp_path / "out.pt"
    changed(resharded["1"] / "checkpoint_last.pt", path, flatten)
    sentence = refusal("reshard", path, "--world-size", 2, "--output", out)
    assert "fp16.pt: --fp16 has flattened" in sentence
    assert not out.exists()


def test_a_rank_file_is_no_model_to_translate_with(small_corpus, set_of_2):
    path = rank_file(set_of_2 / "checkpoint_last.pt", 1)
    arguments = [small_corpus, "--user-dir", PLUGIN, "--path", path, "--cpu"]
    refused(run("fairseq-generate", *arguments, check=False), "smoe consolidate")


def test_tensors_stay_on_disk_until_they_are_copied(set_of_2):
    """So memory holds the result, and of the files what the system can drop again."""
    shards = checkpoint(set_of_2)
    mapped = Path("/proc/self/maps").read_text()
    assert all(str(file) in mapped for file in shards.files)
