"""`make matrix` without the network: which versions it asks for, and what it writes."""

import json

import matrix

REPORT = """<testsuites><testsuite name="pytest">
<testcase classname="tests.test_a" name="test_one"/>
<testcase classname="tests.test_a" name="test_two"><failure message="no">x</failure></testcase>
<testcase classname="tests.test_a" name="test_two"><error message="no">y</error></testcase>
<testcase classname="tests.test_a" name="test_three"><skipped message="GPU"/></testcase>
</testsuite></testsuites>"""


def test_oldest_and_newest_torch_and_newest_python_are_in_it():
    setup = (matrix.ROOT / "setup.py").read_text(encoding="utf-8")
    versions = [(tuple(map(int, t.split(".")[:2])), oldest) for _, t, oldest in matrix.ENVIRONMENTS]
    lowest, newest = min(versions)[0], max(versions)[0]
    assert f'"torch>={lowest[0]}.{lowest[1]},<{newest[0]}.{newest[1] + 1}"' in setup
    assert all(oldest for torch, oldest in versions if torch == lowest)
    assert {python for python, _, _ in matrix.ENVIRONMENTS} == {"3.11", "3.12", "3.13"}


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


def test_the_page_has_one_table_however_often_it_is_written(tmp_path, monkeypatch):
    page = tmp_path / "compatibility.md"
    page.write_text(f"Before.\n\n{matrix.START}\n{matrix.END}\n\nAfter.\n")
    monkeypatch.setattr(matrix, "PAGE", page)
    monkeypatch.setattr(matrix, "RESULTS", tmp_path / "compatibility.json")
    found = matrix.read_report(REPORT)
    row = {"python": "3.11.7", "torch": "2.6.0+cu124", "numpy": "2.0.0", "oldest": True, **found}
    row |= {"size_gb": 6.04, "date": "2030-01-02", "commit": "abc1234"}
    newer = {**row, "torch": "2.15.0", "oldest": False, "failures": []}
    for _ in range(2):
        matrix.write({"python3.11-torch2.15.0": newer, "python3.11-torch2.6.0": row})
    text = page.read_text()
    assert text.startswith("Before.\n") and text.endswith("After.\n")
    assert [line for line in text.splitlines() if line.startswith("| 3")] == [
        "| 3.11.7 | 2.6.0+cu124 | 2.0.0 | lowest | 1 | 1 | 1 | 6.0 GB | 2030-01-02 | abc1234 |",
        "| 3.11.7 | 2.15.0 | 2.0.0 | as tested | 1 | 1 | 1 | 6.0 GB | 2030-01-02 | abc1234 |",
    ]
    assert text.count("- python3.11-torch2.6.0: `tests.test_a::test_two`") == 1


def test_the_page_in_the_repository_is_what_its_results_say():
    made = matrix.table(json.loads(matrix.RESULTS.read_text(encoding="utf-8")))
    assert f"{matrix.START}\n\n{made}\n{matrix.END}" in matrix.PAGE.read_text(encoding="utf-8")
