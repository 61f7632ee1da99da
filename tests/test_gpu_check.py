"""`make gpu-check`: its schedule and report, and a rehearsal of the whole on the CPU."""

import importlib
import json
import os
import re
import sys
import time
from functools import partial

import pytest
import torch

from benchmarks.gpu import fast, resources, right, training, update
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.parts import PARTS, Context, Part, plan, rounds, run_all
from benchmarks.gpu.report import goal, passed, report, summary
from smoe_fairseq.modules import torch_features
from smoe_fairseq.modules.routing import Capacity


def part(name, seconds=20, least=0):
    return Part(name, "none:none", seconds, "about it", least)


def scheduled(tmp_path, functions, cores=2, **limits):
    """Results of parts that are generator functions, and what the file has of them."""
    parts = [part(name, limits.get(name, 20)) for name in functions]
    file = tmp_path / "results.jsonl"
    found = run_all(parts, 60, file, lambda which: functions[which.name](), cores)
    assert [json.loads(line) for line in file.read_text().splitlines()] == found
    return found


def test_a_part_that_fails_or_hangs_keeps_its_results_and_the_next_runs(tmp_path, capsys):
    def hangs():
        yield {"case": "a", "ok": True}
        time.sleep(60)

    def fails():
        yield {"case": "a", "ok": True}
        print("why")
        raise SystemExit(3)

    def works():
        yield from ({"case": "a", "ok": True}, {"case": "b", "ok": False})

    functions = {"hangs": hangs, "fails": fails, "works": works}
    found = scheduled(tmp_path, functions, hangs=1)
    assert [r["part"] for r in found if "case" in r] == ["hangs", "fails", "works", "works"]
    status = {r["part"]: r["status"] for r in found if "status" in r}
    assert status == {"hangs": "time limit", "fails": "failed", "works": "done"}
    assert "why" in next(r["output"] for r in found if r.get("status") == "failed")
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(found) and "  works: b: WRONG" in printed


def test_parts_that_time_nothing_run_side_by_side_and_the_others_alone(tmp_path):
    def waits(name, other):
        def run():
            (tmp_path / name).touch()
            for _ in range(500):
                if (tmp_path / other).exists():
                    yield {"case": name, "ok": True}
                    return
                time.sleep(0.01)

        return run

    functions = {"right-a": waits("a", "b"), "right-b": waits("b", "a")}
    found = scheduled(tmp_path, functions, cores=4)
    assert {r["case"] for r in found if "case" in r} == {"a", "b"}
    names = [[p.name for p in round_] for round_ in rounds(PARTS, cores=16)]
    assert names[0] == [p.name for p in PARTS if p.group == "right"]
    assert all(len(round_) == 1 for round_ in names[1:])
    assert max(map(len, rounds(PARTS, cores=2))) == 1


@pytest.mark.parametrize("minutes", [0.05, 1.2, 9, 30])
def test_the_announced_times_are_within_the_minutes(minutes):
    for cores in (1, 16):
        limits = dict(plan(PARTS, 60 * minutes, cores))
        assert set(limits) == set(PARTS)
        assert sum(max(limits[p] for p in r) for r in rounds(PARTS, cores)) <= 60 * minutes
        assert all(limit <= part.seconds for part, limit in limits.items())


def test_the_report_says_what_is_wrong_and_that_a_rehearsal_is_one():
    results = [
        {"part": "p", "case": "one", "ok": True, "ratio": 1.23456},
        {"part": "p", "case": "two", "ok": False, "error": "a | b"},
        {"part": "p", "status": "done", "seconds": 2.5},
    ]
    text = report({"device": "cpu"}, results)
    assert "| p | done | 2.5 | 2 | 1 |" in text and "| two | WRONG |" in text
    assert "rehearsal" in text and "rehearsal" not in report({"device": "Some GPU"}, results)
    assert not passed(results) and passed([r for r in results if r.get("ok") is not False])
    assert not passed([{"part": "p", "status": "failed", "output": ""}])
    assert passed([{"part": "p", "status": "time limit"}])


def test_the_summary_says_what_was_not_checked():
    for how, said in (("done", "nothing is wrong"), ("no time", "right-a"), ("failed", "WRONG")):
        found = [{"part": "right-a", "status": how, "output": ""}]
        assert said in summary({"device": "cpu"}, found).splitlines()[0]


def test_a_rank_that_fails_ends_the_others():
    def rank():
        if os.environ["RANK"] == "1":
            raise SystemExit("why")
        time.sleep(60)

    start = time.monotonic()
    with pytest.raises(RuntimeError, match="why"):
        training.run_ranks(rank, 2)
    assert time.monotonic() - start < 30


def test_every_part_has_a_function():
    for part in PARTS:
        module, name = part.function.split(":")
        assert callable(getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name))


def test_the_block_is_compared_with_other_options(monkeypatch):
    """A block that drops nothing is not right where the plain loops drop."""
    given = (
        {"strata": "4-4", "capacity_factor": 1.0},
        torch.float32,
        "per-expert",
        torch.device("cpu"),
    )
    assert right.compare(*given)["ok"]
    monkeypatch.setattr(Capacity, "current_factor", 0.0)
    assert not right.compare(*given)["ok"]


