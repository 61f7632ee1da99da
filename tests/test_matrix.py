"""`make matrix` without the network: which versions it asks for, and its page."""

import json

import matrix


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


def test_the_page_in_the_repository_is_what_its_results_say():
    made = matrix.table(json.loads(matrix.RESULTS.read_text(encoding="utf-8")))
    assert f"{matrix.START}\n\n{made}\n{matrix.END}" in matrix.PAGE.read_text(encoding="utf-8")
