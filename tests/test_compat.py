"""Stock fairseq 0.12.2 works, from its command line, and each patch is needed for that."""

import math
import re
from pathlib import Path

import pytest
import torch
from commands import SCRIPTS, preprocess, run

import smoe_fairseq

USER_DIR = Path(smoe_fairseq.__file__).parent

TINY = """--arch transformer --encoder-layers 2 --decoder-layers 2 --encoder-embed-dim 32
    --encoder-ffn-embed-dim 64 --encoder-attention-heads 2 --decoder-embed-dim 32
    --decoder-ffn-embed-dim 64 --decoder-attention-heads 2 --optimizer adam --lr 0.01
    --lr-scheduler inverse_sqrt --warmup-updates 4 --criterion label_smoothed_cross_entropy
    --max-tokens 300 --max-epoch 2 --no-epoch-checkpoints --cpu""".split()

PRE_NORM = ("--encoder-normalize-before", "--decoder-normalize-before")

HYDRA_CONFIG = """# @package _group_
common: {{cpu: true}}
task: {{_name: translation, data: {data}}}
model:
  _name: transformer
  encoder: {{layers: 1, embed_dim: 32, ffn_embed_dim: 64, attention_heads: 2}}
  decoder: {{layers: 1, embed_dim: 32, ffn_embed_dim: 64, attention_heads: 2, output_dim: 32}}
criterion: {{_name: label_smoothed_cross_entropy, label_smoothing: 0.1}}
optimizer: {{_name: adam}}
lr_scheduler: {{_name: inverse_sqrt, warmup_updates: 4}}
optimization: {{max_epoch: 1, lr: [0.01]}}
dataset: {{max_tokens: 300}}
checkpoint: {{save_dir: {save_dir}}}
"""

# Runs a program of fairseq with every patch but one, through the start-up hook as always.
WITHOUT = """
import runpy, sys
import _smoe_fairseq_startup as startup
left_out, program, *arguments = sys.argv[1:]
compat = startup.load_compat()
kept = [patch for patch in compat.PATCHES if patch[1].__name__ != left_out]
assert len(kept) == len(compat.PATCHES) - 1
compat.install(kept)
sys.argv = [program, *arguments]
runpy.run_path(program, run_name="__main__")
"""


def run_without(patch, program, *arguments):
    return run("python", "-c", WITHOUT, patch, SCRIPTS / program, *arguments, check=False)


def train(data, save_dir, *flags, check=True):
    return run("fairseq-train", data, "--save-dir", save_dir, *TINY, *flags, check=check)


def generate(data, checkpoint, *flags):
    """Translates the test set; returns the best hypotheses and their scores by sentence number."""
    return hypotheses(run("fairseq-generate", *generation(data, checkpoint), *flags).stdout)


def generation(data, checkpoint):
    return [data, "--path", checkpoint, "--beam", "3", "--max-len-b", "12", "--cpu"]


def hypotheses(output):
    found = re.findall(r"^H-(\d+)\t(\S+)\t(.*)$", output, re.MULTILINE)
    return {int(number): (float(score), words) for number, score, words in found}


@pytest.fixture(scope="module")
def pre_norm(corpus, tmp_path_factory):
    """A checkpoint of the stock model, pre-norm."""
    folder = tmp_path_factory.mktemp("pre-norm")
    train(corpus, folder, *PRE_NORM)
    return folder / "checkpoint_last.pt"


@pytest.fixture(scope="module")
def post_norm(corpus, tmp_path_factory):
    """A checkpoint of the stock model, post-norm, whose meters hold numpy arrays."""
    folder = tmp_path_factory.mktemp("post-norm")
    train(corpus, folder, "--eval-bleu", "--eval-bleu-remove-bpe")
    return folder / "checkpoint_last.pt"


# The start-up hook, and the order in which things are imported


