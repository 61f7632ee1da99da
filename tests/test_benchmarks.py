"""`make bench` on its smallest case: what is measured is in the report."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import torch

from benchmarks import block, decoding, report, timing


def test_the_report_has_what_the_block_measured(tmp_path, monkeypatch):
    out = tmp_path / "block.json"
    flags = ["--cases", "^base/4-4/8/", "--seconds", "0", "--threads", "1", "--peers"]
    monkeypatch.setattr("sys.argv", ["block", *flags, "--out", str(out)])
    monkeypatch.setattr(block, "keep_freed_memory", lambda: False)  # of the whole process
    block.main()
    cases = {each["case"]: each for each in json.loads(out.read_text())["cases"]}
    assert set(cases) == {"base/4-4/8/train", "base/4-4/8/infer"}
    trained = cases["base/4-4/8/train"]
    assert set(trained["seconds"]) == {"floor", "ours"} and trained["memory"]["ours"]["saved"] > 0
    other = json.loads(out.read_text())
    for cpu in ("another", other["cpu"]):  # a file of another machine came with the clone
        (tmp_path / "block-2-threads.json").write_text(json.dumps(other | {"cpu": cpu}))
        report.main(tmp_path)
        text = (tmp_path / "report.md").read_text()
        assert all(f"| {case} |" in text for case in cases) and "not measured" in text
        assert ("Two threads" in text) == (cpu != "another")


def test_no_constraint_of_make_bench_forbids_what_it_installs():
    makefile = (timing.ROOT / "Makefile").read_text()
    constraints = re.search(r"^\t@(.*constraints\.txt) > .*BENCH_VENV", makefile, re.MULTILINE)[1]
    command = ["bash", "-c", f"{constraints}; cat benchmarks/requirements.txt"]
    lines = subprocess.run(command, cwd=timing.ROOT, capture_output=True, text=True).stdout
    pins = set(re.findall(r"^(\S+)==(\S+)", lines, re.MULTILINE))
    assert len(pins) > 50 and len(dict(pins)) == len(pins)


def test_rounds_are_as_many_as_fit_after_the_first_which_compiles(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def call():
        now[0] += 0.25 if now[0] else 60.0

    times = timing.in_turns({"one": call}, torch.device("cpu"), 10, lambda: now[0])
    assert times == {"one": [0.25] * 40}


def test_decoding_prints_a_row_for_each_system(capsys, monkeypatch):
    flags = "--arch smoe_transformer_tiny --systems dense smoe-4-4 --vocabulary 90 --sentences 2"
    flags += " --length 3 --seconds 0"
    monkeypatch.setattr("sys.argv", ["decoding", *flags.split()])
    monkeypatch.setattr(decoding, "keep_freed_memory", lambda: False)  # of the whole process
    # Where it is installed. It stops after that many steps, ours one step after that many tokens.
    given, translate = [], SimpleNamespace(translate_batch=lambda _, **words: given.append(words))
    fake = SimpleNamespace(Translator=lambda *_, **__: translate)
    monkeypatch.setitem(sys.modules, "ctranslate2", fake)
    monkeypatch.setattr(decoding, "is_installed", lambda _: True)
    monkeypatch.setattr(decoding, "write_ctranslate2", lambda *_, **__: None)
    decoding.main()
    assert {(w["min_decoding_length"], w["max_decoding_length"]) for w in given} == {(3, 4)}
    said = capsys.readouterr().out
    for name in ("dense float32", "dense int8", "fairseq float32", "smoe-4-4 int8"):
        assert f"| {name} | " in said
