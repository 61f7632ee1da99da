"""What `make matrix` found: pytest's report, docs/compatibility.json, the table in docs/compatibility.md."""

import json
import re
import xml.etree.ElementTree
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
RESULTS = DOCS / "compatibility.json"
PAGE = DOCS / "compatibility.md"
START, END = "<!-- from here to the end mark: tests/matrix.py -->", "<!-- end -->"


def read_report(xml_text: str) -> dict:
    """Numbers of tests in pytest's report, and the names of those that failed."""
    cases = list(xml.etree.ElementTree.fromstring(xml_text).iter("testcase"))
    bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = sum(c.find("skipped") is not None for c in cases)
    failures = sorted({f"{c.get('classname')}::{c.get('name')}" for c in bad})
    return {
        "passed": len(cases) - len(bad) - skipped,
        "failed": len(failures),
        "skipped": skipped,
        "failures": failures,
    }


def read_results() -> dict[str, dict]:
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def write(results: dict[str, dict]) -> None:
    """Results to the file, and the table of them to the page."""
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    write_page(results)


def write_page(results: dict[str, dict]) -> None:
    """Puts the table between its marks; the rest of the page is written by hand."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{START}\n\n{table(results)}\n{END}{after}", encoding="utf-8")


def table(results: dict[str, dict]) -> str:
    """Markdown of all results, the environments in order of torch and Python, then what failed."""
    lines = [
        "| Python | torch | numpy | others | passed | failed | skipped | size | date | commit |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    failures = []
    for name, row in sorted(results.items(), key=lambda item: _order(item[1])):
        others = "lowest" if row["oldest"] else "as tested"
        cells = [row[key] for key in ("python", "torch", "numpy")]
        cells += [others, *(row[key] for key in ("passed", "failed", "skipped"))]
        cells += [f"{row['size_gb']:.1f} GB", row["date"], row["commit"]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
        failures += [f"- {name}: `{failure}`" for failure in row["failures"]]
    if failures:
        lines += ["", "Failed:", "", *failures]
    return "\n".join(lines) + "\n"


def _order(row: dict) -> list[list[int]]:
    return [[int(n) for n in re.findall(r"\d+", row[key])][:3] for key in ("torch", "python")]


def counts(result: dict) -> str:
    return f"{result['passed']} passed, {result['failed']} failed, {result['skipped']} skipped"
