"""`make gpu-check`: its schedule and report, and a rehearsal of the whole on the CPU."""

import json
import time
from types import SimpleNamespace

import pytest

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.parts import PARTS, Part, announce, choose, plan, rounds, run_all
from benchmarks.gpu.report import goal, passed, report, summary


def part(name, seconds=20, least=0):
    return Part(name, "none:none", seconds, "about it", least)


def scheduled(tmp_path, functions, cores=2, **limits):
    """Results of parts that are generator functions, and what the file has of them."""
    parts = [part(name, limits.get(name, 20)) for name in functions]
    file = tmp_path / "results.jsonl"
    found = run_all(parts, 60, file, lambda which, limit: functions[which.name](), cores)
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


def test_without_time_nothing_is_started(tmp_path):
    def run(which, limit):
        raise AssertionError("started")

    found = run_all([part("late", least=5)], 1, tmp_path / "results.jsonl", run)
    assert found == [{"part": "late", "status": "no time"}]


@pytest.mark.parametrize("minutes", [0.05, 1.2, 9, 30])
def test_the_announced_times_are_within_the_minutes(minutes):
    for cores in (1, 16):
        limits = dict(plan(PARTS, 60 * minutes, cores))
        assert set(limits) == set(PARTS)
        assert sum(max(limits[p] for p in r) for r in rounds(PARTS, cores)) <= 60 * minutes
        assert all(limit <= part.seconds for part, limit in limits.items())


def test_it_announces_the_time_of_each_part():
    lines = announce([part("first", 40), part("second", 40), part("third", 40, 5)], 82)
    assert lines.splitlines() == [
        "  first: about it (at most 40 s)",
        "  second: about it (at most 40 s)",
        "  third: about it (in the time that the others leave)",
    ]


def test_the_report_says_what_is_wrong_and_that_a_rehearsal_is_one():
    results = [
        {"part": "p", "case": "one", "ok": True, "ratio": 1.23456},
        {"part": "p", "case": "two", "ok": False, "error": "a | b"},
        {"part": "p", "status": "done", "seconds": 2.5},
    ]
    text = report({"device": "cpu"}, results)
    assert "| p | done | 2.5 | 2 | 1 |" in text and "1 cases are right: one." in text
    assert "| two | WRONG | error a / b |" in text and "rehearsal" in text
    assert "rehearsal" not in report({"device": "Some GPU"}, results)
    assert not passed(results) and passed([r for r in results if r.get("ok") is not False])
    assert not passed([{"part": "p", "status": "failed", "output": ""}])
    assert passed([{"part": "p", "status": "time limit"}])


def test_tables_of_a_case_have_a_row_for_each_case():
    results = [
        {"part": "p", "case": "a", "ok": None, "ms": {"one": 1.0, "two": 2.0}},
        {"part": "p", "case": "b", "ok": None, "ms": {"two": 4.0}},
    ]
    text = report({"device": "cpu"}, results)
    assert "| ms | one | two |" in text and "| a | 1 | 2 |" in text and "| b |  | 4 |" in text


def test_the_summary_fits_on_a_screen_and_begins_with_what_is_wrong():
    results = [{"part": "p", "case": f"c{i}", "ok": True} for i in range(300)]
    results += [{"part": "q", "case": f"m{i}", "ok": None, "ms": 1.0} for i in range(100)]
    results += [{"part": "p", "case": "bad", "ok": False}]
    results += [{"part": "r", "status": "failed", "seconds": 1.0, "output": "first\nlast"}]
    lines = summary({"device": "cpu"}, results).splitlines()
    assert len(lines) == 60 and "WRONG" in lines[0] and "bad" in lines[1]
    assert "r: failed" in lines[2] and lines[4].strip() == "last"
    assert not any("c17" in line for line in lines)


def test_parts_are_chosen_by_name_and_by_group():
    assert choose([]) == PARTS
    assert {p.name.split("-")[0] for p in PARTS} == {"right", "fast", "whole"}
    assert [p.name for p in choose(["whole", "fast-block"])] == [
        *("fast-block", "whole-demo", "whole-study")
    ]
    with pytest.raises(ValueError, match="--parts slow: no such part"):
        choose(["slow"])


@pytest.mark.parametrize("one", PARTS, ids=lambda one: one.name)
def test_every_part_has_a_function(one):
    import importlib

    module, name = one.function.split(":")
    assert callable(getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name))


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--minutes", "0"], "--minutes 0: expected more than 0"),
        (["--device", "cpu", "--parts", "slow"], "--parts slow: no such part"),
    ],
)
def test_bad_flags_are_refused(flags, sentence, capsys):
    with pytest.raises(SystemExit) as end:
        main(flags)
    assert end.value.code == 2 and sentence in capsys.readouterr().err


def test_the_block_is_compared_with_other_options(monkeypatch):
    """A block that drops nothing is not right where the plain loops drop."""
    import torch

    from benchmarks.gpu import right

    name, device = "top-2 4-4 with capacity", torch.device("cpu")
    assert right.compare(name, torch.float32, "per-expert", device)["ok"]
    wrong = right.make(name)
    for gate in wrong.gates:
        gate.capacity.factor = 0.0
    monkeypatch.setattr(right, "make", lambda name: wrong)
    assert not right.compare(name, torch.float32, "per-expert", device)["ok"]


