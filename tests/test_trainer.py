"""Who asks for fairseq's trainer gets ours, whatever the command; who asks for another gets that one."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from commands import (
    FAIRSEQ,
    PLUGIN,
    SCRIPTS,
    TORCH,
    WITH_PLUGIN,
    refused,
    run,
    run_forked,
    run_python,
    succeeded,
)
from programs import wait_until
from ranks import fairseq_train, train_with
from sampling import soak
from test_lock import GLOO, SMALL
from test_signals import ended

OURS = "smoe_experts"  # what only our trainer writes into a checkpoint
MOE = ["--moe-freq", 2, "--smoe-strata", "2", "--max-update", 1, "--patience", 3]
MOE = [*(flag for flag in SMALL if flag != "--disable-validation"), *MOE]

RUN = """
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("torchrun", [False, soak(True)])
def test_every_command_trains_with_ours(small_corpus, tmp_path, torchrun):
    """fairseq-hydra-train too, which test_training.py runs."""
    words = (SCRIPTS / "fairseq-train", small_corpus, "--save-dir", tmp_path, *MOE)
    if torchrun:
        start = ("torchrun", "--standalone", "--nproc-per-node", 2, "--no-python")
        run(*start, *words, *GLOO, fresh=True)
    else:  # from a process that has imported nothing of fairseq
        assert run_python(RUN, *words).returncode == 0
    last = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)
    assert OURS in last and last["extra_state"]["early_stop"]["best"] > 0


@pytest.mark.parametrize("by_path", [True, soak(False)])
def test_a_file_of_fairseq_that_is_the_program_is_patched(by_path):
    """Else its own functions would be fairseq's."""
    name = "fairseq_cli.generate"
    words = ("no/data", "--user-dir", PLUGIN, "--path", "no.pt", "--cpu", "--shard-id", 3)
    if by_path:
        result = run_forked(importlib.util.find_spec(name).origin, *words)
    else:
        result = run("python", "-m", name, *words, check=False, fresh=True)
    refused(result, "--shard-id 3")


FIRST = {  # and from which process, as that of fairseq has imported its trainer
    "fairseq_cli.train": FAIRSEQ,
    "smoe_fairseq.training.trainer": TORCH,
    "smoe_fairseq.translate.search": TORCH,
}


@pytest.mark.parametrize("first", FIRST)
def test_subclasses_stay_what_they_are_whatever_is_imported_first(first):
    program = f"""
import {first}, fairseq_cli.train, smoe_fairseq
from fairseq_cli.train import MegatronTrainer, Trainer
from smoe_fairseq.training.trainer import SMoETrainer
assert type(Trainer.__new__(Trainer, 1, task=2)) is SMoETrainer
assert type(MegatronTrainer.__new__(MegatronTrainer)) is MegatronTrainer
assert issubclass(SMoETrainer, Trainer)
"""
    succeeded(run_python(program, server=FIRST[first]))


BIAS = ("--moe-balance", "bias", "--moe-second-expert-policy", "all")
SUBCLASS = """
import sys, fairseq_cli.train
from fairseq.trainer import Trainer
fairseq_cli.train.Trainer = type("Own", (Trainer,), {})
sys.argv = sys.argv[1:]
fairseq_cli.train.cli_main()
"""


@pytest.mark.parametrize(
    "program, words",
    [
        (SUBCLASS, ("--moe-balance bias", "SMoETrainer")),
        (RUN, ("--moe-balance bias", "--use-bmuf")),
    ],
    ids=["subclass", "bmuf"],
)
def test_gates_that_only_our_updates_teach(small_corpus, tmp_path, program, words):
    """A bias would stay 0 for ever, or drift apart: refused in one sentence."""
    bmuf = ["--use-bmuf"] if program == RUN else []
    flags = (SCRIPTS / "fairseq-train", small_corpus, "--save-dir", tmp_path, *MOE, *bmuf)
    result = run_python(program, *flags, *BIAS, server=WITH_PLUGIN)
    assert result.returncode == 1 and all(word in result.stdout for word in words), result.stdout
    assert not list(tmp_path.glob("checkpoint*"))
    from test_model import tiny

    from smoe_fairseq.training.trainer import learns_by_updates

    assert learns_by_updates([tiny()]) is None


