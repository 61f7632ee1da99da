"""fairseq's own options with values that it takes unseen, and data that is not what its index says."""

import shutil
from pathlib import Path

import pytest
from commands import PLUGIN, TINY, run
from sampling import soak
from test_compat import run_without

GPUS = "expected at most as many"
BAD = {
    "--batch-size 99999999999999999999": "expected a whole number of at least -1 and at most",
    "--seed 4294967296": "expected a whole number of at least 0 and at most 4294967295",
    "--num-workers -1": "expected a whole number of at least 0",
    "--log-interval 0": "expected a whole number of at least 1",
    "--required-batch-size-multiple 0": "expected a whole number of at least 1",
    "--adam-betas (1,2)": "expected two numbers from 0 to below 1",
    "--adam-betas 0.9": "expected two numbers from 0 to below 1",
    "--adam-betas x": "expected two numbers from 0 to below 1",
    "--update-freq 0": "expected a number of at least 1, or one for each epoch",
    "--update-freq 1,-1": "expected a number of at least 1, or one for each epoch",
    "--update-freq []": "expected a number of at least 1, or one for each epoch",
    "--lr []": "expected a number of at least 0, or one for each epoch",
    "--distributed-world-size 0": "expected a whole number of at least 1",
    "--distributed-world-size 9000": "torchrun --nproc-per-node 9000",
    "--finetune-from-model /none.pt": "does not exist",
    "--fp16": "expected --fp16-no-flatten-grads beside it",
}


@pytest.mark.parametrize("given", BAD)
def test_a_bad_value_is_named(corpus, tmp_path, given):
    command = ("fairseq-train", corpus, "--save-dir", tmp_path / "run", *TINY, *given.split())
    result = run(*command, check=False)
    last = result.stdout.splitlines()[-1]
    assert result.returncode == 1 and "Traceback" not in result.stdout
    assert last.startswith(f"error: {given.split()[0]}") and BAD[given] in last
    assert not list((tmp_path / "run").glob("*.pt"))


OTHER_CRITERION = "--arch smoe_transformer_tiny --no-share-all-embeddings --smoe-strata 4-4"
WITHOUT_EFFECT = {
    "--moe-balance bias": "--moe-second-expert-policy all",
    "--moe-balance-over update": "",
    "--smoe-capacity-budget": "1.5",
}


@pytest.mark.parametrize("flag", [soak(f) if "-over" in f else f for f in WITHOUT_EFFECT])
def test_what_another_criterion_would_leave_without_effect_is_refused(corpus, tmp_path, flag):
    given = (*OTHER_CRITERION.split(), *flag.split(), *WITHOUT_EFFECT[flag].split())
    command = ("fairseq-train", corpus, "--save-dir", tmp_path / "run", *TINY, *given)
    result = run(*command, "--user-dir", PLUGIN, check=False)
    last = result.stdout.splitlines()[-1]
    assert result.returncode == 1 and last.startswith(
        f"error: {flag} with --criterion label_smoothed"
    )
    assert last.endswith("expected --criterion smoe_label_smoothed_cross_entropy")
    assert not (tmp_path / "run").exists()


def test_experts_without_a_balance_loss_are_told_of(corpus, tmp_path):
    """A model without experts has nothing to be told of."""
    for more, count in (("--max-update 1", 1), ("--max-update 1 --moe-freq 0", 0)):
        given = (*OTHER_CRITERION.split()[: 3 if count == 0 else None], *more.split())
        command = ("fairseq-train", corpus, "--save-dir", tmp_path / more[-1], *TINY, *given)
        told = run(*command, "--user-dir", PLUGIN, "--disable-validation").stdout
        assert told.count("has no loss that keeps the experts equally busy") == count


def test_it_is_the_mend(corpus, tmp_path):
    command = ("fairseq-train", corpus, "--save-dir", tmp_path, *TINY, "--update-freq", 0)
    assert "Traceback" in run_without("name_bad_values", *command).stdout


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


FAULTS = {
    "idx of no length": (lambda d: cut(d / "train.src-tgt.src.idx", 0), "src.idx is cut off"),
    "idx cut off": (lambda d: cut(d / "train.src-tgt.src.idx", 40), "src.idx is not as long as"),
    "text": (lambda d: (d / "train.src-tgt.src.idx").write_text("x" * 99), "or not an index"),
    "bin cut off": (lambda d: cut(d / "train.src-tgt.src.bin", 20), "src.bin has 20 bytes, and"),
    "dictionary": (lambda d: (d / "dict.src.txt").write_text("a b c\n"), "dict.src.txt: Incorrect"),
    "small dictionary": (lambda d: (d / "dict.src.txt").write_text("a 1\n"), "only 5 words"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("program", ["fairseq-train", "fairseq-generate"])
def test_data_that_is_not_whole_is_named(corpus, pre_norm, tmp_path, fault, program):
    break_it, words = FAULTS[fault]
    data = shutil.copytree(corpus, tmp_path / "data")
    break_it(data)
    save = ("--save-dir", tmp_path / "run")
    command = {
        "fairseq-train": ("fairseq-train", data, *save, *TINY),
        "fairseq-generate": ("fairseq-generate", data, "--path", pre_norm, "--gen-subset", "train"),
    }[program]
    result = run(*command, check=False)
    last = result.stdout.splitlines()[-1]
    assert result.returncode == 1 and "Traceback" not in result.stdout, result.stdout[-3000:]
    assert last.startswith("error: ")
    if "dictionary" not in fault:  # where the checkpoint is of another one, this is found first
        assert words in last