def test_hook_loads_nothing_until_fairseq_is_imported():
    program = """
import sys
heavy = {"torch", "numpy", "fairseq", "hydra", "omegaconf", "importlib.metadata"}
assert "_smoe_fairseq_startup" in sys.modules
assert not heavy & set(sys.modules) and not any(n.startswith("smoe") for n in sys.modules)
import fairseq
assert "smoe_fairseq.compat" in sys.modules and "smoe_fairseq" not in sys.modules
"""
    run("python", "-c", program)


def test_importing_the_package_loads_nothing_heavy():
    program = "import sys, smoe_fairseq; assert not {'torch', 'fairseq'} & set(sys.modules)"
    run("python", "-c", program)


@pytest.mark.parametrize(
    "imports",
    [
        "import fairseq, smoe_fairseq",
        "import smoe_fairseq.models",
        "import smoe_fairseq, fairseq; user_dir()",
        "import fairseq; user_dir(); import smoe_fairseq; user_dir()",
    ],
)
def test_plugin_is_registered_in_whatever_order_it_is_imported(imports):
    program = f"""
import argparse
def user_dir():
    fairseq.utils.import_user_module(argparse.Namespace(user_dir={str(USER_DIR)!r}))
{imports}
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.models import ARCH_MODEL_REGISTRY
assert "smoe_transformer" in ARCH_MODEL_REGISTRY
assert "smoe_label_smoothed_cross_entropy" in CRITERION_REGISTRY
"""
    run("python", "-c", program)


# The six commands, with the stock model and without --user-dir


def test_pre_norm_model_translates(corpus, pre_norm):
    assert sorted(generate(corpus, pre_norm)) == list(range(16))


def test_post_norm_model_translates_with_and_without_the_plugin(corpus, post_norm):
    translations = generate(corpus, post_norm)
    assert sorted(translations) == list(range(16))
    assert translations == generate(corpus, post_norm, "--user-dir", USER_DIR)


def test_interactive(corpus, post_norm):
    output = run("fairseq-interactive", *generation(corpus, post_norm), stdin="a b c\n").stdout
    assert list(hypotheses(output)) == [0]


def test_validate(corpus, post_norm):
    output = run(
        "fairseq-validate",
        *(corpus, "--task", "translation", "--path", post_norm),
        *("--valid-subset", "valid", "--max-tokens", "300", "--cpu"),
    ).stdout
    loss = re.search(r"valid on 'valid' subset \| loss ([\d.]+)", output)
    assert math.isfinite(float(loss[1]))


def test_hydra_train(corpus, tmp_path):
    config = HYDRA_CONFIG.format(data=corpus, save_dir=tmp_path / "run")
    (tmp_path / "tiny.yaml").write_text(config)
    run("fairseq-hydra-train", "--config-dir", tmp_path, "--config-name", "tiny", cwd=tmp_path)
    assert len(generate(corpus, tmp_path / "run" / "checkpoint_last.pt")) == 16


@pytest.mark.parametrize(
    "flags",
    [
        "--amp --store-ema --update-freq 2 --clip-norm 1 --num-workers 0",
        "--fp16 --fp16-no-flatten-grads",
        "--memory-efficient-fp16 --checkpoint-activations",
    ],
)
def test_training_flags(corpus, tmp_path, flags):
    logs = tmp_path / "events"
    flags = ["--max-update", "2", "--tensorboard-logdir", logs, *flags.split()]
    assert "done training" in train(corpus, tmp_path, *flags).stdout
    assert list(logs.glob("train/events*"))


def test_resuming(corpus, post_norm):
    for flags in (["--max-epoch", "3"], ["--max-epoch", "4", "--reset-optimizer"]):
        resumed = train(corpus, post_norm.parent, *flags, "--no-last-checkpoints").stdout
        assert "Loaded checkpoint" in resumed and "begin training epoch 3" in resumed


# Each patch: what happens without it


def test_without_dataclass_hash_fairseq_is_not_imported():
    output = run_without("hash_dataclasses", "fairseq-train", "--help").stdout
    assert "mutable default" in output


def test_without_safe_globals_checkpoints_do_not_load(corpus, post_norm):
    command = ("fairseq-generate", *generation(corpus, post_norm))
    result = run_without("allow_checkpoint_types", *command)
    assert result.returncode and "Weights only load failed" in result.stdout


