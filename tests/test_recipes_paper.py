"""The recipes of the paper's data sets and systems, as they are printed."""

import shlex
import subprocess

import pytest
from commands import step_here
from test_recipes import ROOT, commands, refusal, value

from smoe_fairseq import cli
from smoe_fairseq.recipes.training import precision
from smoe_fairseq.recipes.training.launcher import Launch


def dry(tmp_path, script: str, *words, **environment) -> subprocess.CompletedProcess:
    """What a script prints."""
    environment = {"DRY_RUN": "1", "GPUS": "1", "CONFIG_DIR": str(ROOT / "configs")} | environment
    result = step_here(script, *words, cwd=tmp_path, **environment)
    assert list(tmp_path.iterdir()) == []
    return result


@pytest.mark.parametrize("words", ["prepare m4", "train m4 moe", "evaluate m4 moe"])
def test_smoe_runs_what_the_scripts_run(tmp_path, words):
    given = {"DRY_RUN": "1", "GPUS": "1", "WORKERS": "2", "CONFIG_DIR": str(ROOT / "configs")}
    one, other = (
        step_here(*words.split(), cwd=tmp_path, main=m, **given) for m in (cli.main, None)
    )
    assert one.returncode == other.returncode == 0 and one.stdout == other.stdout
    assert one.stdout.startswith("# m4")


def batch(words: list[str], processes: int) -> int:
    """Tokens of an update."""
    return processes * int(value(words, "--max-tokens")) * int(value(words, "--update-freq"))


def trained(result: subprocess.CompletedProcess) -> list[str]:
    """The training command, whatever starts it."""
    assert result.returncode == 0, result.stderr
    (line,) = [x for x in result.stdout.splitlines() if " --save-dir " in x]
    return shlex.split(line)


@pytest.mark.parametrize(
    "dataset, tokens, nodes, gpus",
    [("m4", 13_000, 1, 3), ("m15", 13_000, 2, 8), ("opus100", 65_000, 1, 1)],
)
def test_tokens_per_update_do_not_depend_on_gpus(tmp_path, dataset, tokens, nodes, gpus):
    result = dry(tmp_path, "train", dataset, "moe", GPUS=str(gpus), NODES=str(nodes))
    assert batch(trained(result), nodes * gpus) == pytest.approx(tokens, rel=0.02)
    assert "warning" not in result.stderr
    assert f"paper ({tokens:,})" in result.stdout


def test_batch_of_the_released_scripts_and_any_other(tmp_path):
    given = {"GPUS": "8", "NODES": "4", "BATCH": "release"}
    words = trained(dry(tmp_path, "train", "m15", "moe", **given))
    assert (value(words, "--max-tokens"), value(words, "--update-freq")) == ("4096", "1")
    assert "--smoe-norm" not in dry(tmp_path, "train", "m15", "moe", **given).stdout
    assert "--smoe-norm released" in dry(tmp_path, "train", "m15", "smoe-4-12", **given).stdout
    has_it = dry(tmp_path, "train", "m15", "smoe-released-4-12", **given).stdout
    assert has_it.count("--smoe-norm released") == 1 and "# --smoe-norm" not in has_it
    words = trained(dry(tmp_path, "train", "m15", "moe", BATCH="100000", GPUS="2"))
    assert batch(words, 2) == pytest.approx(100_000, rel=0.02)


def test_too_many_gpus_for_the_batch_are_refused(tmp_path):
    """The longest sentence has to fit in; flags of one's own are one's own batch."""
    sentence = refusal(dry(tmp_path, "train", "m4", "moe", NODES="4", GPUS="8"))
    assert "32 ranks" in sentence and "13,000" in sentence and "25" in sentence
    assert "--gpus" in refusal(dry(tmp_path, "train", "multi30k", "moe", GPUS="9" * 20))
    result = dry(tmp_path, "train", "m4", "moe", "--max-tokens", "512", NODES="4", GPUS="8")
    (warning,) = [x for x in result.stderr.splitlines() if x.startswith("warning: ")]
    assert "16,384 tokens per update" in warning and "13,000" in warning


BATCHES = {  # of a data set that sets --max-tokens 4096 alone, by ranks and flags
    (1, ""): ("4096", None),
    (2, ""): ("2048", "1"),
    (3, ""): ("1365", "1"),
    (8, ""): ("512", "1"),
    (1, "--max-tokens 1000"): ("1000", None),
    (2, "--max-tokens 1000"): ("500", "1"),
    (2, "--max-tokens=1000 --lr 1"): ("500", "1"),
    (2, "--max-tokens 1000 --update-freq 3"): ("1000", "3"),  # as fairseq has them
    (2, "--update-freq 3"): ("4096", "3"),
    (1, "BATCH=16384"): ("4096", "4"),
    (2, "BATCH=16384"): ("4096", "2"),
    (2, "BATCH=16384 --max-tokens 2048"): ("2048", "4"),
    (1, "BATCH=16384 --update-freq 8"): ("2048", "8"),
}