def test_without_the_plugin_the_trainer_is_fairseqs():
    program = "from fairseq.trainer import Trainer as T; assert type(T.__new__(T)) is T"
    assert run_python(program, server=FAIRSEQ).returncode == 0


# A first update whose gradients overflow, as the loss scaler of a GPU reports it: the step is skipped.
OVERFLOW = """
import sys, torch
import fairseq_cli.train
from fairseq.optim.amp_optimizer import AMPOptimizer
clip, calls = AMPOptimizer.clip_grad_norm, []
def overflow_once(self, *arguments, **options):
    calls.append(1)
    if len(calls) > 1:
        return clip(self, *arguments, **options)
    self.fp32_optimizer.zero_grad()
    return torch.tensor(float("inf"))
AMPOptimizer.clip_grad_norm = overflow_once
sys.argv = sys.argv[1:]
fairseq_cli.train.cli_main()
print("calls", len(calls))
"""


def test_amp_repeats_a_batch_that_overflows(small_corpus, tmp_path):
    """fairseq's `train_step` then calls itself, inside of what ours has entered."""
    more = ["--save-dir", tmp_path, "--amp", "--max-update", 2, "--disable-validation"]
    words = ("fairseq-train", small_corpus, *MOE, *more)
    result = succeeded(run_python(OVERFLOW, *words, server=WITH_PLUGIN))
    assert "calls 3" in result.stdout.splitlines()


def without_memory(failing: str, arguments: list) -> None:
    """``fairseq-train`` where batches do not fit: all, those of validation, or these at first."""
    from fairseq.tasks.translation import TranslationTask

    steps, calls = "valid_step" if failing in ("valid", "at first") else "train_step", []
    original = getattr(TranslationTask, steps)

    def step(self, *others, **options):
        calls.append(1)
        fails = {"all but one": len(calls) > 1, "at first": len(calls) % 2 == 1, "none": False}
        if fails.get(failing, True):
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"
            )
        return original(self, *others, **options)

    setattr(TranslationTask, steps, step)
    fairseq_train(arguments)


@pytest.mark.parametrize(
    "failing, advice",
    [
        ("all", "try --max-tokens 200 --update-freq 4, which is the same batch"),
        ("valid", "try --max-tokens-valid 200"),
    ],
)
def test_out_of_memory_ends_with_the_batch_to_try(ranks, small_corpus, tmp_path, failing, advice):
    arguments = [small_corpus, "--save-dir", tmp_path, *SMALL, "--update-freq", 2]
    arguments += ["--max-update", 3, "--no-save"]
    if failing == "valid":
        arguments.remove("--disable-validation")
    run = ranks.start(tmp_path, 1, failing, arguments, function=without_memory, one=True)
    assert run.wait() == [1], run.output()
    assert run.output().splitlines()[-1].endswith(advice)


def one_rank_without_memory(whose: str, arguments: list) -> None:
    """``fairseq-train`` where batches do not fit: all but the first of rank 0, or those of all ranks."""
    failing = "all but one" if os.environ["RANK"] == "0" else "none"
    without_memory("all" if whose == "all" else failing, arguments)


@pytest.mark.parametrize("whose", ["one", "all"])
def test_a_rank_out_of_memory_ends_no_run_in_which_others_train(
    ranks, small_corpus, tmp_path, whose
):
    arguments = [small_corpus, "--save-dir", tmp_path, *SMALL, *GLOO, "--max-update", 5]
    run = ranks.start(tmp_path, 2, whose, arguments, function=one_rank_without_memory)
    assert run.wait() == ([0, 0] if whose == "one" else [1, 1]), run.output()
    assert ("a batch was skipped: try --" in run.output(0)) == (whose == "one")
    assert (tmp_path / "checkpoint_last.pt").exists() == (whose == "one")