def test_unknown_types_in_a_checkpoint_stay_refused(corpus, pre_norm, tmp_path):
    path = tmp_path / "checkpoint.pt"
    torch.save(torch.load(pre_norm) | {"intruder": Intruder(tmp_path / "trace")}, path)
    result = run("fairseq-generate", *generation(corpus, path), check=False)
    assert result.returncode and "Weights only load failed" in result.stdout
    assert not (tmp_path / "trace").exists()


class Intruder:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_without_encoder_fast_path_patch_padded_batches_stop(corpus, post_norm):
    result = run_without("avoid_fast_path", "fairseq-generate", *generation(corpus, post_norm))
    assert result.returncode and "Mask Type should be defined" in result.stdout


def test_without_bf16_patch_bf16_asks_for_a_tpu(corpus, tmp_path):
    command = [corpus, "--save-dir", tmp_path, *TINY, "--bf16", "--max-update", "2"]
    assert "xla_device" in run_without("keep_bf16_off_tpu", "fairseq-train", *command).stdout
    assert "done training" in run("fairseq-train", *command).stdout


def test_a_tpu_that_was_asked_for_is_not_taken_away():
    from fairseq import options

    words = ["data", "--arch", "transformer", "--bf16"]
    for tpu in ([], ["--tpu"]):
        args = options.parse_args_and_arch(options.get_training_parser(), [*words, *tpu])
        assert args.bf16 and args.tpu == bool(tpu)


def test_without_cache_patch_older_data_sets_do_not_train(raw_corpus, tmp_path):
    preprocess(raw_corpus, tmp_path / "bin", "--dataset-impl", "lazy")
    command = (tmp_path / "bin", "--save-dir", tmp_path, *TINY, "--max-update", "2")
    result = run_without("read_past_cache", "fairseq-train", *command)
    assert result.returncode and "KeyError" in result.stdout
    assert "done training" in run("fairseq-train", *command).stdout


def test_without_hydra_patch_every_command_warns(corpus, pre_norm):
    command = ("fairseq-generate", *generation(corpus, pre_norm))
    assert "Hydra14MigrationWarning" in run_without("quiet_hydra", *command).stdout
    assert "hydra" not in run(*command).stdout.lower()


# The right fairseq, or one sentence


def sentence_where(tmp_path, version):
    """What ``import smoe_fairseq`` and ``smoe path`` print where fairseq has this version."""
    outputs = []
    if version:
        info = tmp_path / f"fairseq-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fairseq\nVersion: {version}")
    environment = {"PYTHONPATH": f"{tmp_path}:{USER_DIR.parent}"}
    for program in (["-c", "import smoe_fairseq"], ["-m", "smoe_fairseq.cli", "path"]):
        # -S leaves the installed packages out.
        result = run("python", "-S", *program, check=False, **environment)
        assert result.returncode == 1
        outputs.append(result.stdout)
    assert outputs[0] == outputs[1] and outputs[0].count("\n") == 1
    return outputs[0]


def test_missing_fairseq(tmp_path):
    sentence = sentence_where(tmp_path, None)
    assert "not installed" in sentence and "`pip install --no-deps fairseq==0.12.2`" in sentence


def test_another_fairseq(tmp_path):
    sentence = sentence_where(tmp_path, "0.10.2")
    assert "0.10.2" in sentence and "`pip install --no-deps fairseq==0.12.2`" in sentence


def test_another_fairseq_is_left_alone_with_a_warning(tmp_path):
    sentence_where(tmp_path, "0.13.0")
    source = "import dataclasses; print(dataclasses.dataclass.__code__.co_filename)"
    (tmp_path / "fairseq.py").write_text(source)
    result = run("python", "-c", "import fairseq", PYTHONPATH=str(tmp_path))
    assert "needs fairseq 0.12.2, but 0.13.0 is installed" in result.stdout
    assert result.stdout.endswith("/dataclasses.py\n")
