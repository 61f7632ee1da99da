"""Several processes that all hold all experts, or none: start, resume, finetune, validate, any back end."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from commands import PLUGIN, TINY
from ranks import fairseq_train
from sampling import soak
from test_expert_parallel import flags, whole

from smoe_fairseq.compat.patches_training import STOCK_LAYER_COPIES

LAST = "checkpoint_last.pt"
GLOO = ("--distributed-backend", "gloo", "--cpu", "--num-workers", "0")


def stock(data, save_dir, *more) -> list:
    """fairseq's own model without the plugin's, which the trainer of the plugin trains all the same."""
    own = [data, "--save-dir", save_dir, "--user-dir", PLUGIN, *TINY, *GLOO, "--batch-size", 4]
    return [*own, "--max-epoch", 0, "--max-update", 4, "--disable-validation", *more]


def content(folder) -> dict:
    """Of the checkpoint, without copies of weights that nothing computes with."""
    state = torch.load(folder / LAST, weights_only=True)
    unused = tuple(STOCK_LAYER_COPIES)
    return {**state, "model": {n: t for n, t in state["model"].items() if not n.endswith(unused)}}


def assert_same_bits(one, other) -> None:
    for part in ("model", "last_optimizer_state"):
        assert_equal(one[part], other[part], part)


def assert_equal(one, other, where: str) -> None:
    assert type(one) is type(other), where
    if torch.is_tensor(one):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_equal(one[key], other[key], f"{where} {key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for i, pair in enumerate(zip(one, other, strict=True)):
            assert_equal(*pair, f"{where} {i}")
    else:
        assert one == other, where


CASES = [
    (2, "smoe", "legacy_ddp"),
    soak(2, "smoe", "pytorch_ddp"),
    soak(2, "stock", "pytorch_ddp"),
    soak(4, "stock", "legacy_ddp"),
]


@pytest.mark.parametrize("world_size, model, backend", CASES)
def test_a_resumed_run_equals_an_uninterrupted_one(
    ranks, small_corpus, tmp_path, world_size, model, backend
):
    make = flags if model == "smoe" else stock
    more = ["--ddp-backend", backend, "--max-update", 4]
    ranks.train(tmp_path / "logs", world_size, *make(small_corpus, tmp_path / "whole", *more))
    for updates in (2, 4):
        arguments = make(small_corpus, tmp_path / "parts", *more, "--max-update", updates)
        run = ranks.train(tmp_path / "logs", world_size, *arguments)
    assert f"Loaded checkpoint {tmp_path / 'parts' / LAST}" in run.output(0)
    assert_same_bits(content(tmp_path / "parts"), content(tmp_path / "whole"))


def in_small_buckets(path, arguments, fails=False):
    """``fairseq-train`` with many buckets; writes how many gradients were incomplete as each was sent."""
    import sys

    import smoe_fairseq.training.trainer  # noqa: F401
    from smoe_fairseq.training.reduction import Reduction

    arrive, send, later = Reduction._arrived, Reduction._send, []

    def arrived(reduction, parameter):
        reduction.in_backward = True
        arrive(reduction, parameter)
        reduction.in_backward = False
        if fails and os.environ["RANK"] == "0" and reduction.num_sent >= 7:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def logged(reduction):
        others = sum(reduction.incomplete[reduction.num_sent + 1 :])
        later.append(others if getattr(reduction, "in_backward", False) else 0)
        send(reduction)

    Reduction._arrived, Reduction._send = arrived, logged
    sys.modules["smoe_fairseq.training.reduction"].BUCKET = 2**14
    fairseq_train(arguments)
    if os.environ["RANK"] == "0":
        Path(path).write_text(json.dumps(later))


EXCHANGES = {
    "parts": ["--update-freq", "2", "--checkpoint-activations"],
    "skipped": ["--encoder-layerdrop", "0.5", "--moe-gating-dropout", "0.5"],
    "sharded": ["--expert-parallel"],
    "stock": [],
}


@pytest.mark.parametrize("name", [name if name == "parts" else soak(name) for name in EXCHANGES])
def test_gradients_travel_while_others_are_computed(ranks, small_corpus, tmp_path, name):
    make = stock if name == "stock" else flags
    more = ["--ddp-backend", "legacy_ddp", "--batch-size", 4, "--max-update", 5, *EXCHANGES[name]]
    words = make(small_corpus, tmp_path / "small", *more)
    ranks.train(tmp_path, 2, tmp_path / "later.json", words, function=in_small_buckets)
    later = json.loads((tmp_path / "later.json").read_text())
    updates = [later[i : i + len(later) // 5] for i in range(0, len(later), len(later) // 5)]
    assert len(updates) == 5 and len(updates[0]) > 5
    overlapped = [sum(count > 0 for count in update) for update in updates]
    assert overlapped[:2] == [0, 0]
    if name == "sharded":
        assert not any(overlapped)
    else:
        assert min(overlapped[2:]) > len(updates[0]) / 2
    ranks.train(tmp_path, 2, *make(small_corpus, tmp_path / "one", *more))  # a single bucket
    small, one = tmp_path / "small", tmp_path / "one"
    if name == "sharded":
        assert_equal(whole(small), whole(one), name)
    else:
        assert_same_bits(content(small), content(one))


def test_memory_that_runs_out_within_the_backward_pass(ranks, small_corpus, tmp_path):
    """fairseq ends a run whose ranks have different gradient norms."""
    more = ["--ddp-backend", "legacy_ddp", "--batch-size", 4, "--max-update", 5]
    words = flags(small_corpus, tmp_path, *more)
    given = (tmp_path / "sent.json", words, True)
    run = ranks.train(tmp_path, 2, *given, function=in_small_buckets)
    assert run.output(0).count("a batch was skipped") == 3


def test_finetuning(ranks, small_corpus, two_updates, tmp_path):
    """Each process gets the parameters that the first one has read."""
    then = flags(small_corpus, tmp_path, "--max-update", 1, "--lr", "1e-9")
    then += ["--encoder-embed-dim", 48, "--encoder-ffn-embed-dim", 64]  # of that model
    then += ["--finetune-from-model", two_updates / LAST]
    run = ranks.train(tmp_path / "logs", 2, *then)
    assert "loading pretrained model" in run.output(0)
    before, after = (content(folder)["model"] for folder in (two_updates, tmp_path))
    for name, tensor in before.items():
        assert torch.allclose(tensor, after[name], atol=1e-6), name


def validated(run) -> dict:
    """What the first process says of the validation set; without speed."""
    lines = re.findall(r"\| valid \| (\{.*\})", run.output(0))
    found = json.loads(lines[-1])
    return {name: value for name, value in found.items() if name not in ("valid_wps", "valid_wpb")}


@pytest.mark.parametrize("size", [10, soak(50)])
def test_validation(ranks, small_corpus, sparse, tmp_path, size):
    """Two processes find what one finds; the second has one batch less, of three, or none at all."""
    command = [small_corpus, "--user-dir", PLUGIN, "--task", "translation", "--cpu"]
    command += ["--path", sparse, "--log-format", "json", "--num-workers", 0]
    command += ["--distributed-backend", "gloo", "--batch-size", size]
    given = {"command": "fairseq-validate"}
    alone = ranks.train(tmp_path / "logs", 1, *command, **given, one=True)
    assert validated(ranks.train(tmp_path / "logs", 2, *command, **given)) == validated(alone)


def without_fairseqs_loss(arguments):
    """``fairseq-train`` that fails if fairseq's criterion computes a loss, with log probabilities more."""
    from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion

    del LabelSmoothedCrossEntropyCriterion.compute_loss
    fairseq_train(arguments)


@pytest.mark.parametrize("flag", [(), soak(("--expert-parallel",))])
def test_every_batch_counts_where_another_process_has_one_more(ranks, small_corpus, tmp_path, flag):
    """Five batches in one update of three for each process: one lacks its last."""
    same = ["--batch-size", 10, "--required-batch-size-multiple", 1, "--max-update", 3]
    one = flags(small_corpus, tmp_path / "one", *same, "--update-freq", 5)
    two = flags(small_corpus, tmp_path / "two", *same, "--update-freq", 3, *flag)
    given = {"function": without_fairseqs_loss}
    expected = logged(ranks.train(tmp_path / "logs", 1, one, one=True, **given))
    found = logged(ranks.train(tmp_path / "logs", 2, two, **given))
    assert len(expected) == 3
    for update, wanted in zip(found, expected, strict=True):
        assert update == pytest.approx(wanted, rel=1e-3)


def logged(run) -> list[list[float]]:
    """Of each update what is alike however its batches are spread."""
    updates = map(json.loads, re.findall(r"train_inner \| (\{.*\})", run.output(0)))
    names = ("loss", "nll_loss", "gnorm", "wpb", "bsz")
    return [[float(update[name]) for name in names] for update in updates]