@pytest.mark.parametrize(
    "ratios, line",
    [
        ({16384: 1.15, 4096: 2.0}, "goal 1.15: met (worst ratio 1.150 of 1 cases)"),
        ({16384: 1.1, 65536: 1.16}, "goal 1.15: missed (worst ratio 1.160 of 2 cases)"),
        ({64: 1.0}, "goal 1.15: not measured"),
    ],
)
def test_the_verdict_is_of_large_batches(ratios, line):
    results = [
        {"part": "fast-block", "case": f"{n}", "ok": None, "tokens": n, "ratio": ratio}
        for n, ratio in ratios.items()
    ]
    assert goal(results) == line and line in report({"device": "cpu"}, results).splitlines()


def test_a_training_without_a_group_is_one_process(tmp_path, monkeypatch):
    """On several GPUs fairseq would start one for each."""
    monkeypatch.setattr(training.fairseq_cli.train, "cli_main", lambda: print(sys.argv))
    text = training.Runs(Context("cpu", str(tmp_path))).train("run")
    assert "'--distributed-world-size', '1'" in text


@pytest.mark.parametrize("part", [fast.block, right.compiled])
def test_without_a_grouped_product_nothing_is_wrong(part, tmp_path, monkeypatch):
    """As with torch 2.6: what needs it is left out."""
    monkeypatch.setattr(fast, "STRATA", (2,))
    monkeypatch.setattr(torch_features, "grouped_mm", None)
    monkeypatch.delattr(torch.nn.functional, "grouped_mm", raising=False)
    found = list(part(Context("cpu", str(tmp_path))))
    assert found and all(each["ok"] is None and "error" not in each for each in found)


@pytest.mark.parametrize(
    "one, tile, kind", [(True, 128, "Grouped"), (False, 128, "Our"), (False, None, "")]
)
def test_the_floor_is_one_kernel(one, tile, kind, monkeypatch):
    """torch's product is a loop over experts where it is none, and no floor."""
    used = []
    monkeypatch.setattr(fast, "torch_has_one", lambda *_: one)
    monkeypatch.setattr(fast, "tile_of", lambda *_: tile)
    for name in ("Grouped", "Our"):
        step = partial(used.append, name)
        monkeypatch.setattr(getattr(fast, f"{name}Products"), "step", lambda _, step=step: step())
    found = fast.measure(fast.Case("4-4", 64, 16), torch.device("cpu"), True)
    assert set(used) == {kind} - {""} and ("ratio" in found) == bool(kind)


def test_fused_is_what_fused_kernels_compute(tmp_path, monkeypatch):
    """Where they do not run, as on this CPU, the general forward would be compared and timed as fused."""
    monkeypatch.setattr(fast, "executions", lambda _: ["per-expert", "fused"])
    monkeypatch.setattr(right, "executions", fast.executions)
    monkeypatch.setattr(right.plain_loops, "SYSTEMS", [{"strata": "4-4"}])
    context = Context("cpu", str(tmp_path))
    *found, left_out = right.block(context)
    assert [each["case"].split(", ")[-1] for each in found] == ["per-expert"] * 2
    assert left_out["case"].startswith("2 cases") and left_out["ok"] is None
    assert "fused" not in next(fast.block(context))["ms"]
    runs = training.Runs(context)
    assert update.timed(runs, "4-4, bf16, fused", [], context)["ran"] == "the general forward"


def test_a_case_that_does_not_fit_the_memory_is_not_wrong(tmp_path, monkeypatch):
    def fails(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    context = Context("cpu", str(tmp_path))
    for module, name, part in [(fast, "measure", fast.block), (update, "timed", update.update)]:
        monkeypatch.setattr(module, name, fails)
        found = list(part(context))
        assert found and all((r["ok"], r["error"]) == (None, "does not fit") for r in found)


def test_peak_memory_is_that_of_a_step(monkeypatch):
    """Not of what else is there, such as other contenders' weights and gradients."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 2**22)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 2**23)
    assert fast.peak(lambda: None, torch.device("cuda")) == 4.0


@pytest.mark.soak
def test_a_rehearsal_on_the_cpu(tmp_path):
    """Of about a minute, in which at least the block's cases are done and nothing is wrong."""
    assert main(["--device", "cpu", "--minutes", "1.2", "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["machine"]["device"] == "cpu"
    assert sum(r.get("ok") is True for r in content["results"]) >= 16
    assert "rehearsal" in (tmp_path / "report.md").read_text()


def rows_of_the_table() -> list[dict]:
    lines = resources.TABLE.read_text().splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[1:]]


def number(cell: str) -> float:
    return float(re.match(r"[\d.]+", cell)[0])


def test_kernels_fit_every_generation():
    """As the table says; a test of the kernels compiles one of its rows."""
    found = rows_of_the_table()
    for row in found:
        capability = round(10 * number(row["capability"]))
        assert number(row["shared memory, KiB"]) <= resources.SHARED[capability], row
        assert number(row["registers"]) <= 255, row
        if "64-64" not in row["block"]:  # up to 32 experts
            assert number(row["spills, bytes"]) <= 64, row
    assert {round(10 * number(row["capability"])) for row in found} == set(resources.SHARED)
