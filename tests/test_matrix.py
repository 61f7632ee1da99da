"""`make matrix` without the network: what it chooses, which versions it asks for, what it writes."""

import sys

import matrix
import matrix_table
import pytest
from matrix import ENVIRONMENTS, Environment, MatrixError, choose

ROW = {
    "python": "3.11.7",
    "torch": "2.6.0+cu124",
    "numpy": "2.0.0",
    "oldest": True,
    "passed": 10,
    "failed": 0,
    "skipped": 2,
    "failures": [],
    "size_gb": 6.04,
    "date": "2030-01-02",
    "commit": "abc1234",
}
REPORT = """<testsuites><testsuite name="pytest">
<testcase classname="tests.test_a" name="test_one"/>
<testcase classname="tests.test_a" name="test_two"><failure message="no">x</failure></testcase>
<testcase classname="tests.test_a" name="test_two"><error message="no">y</error></testcase>
<testcase classname="tests.test_a" name="test_three"><skipped message="GPU"/></testcase>
</testsuite></testsuites>"""


def test_oldest_and_newest_torch_and_newest_python_are_in_it():
    setup = (matrix.ROOT / "setup.py").read_text(encoding="utf-8")
    pairs = [(tuple(map(int, e.torch.split(".")[:2])), e) for e in ENVIRONMENTS]
    lowest, newest = min(pairs, key=lambda p: p[0])[0], max(pairs, key=lambda p: p[0])[0]
    assert f'"torch>={lowest[0]}.{lowest[1]},<{newest[0]}.{newest[1] + 1}"' in setup
    assert all(e.oldest for torch, e in pairs if torch == lowest)
    assert {e.python for e in ENVIRONMENTS} == {"3.11", "3.12", "3.13"}


def test_what_has_a_result_is_not_run_again_unless_named():
    first, second, *rest = ENVIRONMENTS
    results = {first.name: {"commit": "kept"}, second.name: {"commit": "outdated"}}
    assert choose([], results, lambda result: result["commit"] == "kept") == [second, *rest]
    assert choose([first.name], results, lambda result: True) == [first]
    with pytest.raises(MatrixError, match=f"python2.7 is none of {first.name}, "):
        choose(["python2.7"], {}, lambda result: True)


def test_missing_python_is_left_out_with_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr(matrix, "ENVIRONMENTS", (Environment("2.1", "2.6.0"),))
    monkeypatch.setattr(matrix, "changed", lambda commit: False)
    assert matrix.main([]) == 0
    assert "python2.1-torch2.6.0 is left out: there is no python2.1" in capsys.readouterr().out


def test_python_is_found_by_its_version_not_by_its_name():
    version = "{}.{}".format(*sys.version_info)
    assert matrix.find_python(version, [sys.executable]) == sys.executable
    assert matrix.find_python("2.1", [sys.executable]) is None


def test_full_disk_is_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr(matrix, "NEEDED", 1e30)
    monkeypatch.setattr(matrix, "changed", lambda commit: False)
    monkeypatch.setattr(matrix, "find_python", lambda version, more: "python")
    name = ENVIRONMENTS[0].name
    assert matrix.main([name]) == 1
    assert f"{name}: " in (said := capsys.readouterr()).err and "are needed" in said.err
    assert "GB of the disk are free" in said.out


def test_uncommitted_files_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(matrix, "changed", lambda commit: True)
    assert matrix.main([]) == 1
    assert "error: files differ from the last commit" in capsys.readouterr().err


def test_lowest_versions_and_what_torch_brings_come_before_the_tested_ones():
    setup = (matrix.ROOT / "setup.py").read_text(encoding="utf-8")
    lowest = matrix.lowest_versions(setup)
    assert "numpy==2\n" in lowest and "matplotlib==3.9\n" in lowest and "pytest" not in lowest
    assert "starlette==0.40\n" in lowest and "uvicorn==0.30\n" in lowest
    tested = "# tested\nnumpy==2.4.6\nsympy==1.14.0\nMarkupSafe==3.0.4\ntyping_extensions==4.16.0\n"
    there = "sympy==1.13.1\nmarkupsafe==3.0.2\ntyping-extensions==4.15.0\ntorch==2.6.0\n"
    assert matrix.around(there, lowest, tested).startswith(there)
    assert matrix.around(there, "numpy==2\n", tested) == f"{there}numpy==2\n"
    assert matrix.around(there, "", tested) == f"{there}numpy==2.4.6\n"


def test_report_of_the_tests_is_counted():
    assert matrix_table.read_report(REPORT) == {
        "passed": 1,
        "failed": 1,
        "skipped": 1,
        "failures": ["tests.test_a::test_two"],
    }


def test_page_has_one_table_however_often_it_is_written(tmp_path, monkeypatch):
    page = tmp_path / "compatibility.md"
    page.write_text(f"Before.\n\n{matrix_table.START}\n{matrix_table.END}\n\nAfter.\n")
    monkeypatch.setattr(matrix_table, "PAGE", page)
    newer = {**ROW, "torch": "2.15.0", "oldest": False, "failed": 1, "failures": ["tests.a::b"]}
    for _ in range(2):
        matrix_table.write_page({"python3.11-torch2.15.0": newer, "python3.11-torch2.6.0": ROW})
    text = page.read_text()
    assert text.startswith("Before.\n") and text.endswith("After.\n")
    rows = [line for line in text.splitlines() if line.startswith("| 3")]
    assert rows == [
        "| 3.11.7 | 2.6.0+cu124 | 2.0.0 | lowest | 10 | 0 | 2 | 6.0 GB | 2030-01-02 | abc1234 |",
        "| 3.11.7 | 2.15.0 | 2.0.0 | as tested | 10 | 1 | 2 | 6.0 GB | 2030-01-02 | abc1234 |",
    ]
    assert text.count("- python3.11-torch2.15.0: `tests.a::b`") == 1


def test_page_in_the_repository_is_what_its_results_say():
    text = matrix_table.PAGE.read_text(encoding="utf-8")
    assert (
        f"{matrix_table.START}\n\n{matrix_table.table(matrix_table.read_results())}\n{matrix_table.END}"
        in text
    )
