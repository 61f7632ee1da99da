"""ZeRO: the optimizer's state spread over processes trains, saves and resumes what is trained without."""

from pathlib import Path

import pytest
import torch
from programs import HANGS
from sampling import soak
from test_compat import run_without
from test_expert_parallel import checkpoint, flags
from test_expert_parallel_hangs import train_until
from test_several_processes import LAST, assert_same_bits, content, stock

ZERO = ("--zero-sharding", "os")
ACCUMULATED_CLIPPED = ("--update-freq", 2, "--clip-norm", 0.5)


@pytest.mark.soak
def test_trains_and_resumes_as_without(ranks, small_corpus, tmp_path):
    """Bit for bit, the optimizer's state too: either can go on with what the other has saved."""
    for name, updates, zero in (("plain", 4, ()), ("zero", 2, ZERO), ("zero", 4, ZERO)):
        more = ("--ddp-backend", "legacy_ddp", "--max-update", updates, *zero)
        ranks.train(tmp_path / "logs", 2, *flags(small_corpus, tmp_path / name, *more))
    assert_same_bits(content(tmp_path / "zero"), content(tmp_path / "plain"))


def sharded(data, folder, *more) -> list:
    """Experts spread over processes, with dropout and sampled experts."""
    drawn = ("--dropout", 0.1, "--moe-second-expert-policy", "sampling")
    drawn += ("--lr-scheduler", "inverse_sqrt", "--warmup-updates", 2)
    return flags(data, folder, "--expert-parallel", *drawn, *ACCUMULATED_CLIPPED, *more)


def assert_same_sets(one: Path, other: Path) -> None:
    """The files of all processes, bit for bit."""
    ours, theirs = checkpoint(one), checkpoint(other)
    for mine, its in zip(ours.states, theirs.states, strict=True):
        assert_same_bits(mine, its)
    ours.check_agreement()


PRECISIONS = {
    "fp32": (),
    "memory-efficient-fp16": ("--memory-efficient-fp16", "--fp16-init-scale", 4),
    "bf16": ("--bf16",),
    "fp16": ("--fp16", "--fp16-no-flatten-grads", "--fp16-init-scale", 4),
}
SWITCHED_ON = [(1, ()), (2, ZERO)]  # updates of each start
SWITCHED_OFF_AND_ON = [(1, ZERO), (2, ()), (3, ZERO)]


@pytest.mark.parametrize(
    "world_size, strata, precision, starts",
    [
        (2, "2-2-2-2", "fp32", SWITCHED_ON),
        soak(4, "2", "fp32", SWITCHED_OFF_AND_ON),
        soak(2, "4-4", "memory-efficient-fp16", SWITCHED_OFF_AND_ON),
        soak(4, "2", "bf16", SWITCHED_ON),
        soak(2, "4-4", "fp16", SWITCHED_OFF_AND_ON),
    ],
)
def test_beside_sharded_experts(
    ranks, small_corpus, tmp_path, world_size, strata, precision, starts
):
    """Replicas among them (4 processes, 2 experts)."""
    more = ("--smoe-strata", strata, *PRECISIONS[precision])
    for name, parts in (("plain", [(starts[-1][0], ())]), ("zero", starts)):
        for updates, zero in parts:
            arguments = sharded(small_corpus, tmp_path / name, *more, *zero)
            run = ranks.train(tmp_path / "logs", world_size, *arguments, "--max-update", updates)
    assert f"@ {starts[-2][0]} updates" in run.output(0)
    assert_same_sets(tmp_path / "zero", tmp_path / "plain")


@pytest.mark.parametrize("parallel", [soak(()), ("--expert-parallel",)], ids=str)
def test_a_process_that_fails_does_not_wait_for_state(ranks, small_corpus, tmp_path, parallel):
    """To save crash.pt fairseq asks all for their part of it, and the others are in another call."""
    arguments = flags(small_corpus, tmp_path / "run", *ZERO, *parallel)
    run = ranks.start(tmp_path / "logs", 2, "exception", arguments, function=train_until)
    status = run.programs[1].wait(HANGS)
    run.kill()
    assert status == 1, run.output(1)[-3000:]
    last = run.output(1).strip().splitlines()[-1]
    assert last.startswith("error: ValueError: this batch cannot be read (")
    if parallel:
        crash = torch.load(tmp_path / "run" / "crash-rank-1.pt", weights_only=True)
        assert crash["last_optimizer_state"] == {} and crash["model"]


def test_one_process_trains(ranks, small_corpus, tmp_path):
    """It has nobody to share with, whatever is installed."""
    arguments = stock(small_corpus, tmp_path / "new", *ZERO, "--max-update", 1)
    ranks.train(tmp_path / "logs", 1, *arguments, one=True)
    assert (tmp_path / "new" / LAST).exists()
    command = ("fairseq-train", *stock(small_corpus, tmp_path / "none", *ZERO))
    assert "Traceback" in run_without("leave_one_process_whole", *command).stdout