@pytest.mark.parametrize("number", [1, soak(2)])
def test_a_validation_that_fails_loses_no_update(ranks, small_corpus, tmp_path, number):
    arguments = [small_corpus, "--save-dir", tmp_path, *SMALL, *GLOO, "--max-update", 2]
    arguments.remove("--disable-validation")
    run = ranks.start(tmp_path, number, "valid", arguments, function=without_memory, one=number < 2)
    assert run.wait() == [1] * number, run.output()
    file = tmp_path / ("checkpoint_last.pt" if number == 1 else "crash.pt")
    state = torch.load(file, weights_only=True)
    assert state["optimizer_history"][-1]["num_updates"] == 2
    assert state["extra_state"]["train_iterator"]["epoch"] >= 1


def test_batches_of_validation_that_fit_at_the_second_try_end_no_run(ranks, small_corpus, tmp_path):
    arguments = [small_corpus, "--save-dir", tmp_path, *SMALL, "--max-update", 1, "--no-save"]
    arguments.remove("--disable-validation")
    arguments += ["--batch-size-valid", 1]
    run = ranks.train(tmp_path, 1, "at first", arguments, function=without_memory, one=True)
    assert run.output().count("retrying batch") > 3


AS_TORCHRUN = """
import os, subprocess, sys, time
child = subprocess.Popen(sys.argv[1:], env={**os.environ, "TORCHELASTIC_RUN_ID": "1"})
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="parents' ends are signalled by Linux alone")
def test_a_rank_ends_with_its_torchrun(small_corpus, tmp_path):
    """Whatever ended that: SIGKILL cannot be passed on."""
    words = [SCRIPTS / "fairseq-train", small_corpus, "--save-dir", tmp_path / "run", *SMALL]
    words += ["--max-update", 10**6, "--no-save", "--log-file", tmp_path / "log"]
    words = [sys.executable, "-c", AS_TORCHRUN, *map(str, words)]
    torchrun = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    rank = int(torchrun.stdout.readline())
    log = tmp_path / "log"
    wait_until(lambda: log.exists() and "Start iterating" in log.read_text(), torchrun)
    torchrun.kill()
    torchrun.communicate()
    wait_until(lambda: ended(rank))


LOADING_AHEAD = """
import sys
import torch
from fairseq.data import LanguagePairDataset
from fairseq_cli import train

original = LanguagePairDataset.collater

def collater(self, *others, **options):
    for _ in range(3000):  # without Python's lock most of the time
        torch.ones(150, 150) @ torch.ones(150, 150)
    return original(self, *others, **options)

LanguagePairDataset.collater = collater
train.cli_main()
"""


@pytest.mark.soak
def test_a_thread_that_loads_data_does_not_abort_a_finished_run(small_corpus, tmp_path):
    """It computes when Python ends."""
    words = [small_corpus, "--save-dir", tmp_path, *SMALL, "--max-update", 1, "--no-save"]
    ahead = ("--num-workers", 0, "--data-buffer-size", 100)
    run("python", "-c", LOADING_AHEAD, *words, *ahead, fresh=True)


def moving(folder: str, arguments: list) -> None:
    """``fairseq-train`` whose folder somebody moves in the third update."""

    def move(updates: int) -> None:
        if updates == 2 and os.environ.get("RANK", "0") == "0":
            os.rename(folder, f"{folder}.moved")

    train_with(move, arguments)


@pytest.mark.parametrize("number", [1, soak(2)])
def test_a_folder_that_is_moved_is_named_and_nothing_lost(ranks, small_corpus, tmp_path, number):
    folder = tmp_path / "run"
    arguments = [small_corpus, "--save-dir", folder, *MOE, "--save-interval-updates", 1, *GLOO]
    arguments += ["--max-update", 4]
    run = ranks.start(tmp_path, number, folder, arguments, function=moving, one=number == 1)
    statuses = run.wait()
    assert 0 not in statuses, run.output()
    assert f"{folder} was moved" in run.output(0).splitlines()[-1]
    saved = [
        torch.load(path / "checkpoint_last.pt", weights_only=True)["optimizer_history"][-1]
        for path in (tmp_path / "run.moved", folder)
    ]
    assert [each["num_updates"] for each in saved] == [2, 3]
