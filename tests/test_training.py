"""Training, resuming and translating from the command line."""

import json
import re
import shutil
from pathlib import Path

import handmade
import pytest
import torch
from commands import PLUGIN, hydra_train, load, refused, run
from sampling import soak
from test_several_processes import assert_equal, assert_same_bits


def train(data, save_dir, *flags, check=True, **how):
    """A tiny SMoE; later flags win. Returns the finished process."""
    return run(
        *("fairseq-train", data, "--user-dir", PLUGIN, "--cpu", "--num-workers", 0),
        *("--arch", "smoe_transformer_tiny", "--encoder-embed-dim", 48),
        *("--encoder-ffn-embed-dim", 64, "--smoe-strata", "2-2-2-2"),
        *("--criterion", "smoe_label_smoothed_cross_entropy", "--label-smoothing", 0.1),
        *("--optimizer", "adam", "--lr", 0.005, "--max-tokens", 400, "--save-dir", save_dir),
        *("--log-format", "json", "--log-interval", 1, "--no-epoch-checkpoints", *flags),
        check=check,
        **how,
    )


def log_lines(process, tag="train_inner"):
    lines = re.findall(rf"\| {tag} \| (\{{.*\}})", process.stdout)
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("precision", [soak(()), ("--bf16",)], ids=str)
def test_resuming_equals_never_having_stopped(small_corpus, tmp_path, precision):
    """Dropout, sampled experts and virtual epochs included: same losses, same parameters, bit for bit.

    The second half continues from what the whole had saved at its middle.
    """
    flags = "--task translation_multi_simple_epoch --langs src,tgt --lang-pairs src-tgt".split()
    flags += ["--virtual-epoch-size", 20]
    flags += ["--max-update", 6, "--save-interval-updates", 3, *precision]
    whole = train(small_corpus, tmp_path / "whole", *flags)
    (middle,) = (tmp_path / "whole").glob("checkpoint_*_3.pt")
    second = train(small_corpus, tmp_path / "half", *flags, "--restore-file", middle)
    names = ("num_updates", "loss", "moe_gate_loss", "requested_capacity", "gnorm")
    lines = [[[line[n] for n in names] for line in log_lines(each)] for each in (second, whole)]
    assert len(lines[0]) == 3 and lines[0] == lines[1][3:]
    whole, half = (load(tmp_path / x / "checkpoint_last.pt")["model"] for x in ("whole", "half"))
    assert_equal(whole, half, "model")


ADAM = "--optimizer adam --lr-scheduler"
CONTINUED = (
    f"{ADAM} reduce_lr_on_plateau --lr-patience 1 --lr-shrink 0.5 --lr-threshold 0.9",
    f"{ADAM} fixed --lr 0.005,0.003 --force-anneal 2 --lr-shrink 0.5 --warmup-updates 5",
    f"{ADAM} cosine --lr-period-updates 5 --t-mult 2 --lr-shrink 0.5 --warmup-updates 3",
    f"{ADAM} triangular --max-lr 0.01 --lr-period-updates 6 --lr-shrink 0.7 --shrink-min",
    f"{ADAM} tri_stage --warmup-steps 3 --hold-steps 4 --decay-steps 9",
    f"{ADAM} polynomial_decay --total-num-update 20 --power 2 --warmup-updates 3",
    f"{ADAM} step --lr-deacy-period 5 --lr-decay 0.5 --warmup-updates 3",
    f"{ADAM} inverse_sqrt --warmup-updates 3 --clip-norm 0.1 --weight-decay 0.01 --num-workers 1",
    "--optimizer adafactor",
    "--optimizer nag --momentum 0.9",
    "--optimizer sgd --momentum 0.9 --lr-scheduler fixed --lr 0.05",
    "--optimizer adadelta --anneal-eps",
    "--curriculum 1 --update-freq 2,1,3",
    "--store-ema --ema-decay 0.5 --ema-update-freq 4 --ema-start-update 2",
    "--fp16 --fp16-no-flatten-grads --fp16-init-scale 4 --fp16-scale-window 5 --store-ema --ema-fp32",
    "--memory-efficient-fp16 --fp16-scale-window 5 --fp16-scale-tolerance 0.25",
    "--skip-remainder-batch --update-ordered-indices-seed",
    "--bf16 --moe-balance bias --moe-second-expert-policy all --moe-eom 0.2",
)


@pytest.mark.soak
@pytest.mark.parametrize("stop", [("--max-epoch", 2), ("--max-update", 13)], ids=str)
@pytest.mark.parametrize("flags", CONTINUED)
def test_every_schedule_and_state_continues(small_corpus, tmp_path, flags, stop):
    """At the end of an epoch, and in an epoch."""
    flags = [*flags.split(), "--batch-size", 5, "--disable-validation", "--max-epoch", 3]
    if "reduce_lr_on_plateau" in flags:
        flags.remove("--disable-validation")
    for folder, more in (("whole", ()), ("parts", stop), ("parts", ())):
        run_ = train(small_corpus, tmp_path / folder, *flags, *more)
        assert log_lines(run_, "train")
    whole, parts = (load(tmp_path / x / "checkpoint_last.pt") for x in ("whole", "parts"))
    assert_same_bits(whole, parts)
    assert_equal(*(each["extra_state"].get("ema") for each in (whole, parts)), "average")


