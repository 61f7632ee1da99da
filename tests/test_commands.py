"""Commands of stock fairseq 0.12.2, with its own model and without ``--user-dir``."""

import shutil

import pytest
from commands import PLUGIN, generate, generation, hydra_train, hypotheses, refused, run, train
from sampling import soak


def test_post_norm_model_translates_with_and_without_the_plugin(corpus, post_norm):
    translations = generate(corpus, post_norm, "--num-workers", 1)
    assert sorted(translations) == list(range(16))
    assert translations == generate(corpus, post_norm, "--user-dir", PLUGIN)


def test_shards_of_a_text_are_translated_apart(corpus, post_norm):
    """By jobs of a cluster."""
    words = ("--user-dir", PLUGIN, "--batch-size", 3, "--num-shards", 2)
    first, second = (generate(corpus, post_norm, *words, "--shard-id", i) for i in (0, 1))
    assert sorted([*first, *second]) == list(range(16)) and first and second
    all_in_one = ("--user-dir", PLUGIN, "--batch-size", 99, "--num-shards", 2, "--shard-id", 1)
    assert generate(corpus, post_norm, *all_in_one) == {}


def test_interactive(corpus, post_norm):
    output = run("fairseq-interactive", *generation(corpus, post_norm), stdin="a b c\n").stdout
    assert list(hypotheses(output)) == [0]


@pytest.mark.soak
def test_constraints_that_do_not_fit_into_a_translation(corpus, post_norm):
    words = [*generation(corpus, post_norm), "--user-dir", PLUGIN, "--constraints"]
    words += ["--max-len-b", 2]
    said = run("fairseq-interactive", *words, stdin="a b c\ta b c d e f\n", check=False)
    refused(said, "--constraints", "--max-len-b")


def test_hydra_train(corpus, tmp_path):
    side = {"layers": 1, "embed_dim": 32, "ffn_embed_dim": 64, "attention_heads": 2}
    model = {"_name": "transformer", "encoder": side, "decoder": {**side, "output_dim": 32}}
    hydra_train(tmp_path, corpus, model, "label_smoothed_cross_entropy")
    assert len(generate(corpus, tmp_path / "run" / "checkpoint_last.pt")) == 16


def test_a_hydra_file_that_is_no_yaml_is_named(tmp_path):
    (tmp_path / "odd.yaml").write_text("common:\n  seed: [1\n")
    command = ("fairseq-hydra-train", "--config-dir", tmp_path, "--config-name", "odd")
    refused(run(*command, cwd=tmp_path, check=False), tmp_path / "odd.yaml")


@pytest.mark.parametrize(
    "flags",
    [
        "--amp --store-ema --update-freq 2 --clip-norm 1 --num-workers 0",
        soak("--fp16 --fp16-no-flatten-grads"),
        "--memory-efficient-fp16 --checkpoint-activations",
    ],
)
def test_training_flags(corpus, tmp_path, flags):
    logs = tmp_path / "events"
    flags = ["--max-update", "2", "--tensorboard-logdir", logs, *flags.split()]
    assert "done training" in train(corpus, tmp_path, *flags).stdout
    assert list(logs.glob("train/events*"))


def test_resuming(corpus, post_norm, tmp_path):
    shutil.copytree(post_norm.parent, tmp_path, dirs_exist_ok=True)
    for flags in ([], ["--reset-optimizer"]):
        resumed = train(corpus, tmp_path, *flags, "--max-epoch", 3, "--no-last-checkpoints").stdout
        assert "Loaded checkpoint" in resumed and "begin training epoch 3" in resumed
