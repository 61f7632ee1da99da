"""The study in ``results/``: the numbers of its reports are those that the command makes of it."""

import json
import re
import shutil
from pathlib import Path

import pytest
from commands import step_here, succeeded

from smoe_fairseq.recipes.compare import report as study_report
from smoe_fairseq.recipes.datasets import load_dataset
from smoe_fairseq.recipes.study import results as study_results

ROOT = Path(__file__).parents[1]
REPORTS = sorted((ROOT / "results").rglob("report.md"))
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
MULTI30K = ROOT / "results/multi30k/report.md"
LIBREOFFICE = ROOT / "results/libreoffice/report.md"


def report_of(results: Path, monkeypatch) -> str:
    monkeypatch.setattr(study_report, "save", lambda figure, stem: None)
    given = {"CONFIG_DIR": str(ROOT / "configs"), "RESULTS_DIR": str(results.parent)}
    succeeded(step_here("report", results.name, cwd=results, **given))
    return (results / "report.md").read_text()


@pytest.mark.parametrize("report", REPORTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_report_is_made_of_the_files_beside_it(report, tmp_path, monkeypatch):
    """But for its pictures, whose figures are made and not saved."""
    dataset = report.parent.name
    for name in (dataset, *load_dataset(dataset).parts):
        shutil.copytree(report.parent.parent / name, tmp_path / name)
    (tmp_path / dataset / "report.md").unlink()
    again = report_of(tmp_path / dataset, monkeypatch)
    where = report.parent.parent.relative_to(ROOT)
    found, written = (NUMBER.findall(text) for text in (again, report.read_text()))
    assert found == written, f"RESULTS_DIR={where} scripts/report.sh {dataset}"


@pytest.mark.parametrize("report", [MULTI30K, LIBREOFFICE], ids=lambda path: path.parent.name)
def test_every_run_that_is_kept_is_in_the_report(report):
    runs = {file.parent.name for file in report.parent.glob(f"*/{study_results.FILE}")}
    made = report.read_text().split("## Runs")[1]
    assert runs == {line.split("|")[1].strip() for line in made.splitlines()[4:] if "|" in line}
    for run in runs:
        about = json.loads((report.parent / run / study_results.FILE).read_text())
        assert about["commit"] and about["machine"] and about["command"].startswith("SEED=")
        assert " /" not in about["command"]  # of any machine
