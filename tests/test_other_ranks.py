"""One batch on any number of ranks: a run resumes on another number by the same command."""

import json
import os
import re
from dataclasses import replace

import pytest
import torch
from commands import succeeded
from sampling import soak
from test_recipes import TRAIN, commands, recipe, tiny_place, write_dataset

from smoe_fairseq.checkpoints.reading import open_checkpoint
from smoe_fairseq.checkpoints.sets import Shards, write_set
from smoe_fairseq.compat.checkpoint_names import rank_file
from smoe_fairseq.errors import UsageError
from smoe_fairseq.recipes.datasets import load_dataset
from smoe_fairseq.recipes.settings import Settings
from smoe_fairseq.recipes.training.batch import plan_batch
from smoe_fairseq.recipes.training.reshard import reshard

LAST = "checkpoint_last.pt"


@pytest.fixture
def place(tmp_path, small_corpus) -> dict[str, str]:
    more = {"dropout": 0.0, "moe-second-expert-policy": "all", "disable-validation": True}
    more |= {
        "no-epoch-checkpoints": True,
        "max-tokens": 60,
        "update-freq": 2,
        "log-format": "json",
        "log-interval": 1,
    }
    return tiny_place(tmp_path, small_corpus, **more)


def trained(tmp_path, ranks: int, *words, **environment):
    """What the recipe prints."""
    return succeeded(recipe(tmp_path, "train", "tiny", *words, GPUS=str(ranks), **environment))


def losses(folder) -> dict[int, float]:
    """Of each update, from the log."""
    lines = map(json.loads, re.findall(r'^\{"epoch.*\}$', (folder / "train.log").read_text(), re.M))
    return {int(each["num_updates"]): float(each["loss"]) for each in lines if "loss" in each}


def model(folder) -> dict[str, torch.Tensor]:
    return open_checkpoint(folder / LAST)["model"]


PARTS = ((1, 2), (2, 4), (1, 6))  # ranks, and updates at the end


@pytest.mark.parametrize("how, parts", [soak("replicated", PARTS), ("sharded", PARTS[1:])])
def test_a_run_resumes_on_other_numbers_of_ranks(tmp_path, place, how, parts):
    """With the losses and the parameters of a run that was never interrupted."""
    words = ["smoe-2-2", *(["--expert-parallel"] if how == "sharded" else [])]
    trained(tmp_path, 1, *words, "--max-update", "6", **place, RUN_DIR="whole")
    run, said = tmp_path / "runs/tiny/smoe-2-2", []
    for ranks, updates in parts:
        result = trained(tmp_path, ranks, *words, "--max-update", str(updates), **place)
        said.append(result.stdout)
    assert "2 ranks x 60 (--max-tokens) x 1 (--update-freq)" in said[-2]
    assert [text.count(": reshard ") for text in said][-2:] == [0, how == "sharded"]
    whole = tmp_path / "whole/tiny/smoe-2-2"
    assert len(losses(whole)) == 6  # more than an epoch
    assert losses(run) == pytest.approx(losses(whole), rel=2e-3)  # of three digits each
    expected = model(whole)
    for name, tensor in model(run).items():
        assert torch.allclose(tensor, expected[name], atol=1e-5), name
    kept = sorted(path.name for path in run.glob("of-*/*"))
    assert kept == [rank_file(LAST, rank).name for rank in range(2) if how == "sharded"]
    assert not list(run.glob("resharded-*")) and not rank_file(run / LAST, 0).exists()


def test_resharding_that_was_cut_short_is_completed(sparse, tmp_path, monkeypatch):
    """Wherever it is, one of the two sets is whole, and the next start takes the new one."""
    folder, replace = tmp_path, os.replace
    write_set(Shards.open(sparse), folder / LAST, 2, force=False)
    saved = {path.name: path.read_bytes() for path in folder.glob("checkpoint*")}
    for stop in range(1, 12):
        left = [stop]

        def cut_short(source, target, left=left):
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            replace(source, target)

        monkeypatch.setattr(os, "replace", cut_short)
        try:
            reshard(folder, 1)
            break
        except KeyboardInterrupt:
            monkeypatch.setattr(os, "replace", replace)
            reshard(folder, 1)
        aside = {path.name: path.read_bytes() for path in folder.glob("of-2-ranks/*")}
        assert aside == saved
        assert [path.name for path in folder.glob("checkpoint*")] == [LAST]
        (folder / LAST).unlink()
        for path in folder.glob("of-2-ranks/*"):
            replace(path, folder / path.name)
    assert stop > 4


def test_batches():
    """Of sentences, of both units, of none, with a number for each epoch, and of a name."""
    dataset, flags = load_dataset("multi30k", Settings()), {"batch-size": 4}
    assert plan_batch(dataset, flags, 2).flags() == {"batch-size": 2, "update-freq": 1}
    with pytest.raises(UsageError, match="^3 ranks .* 2 or 4; .*--batch"):
        plan_batch(dataset, flags, 3)
    both = plan_batch(dataset, {"max-tokens": 4096}, 4, ["--max-sentences", "64"])
    assert both.flags() == {"max-tokens": 1024, "batch-size": 16, "update-freq": 1}
    assert plan_batch(dataset, {}, 2) is None
    tokens = {"max-tokens": 4096}
    assert plan_batch(dataset, tokens, 2, ["--update-freq", "4,2"]) is None
    assert plan_batch(dataset, tokens | {"update-freq": "[4, 2]"}, 1) is None
    named = replace(dataset, batch={"paper": 6000})
    assert plan_batch(named, {}, 2).flags() == {"max-tokens": 3000, "update-freq": 1}


@pytest.mark.parametrize(
    "own, precision, expected",
    [
        ({"bf16": True}, "", {"--bf16"}),
        ({"bf16": True}, "fp32", set()),
        ({"amp": True}, "", {"--amp"}),
        ({"fp16": True}, "bf16", {"--bf16"}),
    ],
)
def test_number_types_among_the_flags_of_a_data_set(tmp_path, own, precision, expected):
    content = {"pairs": ["a-b"], "raw": {}, "train": TRAIN | own, "experts": 4}
    given = write_dataset(tmp_path / "c", "own", **content)
    given |= {"DRY_RUN": "1", "GPUS": "1", "PRECISION": precision}
    (words,) = commands(recipe(tmp_path, "train", "own", "moe", **given), "fairseq-train")
    assert {"--bf16", "--fp16", "--amp"} & set(words) == expected


def test_experts_that_a_data_set_shards_stay_so(tmp_path):
    train = TRAIN | {"expert-parallel": True}
    given = write_dataset(tmp_path / "c", "own", pairs=["a-b"], raw={}, train=train, experts=4)
    folder = tmp_path / "runs/own/moe"
    folder.mkdir(parents=True)
    for rank in range(2):
        rank_file(folder / LAST, rank).touch()
    shown = recipe(tmp_path, "train", "own", "moe", DRY_RUN="1", GPUS="2", **given)
    assert shown.returncode == 0 and "reshard" not in shown.stdout
