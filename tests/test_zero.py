"""ZeRO: the optimizer's state spread over processes trains, saves and resumes what is trained without."""

import gc
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from sampling import soak
from test_compat import run_without
from test_expert_parallel import checkpoint, flags, furthest, whole
from test_several_processes import LAST, assert_same_bits, content, stock

from smoe_fairseq.cli import main

ZERO = ("--zero-sharding", "os")
ACCUMULATED_CLIPPED = ("--update-freq", 2, "--clip-norm", 0.5)


@pytest.mark.parametrize("world_size, model", [(2, "smoe"), soak(4, "stock")])
def test_trains_and_resumes_as_without(ranks, small_corpus, tmp_path, world_size, model):
    """Bit for bit, the optimizer's state too: either can go on with what the other has saved."""
    make = flags if model == "smoe" else stock
    for name, updates, zero in (("plain", 4, ()), ("zero", 2, ZERO), ("zero", 4, ZERO)):
        more = ("--ddp-backend", "legacy_ddp", "--max-update", updates, *zero)
        ranks.train(tmp_path / "logs", world_size, *make(small_corpus, tmp_path / name, *more))
    assert_same_bits(content(tmp_path / "zero"), content(tmp_path / "plain"))


def sharded(data, folder, *more) -> list:
    """Experts spread over processes, with dropout and sampled experts."""
    drawn = ("--dropout", 0.1, "--moe-second-expert-policy", "sampling")
    return flags(data, folder, "--expert-parallel", *drawn, *ACCUMULATED_CLIPPED, *more)


def assert_same_sets(one: Path, other: Path) -> None:
    """The files of all processes, bit for bit."""
    ours, theirs = checkpoint(one), checkpoint(other)
    for mine, its in zip(ours.states, theirs.states, strict=True):
        for state in (mine, its):
            state["model"].pop("encoder.embed_positions._float_tensor", None)
            state["model"].pop("decoder.embed_positions._float_tensor", None)
        assert_same_bits(mine, its)
    ours.check_agreement()


PRECISIONS = {
    "fp32": (),
    "memory-efficient-fp16": ("--memory-efficient-fp16", "--fp16-init-scale", 4),
    "memory-efficient-bf16": ("--memory-efficient-bf16",),
    "bf16": ("--bf16",),
    "fp16": ("--fp16", "--fp16-no-flatten-grads", "--fp16-init-scale", 4),
}
ROUNDED_WHEN_RESUMED = ("bf16", "fp16")  # whose checkpoints hold the model in half precision


@pytest.mark.parametrize(
    "world_size, strata, precision",
    [
        (2, "2-2-2-2", "fp32"),
        (4, "2", "fp32"),
        (2, "4-4", "memory-efficient-fp16"),
        soak(4, "2-2-2-2", "fp32"),
        soak(2, "4-4", "memory-efficient-bf16"),
        soak(4, "2", "bf16"),
        soak(2, "4-4", "fp16"),
    ],
)
def test_beside_sharded_experts(ranks, small_corpus, tmp_path, world_size, strata, precision):
    """Replicas among them (4 processes, 2 experts); begun with it, gone on without, and with it again."""
    more = ("--smoe-strata", strata, *PRECISIONS[precision])
    starts = [(2, ZERO), (3, ()), (5, ZERO)]
    if precision in ROUNDED_WHEN_RESUMED:
        starts = starts[-1:]
    for name, parts in (("plain", [(5, ())]), ("zero", starts)):
        for updates, zero in parts:
            arguments = sharded(small_corpus, tmp_path / name, *more, *zero)
            run = ranks.train(tmp_path / "logs", world_size, *arguments, "--max-update", updates)
    assert len(starts) == 1 or "@ 3 updates" in run.output(0)
    assert_same_sets(tmp_path / "zero", tmp_path / "plain")
