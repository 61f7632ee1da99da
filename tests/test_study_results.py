"""The study in ``results/``: its reports are what the command makes of it, and the docs have them."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
from commands import step_here
from matplotlib import pyplot as plt

from smoe_fairseq.recipes.study import report as study_report
from smoe_fairseq.recipes.study import results as study_results
from smoe_fairseq.recipes.study.claims import MEASURES

ROOT = Path(__file__).parents[1]
REPORTS = sorted((ROOT / "results").rglob("report.md"))
MULTI30K = ROOT / "results/multi30k/report.md"
LIBREOFFICE = ROOT / "results/libreoffice/report.md"


def cells(line: str) -> list[str]:
    return [cell.strip(" `*") for cell in line.strip("| \n").split("|")]


def report_of(results: Path, monkeypatch) -> str:
    monkeypatch.setattr(study_report, "save", lambda figure, stem: plt.close(figure))
    given = {"CONFIG_DIR": str(ROOT / "configs"), "RESULTS_DIR": str(results.parent)}
    result = step_here("report", results.name, cwd=results, **given)
    assert result.returncode == 0, result.stderr
    return (results / "report.md").read_text()


@pytest.mark.parametrize("report", REPORTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_report_is_made_of_the_files_beside_it(report, tmp_path, monkeypatch):
    """But for its pictures, whose figures are made and not saved."""
    dataset = report.parent.name
    shutil.copytree(report.parent, tmp_path / dataset)
    (tmp_path / dataset / "report.md").unlink()
    again = report_of(tmp_path / dataset, monkeypatch)
    where = report.parent.parent.relative_to(ROOT)
    assert again == report.read_text(), f"RESULTS_DIR={where} scripts/report.sh {dataset}"


@pytest.mark.parametrize("report", [MULTI30K, LIBREOFFICE], ids=lambda path: path.parent.name)
def test_every_run_that_is_kept_is_in_the_report(report):
    runs = {file.parent.name for file in report.parent.glob(f"*/{study_results.FILE}")}
    made = report.read_text().split("## Runs")[1]
    assert runs == {line.split("|")[1].strip() for line in made.splitlines()[4:] if "|" in line}
    for run in runs:
        about = json.loads((report.parent / run / study_results.FILE).read_text())
        assert about["commit"] and about["machine"] and about["command"].startswith("SEED=")
        assert " /" not in about["command"]  # of any machine


def test_the_docs_have_the_reports_tables_of_claims():
    """Whole, so that no row of before is left beside them."""
    docs = (ROOT / "docs/study.md").read_text()
    shown = [(MULTI30K, "Claims written"), (LIBREOFFICE, "Claims written"), (LIBREOFFICE, "By res")]
    for report, title in shown:
        table = re.search(r"(?:^\|.*\n)+", report.read_text().split(f"## {title}")[1], re.MULTILINE)
        assert f"\n\n{table[0]}\n" in docs, f"docs/study.md is older than {report}"


def test_the_docs_have_the_verdicts_on_the_papers_claims_about_scores():
    def of(page: str) -> dict[str, list[str]]:
        lines = [cells(line) for line in page.splitlines() if re.match(r"\| \([a-d]\)", line)]
        return {claim.replace("`", ""): rest for claim, *rest in lines}

    reported = of(MULTI30K.read_text())
    shown = of((ROOT / "docs/study.md").read_text().split("\n## ")[0])
    assert shown == {
        claim: [seeds, found, loss, verdict]
        for claim, (seeds, found, _, loss, _, verdict) in reported.items()
    }


def test_the_docs_tables_of_the_runs_that_were_repeated(tmp_path, monkeypatch):
    """What they say by themselves, and of the claims if they take the place of the study's."""
    repeated, replaced = ROOT / "results/repeated", tmp_path / "multi30k"
    shutil.copytree(MULTI30K.parent, replaced)
    shutil.copytree(repeated / "multi30k", replaced, dirs_exist_ok=True)

    def of_runs(results: Path) -> dict[str, list[str]]:
        monkeypatch.setenv("RESULTS_DIR", str(results))
        measures = {"loss": ".3f", "chrF++": ".2f", "BLEU": ".2f"}
        return {
            run.name: [format(MEASURES[name](run), spec) for name, spec in measures.items()]
            for run in study_results.read("multi30k")
        }

    def of_claims(report: str) -> list[str]:
        found = {line[0]: line for line in map(cells, report.splitlines())}
        by_bleu = [line[2] for claim, line in found.items() if claim.startswith("(c)")]
        return [*found["M1"][4:7], *by_bleu]

    section = (ROOT / "docs/study.md").read_text().split("### The same seed again")[1]
    lines = [cells(line) for line in section.split("\n## ")[0].splitlines() if "|" in line]
    shown = {line[0].replace("`, seed ", ".seed-"): line[2:] for line in lines if "seed" in line[0]}
    before, again = of_runs(ROOT / "results"), of_runs(repeated)
    assert shown == {
        run if "." in run else f"{run}.seed-1": before[run] + found for run, found in again.items()
    }
    claims = [line[2:] for line in lines if re.match(r"M1|\(c\)", line[0])]
    reports = MULTI30K.read_text(), report_of(replaced, monkeypatch)
    both = zip(*map(of_claims, reports), strict=True)
    assert claims == [list(pair) for pair in both]


@pytest.mark.parametrize("page", ["docs/study.md", "README.md"])
def test_the_intervals_in_the_docs_prose_are_in_the_tables(page):
    docs = (ROOT / page).read_text()
    prose = "\n".join(line for line in docs.splitlines() if not line.startswith("|"))
    found = re.findall(r"\[[-+\d.]+%?, [-+\d.]+%?\]", prose)
    reports = MULTI30K.read_text() + LIBREOFFICE.read_text()
    assert found and all(interval in reports for interval in found), found


def test_the_docs_table_of_learning_rates_is_that_of_the_curves():
    """What is not in the curves is an empty cell."""
    with open(ROOT / "results/learning_rate/multi30k.csv", encoding="utf-8", newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["update"] == "1882"]
    found = {(row["rate"], row["method"]): row["validation_nll"] for row in rows}
    section = (ROOT / "docs/study.md").read_text().split("## The learning rate")[1]
    header, _, *lines = (line for line in section.splitlines() if line.startswith("|"))
    methods = [cell.strip(" `") for cell in header.split("|")[2:-1]]
    shown = {}
    for line in lines[:3]:
        rate, *cells = (cell.strip(" *") for cell in line.split("|")[1:-1])
        shown |= {(rate, m): cell for m, cell in zip(methods, cells, strict=True) if cell}
    assert shown == found