@pytest.mark.parametrize("ranks, given", BATCHES)
def test_ranks_share_the_batch_of_one(tmp_path, ranks, given):
    set_to = dict(word.split("=") for word in given.split() if word.startswith("BATCH"))
    flags = [word for word in given.split() if not word.startswith("BATCH")]
    words = trained(dry(tmp_path, "train", "multi30k", "moe", *flags, GPUS=str(ranks), **set_to))
    tokens, frequency = BATCHES[ranks, given]
    assert value([w.replace("=", " ") for w in words], "--max-tokens") == tokens
    assert ("--update-freq" in words) == (frequency is not None)
    assert frequency is None or value(words, "--update-freq") == frequency
    assert ("--lr" in flags) == (words[-2:] == ["--lr", "1"])


def test_launchers(tmp_path):
    """Their words are those of the golden files; a job of SLURM has a rendezvous of its own."""
    given = {"LAUNCHER": "slurm", "NODES": "2", "GPUS": "8", "MASTER_ADDR": "node7"}
    words = trained(dry(tmp_path, "train", "m4", "moe", SLURM_JOB_ID="42", **given))
    assert value(words, "--rdzv-id") == "42"
    sentence = refusal(dry(tmp_path, "train", "m4", "moe", LAUNCHER="plain", GPUS="2"))
    assert "torchrun or slurm" in sentence


ASKED = "as --precision requests"
PRECISIONS = {  # flags, and what is said of them
    ("GPUS=0",): (set(), "fp32, the default on CPUs"),
    ("GPUS=0", "PRECISION=fp16"): (set(), "fp32, the default on CPUs, not fp16"),
    ("GPUS=1", "PRECISION=fp32"): (set(), f"fp32, {ASKED}"),
    ("GPUS=1", "PRECISION=fp16"): ({"--fp16"}, f"fp16, {ASKED}"),
    ("GPUS=0", "PRECISION=bf16"): ({"--bf16"}, f"bf16, {ASKED}"),  # a CPU has it
    ("GPUS=1", "PRECISION=bf16", "--expert-parallel"): ({"--bf16"}, f"bf16, {ASKED}"),
    ("GPUS=1", "PRECISION=fp16", "--expert-parallel"): (
        {"--fp16", "--fp16-no-flatten-grads"},
        f"fp16, {ASKED}",
    ),
    ("GPUS=1", "PRECISION=fp16", "--amp"): ({"--amp"}, "--amp, as the flags request"),
}


@pytest.mark.parametrize("given", PRECISIONS)
def test_precision(tmp_path, given):
    set_to = dict(word.split("=") for word in given if "=" in word)
    flags = [word for word in given if word.startswith("--")]
    result = dry(tmp_path, "train", "m4", "moe", *flags, **set_to)
    (words,) = commands(result, "fairseq-train")
    known = {"--fp16", "--bf16", "--amp", "--fp16-no-flatten-grads"}
    expected, said = PRECISIONS[given]
    assert known & set(words) == expected
    assert f"# number type: {said}" in result.stdout


@pytest.mark.parametrize("bf16", [True, False])
def test_precision_follows_the_gpu(monkeypatch, bf16):
    """And stays, when the run resumes elsewhere."""
    monkeypatch.delenv("PRECISION", raising=False)
    monkeypatch.setattr(precision, "has_bf16", lambda: bf16)
    gpu, cpu = Launch("plain", 1, 1, False), Launch("plain", 1, 0, True)
    flags, (note,) = precision.precision_flags("auto", gpu, [])
    assert flags == {"bf16" if bf16 else "fp16": True}
    assert ("this GPU supports" if bf16 else "no GPU here supports bf16") in note
    for before, expected in (("--bf16", {"bf16": True}), ("--lr", {})):
        for place in (gpu, cpu):
            assert precision.precision_flags("auto", place, [], {before: ""})[0] == expected
    assert precision.precision_flags("fp32", gpu, [])[0] == {}


def test_folders_whose_names_look_like_flags(tmp_path):
    result = dry(tmp_path, "prepare", "opus100", DATA_DIR="-d", RAW="-r")
    words = shlex.split(result.stdout, comments=True)
    assert str(tmp_path / "-r") in words and str(tmp_path / "-d/opus100/raw") in words
    assert not [word for word in words if word.startswith(("-r", "-d")) and word != "-rf"]