def test_the_study_stays_where_the_next_check_resumes_it(tmp_path, monkeypatch):
    from benchmarks.gpu import training
    from benchmarks.gpu.parts import Context

    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/study.sh").write_text('mkdir -p "$RUN_DIR"; echo "$@" >> "$RUN_DIR/log"')
    monkeypatch.setattr(training, "ROOT", tmp_path)
    monkeypatch.setattr(training, "STUDY", tmp_path / "study")
    (missing,) = training.study(Context("cuda", "gone", 60))
    assert missing["ok"] is None and "data/multi30k is not there" in missing["case"]
    (tmp_path / "data/multi30k").mkdir(parents=True)
    for _ in range(2):
        (done,) = training.study(Context("cuda", "gone", 60))
        assert done["ok"]
    lines = (tmp_path / "study/runs/log").read_text().splitlines()
    assert len(lines) == 2 and "--arch smoe_transformer_base" in lines[0]


def test_runs_of_another_world_size_are_refused(tmp_path, monkeypatch):
    from benchmarks.gpu import training
    from benchmarks.gpu.parts import Context

    monkeypatch.setattr(training, "make_data", lambda *args: tmp_path)
    runs = training.Runs(Context("cpu", str(tmp_path), 60))
    log = "| INFO | fairseq_cli.train | training on 1 devices (GPUs/TPUs)\n"
    monkeypatch.setattr(training, "run_ranks", lambda *args, **more: log)
    assert runs.train("name", ranks=1) == runs.train("name") == log
    with pytest.raises(RuntimeError, match=r"world sizes \[1\] in the log, started were 2"):
        runs.train("name", ranks=2)
    monkeypatch.setattr(training, "run_ranks", lambda *args, **more: "")
    with pytest.raises(RuntimeError, match="names no world size"):
        runs.train("name", ranks=2)


def test_installed_peers_are_measured_and_one_that_fails_is_not_our_failure(monkeypatch):
    from benchmarks.gpu import fast
    from benchmarks.gpu.parts import Context
    from benchmarks.peers import Peer

    class Breaks(Peer):
        def mix(self, x_1TD):
            raise TypeError("no kernel")

    monkeypatch.setattr(fast, "PEERS", {"csv": Breaks, "no_such": Breaks})
    found = {r["case"].split(",")[0]: r for r in fast.peers(Context("cpu", "", 60))}
    assert set(found) == {"no_such: not installed", "csv"}
    assert found["csv"]["error"] == "TypeError: no kernel"
    assert all(result["ok"] is None for result in found.values())


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


def test_a_case_that_failed_does_not_meet_the_goal():
    failed = {"part": "fast-block", "case": "a", "ok": False, "error": "out of memory"}
    fine = {"part": "fast-block", "case": "b", "ok": None, "tokens": 16384, "ratio": 1.0}
    assert goal([failed]) == "goal 1.15: missed (1 cases failed)"
    assert goal([fine, failed]).startswith("goal 1.15: missed")


@pytest.mark.parametrize(
    "device, tera",
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("Tesla T4", None),
        ("NVIDIA A10", None),
    ],
)
def test_share_of_the_peak(device, tera):
    from benchmarks.gpu.update import share_of_peak

    share = share_of_peak(1e6, 1e8, device)
    assert share == (pytest.approx(3e14 / (tera * 1e12)) if tera else "-")


def test_what_may_touch_cuda_runs_in_a_process_of_its_own(tmp_path, monkeypatch):
    """A process that has touched CUDA cannot fork one that uses it."""
    import os

    from benchmarks.gpu import update
    from benchmarks.gpu.parts import Context

    asked = []
    times = {"device": "NVIDIA H200", "tokens/s": 1.0}
    log = f"{update.MARK}{json.dumps(times)}\n"
    runs = SimpleNamespace(train=lambda *words, **options: log)
    monkeypatch.setattr(update, "flops_per_token", lambda model: os.getpid())
    monkeypatch.setattr(update, "share_of_peak", lambda rate, flops, device: asked.append(flops))
    found = update.timed(runs, "4-4, bf16", [], Context("cuda", str(tmp_path), 60))
    assert found["ok"] is None and len(asked) == 1 and asked[0] != os.getpid()


def test_flops_of_a_model_leave_the_embedding_out():
    """The dense base model: 6 layers with D 512 and F 2,048 on both sides."""
    from benchmarks.gpu.update import MODELS, VOCABULARY, flops_per_token
    from benchmarks.program import LONGEST

    base = ["--arch", "smoe_transformer_base"]
    weights = (6 + 12) * 4 * 512**2 + 12 * 2 * 512 * 2048 + VOCABULARY * 512
    dense = 2 * weights + 18 * 2 * LONGEST * 512
    assert flops_per_token(base + MODELS["dense"]) == dense < flops_per_token(base + MODELS["4-4"])


@pytest.mark.soak
def test_a_rehearsal_on_the_cpu(tmp_path):
    """Of about a minute, in which at least the block's cases are done and nothing is wrong."""
    assert main(["--device", "cpu", "--minutes", "1.2", "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["machine"]["device"] == "cpu"
    assert sum(r.get("ok") is True for r in content["results"]) >= 16
    assert "rehearsal" in (tmp_path / "report.md").read_text()