@pytest.mark.soak
def test_a_checkpoint_does_not_depend_on_what_memory_held(small_corpus, tmp_path):
    """glibc fills new memory with a byte, as it would be after other work."""
    for byte in (0, 90):
        folder = tmp_path / str(byte)
        train(small_corpus, folder, "--max-update", 2, fresh=True, MALLOC_PERTURB_=str(byte))
    one, other = (load(tmp_path / byte / "checkpoint_last.pt")["model"] for byte in ("0", "90"))
    assert not [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]


def test_resuming_a_finished_run_changes_nothing(sparse, small_corpus, tmp_path):
    last = shutil.copy(sparse, tmp_path)
    before = Path(last).read_bytes()
    process = train(small_corpus, tmp_path, "--max-update", 2)
    assert "nothing is left to train" in process.stdout and not log_lines(process)
    assert Path(last).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_last.pt"]


@pytest.mark.parametrize("flag", ["--bf16", "--memory-efficient-fp16"])
def test_precisions_train(small_corpus, tmp_path, flag):
    """--amp is in test_trainer.py, --fp16 in test_zero.py."""
    process = train(small_corpus, tmp_path, flag, "--max-update", 5)
    losses = [float(line["loss"]) for line in log_lines(process)]
    assert len(losses) == 5 and losses[-1] < losses[0]


def test_experts_on_resume_of_a_dense_model(dense, small_corpus, tmp_path):
    shutil.copy(dense, tmp_path)
    result = train(small_corpus, tmp_path, "--max-update", 999, check=False)
    refused(result, "smoe upcycle")


def test_hydra_trains_the_size_of_the_architecture(small_corpus, tmp_path):
    model = {"_name": "smoe_transformer_tiny", "smoe_strata": "2-2", "encoder_layers": 3}
    more = {"user_dir": str(PLUGIN), "log_file": str(tmp_path / "log"), "log_format": "simple"}
    words = (
        "--multirun",
        "optimization.lr=[0.001],[1e-9]",
        "checkpoint.save_dir=r${hydra:job.num}",
    )
    criterion = "smoe_label_smoothed_cross_entropy"
    hydra_train(tmp_path, small_corpus, model, criterion, *words, **more)
    best = []
    for name in ("r0", "r1"):
        (found,) = tmp_path.rglob(f"{name}/checkpoint_best.pt")
        state = load(found)
        best.append(state["extra_state"]["best"])
        assert "smoe_experts" in state  # so it is our trainer
        assert state["model"]["encoder.layers.1.moe.gates.1.weight"].shape == (2, 128)
        model = state["cfg"]["model"]
        assert (model["decoder_embed_dim"], model["decoder_ffn_embed_dim"]) == (128, 256)
        assert (model["encoder_layers"], model["decoder_layers"]) == (3, 2)
    assert best[0] < best[1] - 0.1
    log = (tmp_path / "log").read_text()
    assert log.count("epoch 002 | valid on") == 2, log  # fairseq opens the file for each epoch


def test_flags_whose_state_a_checkpoint_lacks_are_named(small_corpus, sparse, tmp_path):
    last = shutil.copy(sparse, tmp_path)
    words = "--optimizer sgd --lr-scheduler cosine --warmup-updates 1 --bf16 --max-update 4".split()
    words += ["--criterion", "label_smoothed_cross_entropy", "--no-share-all-embeddings"]
    before = ["--optimizer adam", "--lr-scheduler fixed", "no --bf16", "--criterion smoe_label"]
    before += [" --share-all-embeddings"]
    refused(train(small_corpus, tmp_path, *words, check=False), last, *before)


def test_a_model_may_be_trained_on_its_validation_data(three_languages, tmp_path):
    handmade.train(three_languages, tmp_path, *handmade.MULTILINGUAL, "--train-subset", "valid")
    assert (tmp_path / "checkpoint_best.pt").exists()


def test_language_ids_are_refused(three_languages, tmp_path):
    words = handmade.training(three_languages, tmp_path, *handmade.MULTILINGUAL)
    refused(run(*words, "--enable-lang-ids", check=False), "--enable-lang-ids")


def test_numbers_that_are_none_end_in_one_sentence(small_corpus, tmp_path):
    process = train(small_corpus, tmp_path, "--lr", 1e30, "--max-update", 5, check=False)
    refused(process, "--lr")
    assert "NaN detected in output of encoder" in process.stdout
    assert "gradients: " not in process.stdout
    crash = load(tmp_path / "crash.pt")  # resumes after the batch that failed
    position = crash["extra_state"]["train_iterator"]
    assert position["epoch"] == 1
    assert position["iterations_in_epoch"] == crash["optimizer_history"][-1]["num_updates"] + 1
