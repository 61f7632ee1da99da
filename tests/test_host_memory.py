"""Memory and cores that this process can use: the machine's, or less by its control groups; huge pages."""

import os
from pathlib import Path

import pytest
from commands import run_python, succeeded

from smoe_fairseq.host_memory import cores, machine_memory

GIB = 2**30
JOB = "/slurm/job_7/step_0"


def write_groups(root, groups: str, limits: dict):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"{groups}\n")
    for name, limit in limits.items():
        file = root / f"sys/fs/cgroup{name}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{limit}\n")


@pytest.mark.parametrize(
    "groups, limits, expected",
    [
        ("0::/", {}, 8),
        (f"0::{JOB}", {f"{JOB}/memory.max": "max", "/slurm/job_7/memory.max": 2 * GIB}, 2),
        (f"0::{JOB}", {f"{JOB}/memory.max": 3 * GIB, "/slurm/memory.max": 2 * GIB}, 2),
        (f"0::{JOB}", {f"{JOB}/memory.max": 64 * GIB}, 8),
        ("0::/elsewhere", {f"{JOB}/memory.max": 2 * GIB}, 8),  # another job's
        ("0::/on/the/host", {"/memory.max": 4 * GIB}, 4),
        (
            f"5:cpu,cpuacct:/\n3:memory:{JOB}\n0::/",
            {f"/memory{JOB}/memory.limit_in_bytes": GIB, f"{JOB}/memory.max": 1},
            1,
        ),
        (f"3:memory:{JOB}", {"/memory/memory.limit_in_bytes": 2**63 - 4096}, 8),
    ],
)
def test_the_smallest_limit_counts(tmp_path, groups, limits, expected):
    write_groups(tmp_path, groups, limits)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {8 * 2**20} kB\nSwapTotal: 99999999 kB\n")
    assert machine_memory(tmp_path) == expected * GIB


def test_this_machine():
    assert machine_memory() > 2**20


@pytest.mark.parametrize(
    "groups, limits, expected",
    [
        ("0::/", {}, 8),
        (f"0::{JOB}", {f"{JOB}/cpu.max": "max 100000", "/slurm/cpu.max": "250000 100000"}, 2),
        (f"0::{JOB}", {f"{JOB}/cpu.max": "1000 100000"}, 1),
        ("0::/on/the/host", {"/cpu.max": "300000 100000"}, 3),
        (
            "5:cpu,cpuacct:/\n0::/",
            {"/cpu/cpu.cfs_quota_us": 400000, "/cpu/cpu.cfs_period_us": 100000},
            4,
        ),
        ("5:cpu,cpuacct:/", {"/cpu/cpu.cfs_quota_us": -1, "/cpu/cpu.cfs_period_us": 100000}, 8),
    ],
)
def test_cores(tmp_path, monkeypatch, groups, limits, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    write_groups(tmp_path, groups, limits)
    assert cores(tmp_path) == expected


THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.soak
@pytest.mark.skipif(
    not THP.exists() or "[never]" in THP.read_text(),
    reason="this system has no transparent huge pages",
)
def test_what_is_allocated_next_lies_in_huge_pages():
    program = """
import re, torch
from pathlib import Path
from smoe_fairseq.host_memory import keep_freed_memory, reserve_huge_pages
reserve_huge_pages(1 << 26)  # freed memory is not kept: nothing happens
if keep_freed_memory():
    reserve_huge_pages(1 << 26)
    weights = torch.ones(1 << 23)
    used = Path("/proc/self/smaps_rollup").read_text()
    assert int(re.search(r"AnonHugePages: +([0-9]+)", used)[1]) > 0, used
"""
    succeeded(run_python(program))
