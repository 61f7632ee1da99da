"""Runs the tests with other versions of torch and Python, one environment after the other: `make matrix`.

    python3 tests/matrix.py [--python FILE] [--jobs N] [NAME ...]

Each environment is made in .venv-matrix, several GB for a torch with CUDA, and deleted. The tests run in a
clone of the last commit, since recipes would take the other torch in .venv of this checkout. Results
go to docs/compatibility.json, and from there into the table of docs/compatibility.md; an environment whose
result still holds is not run again unless named. Needs Python's own library only.
"""

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv-matrix"
RESULTS, PAGE = ROOT / "docs/compatibility.json", ROOT / "docs/compatibility.md"
START, END = "<!-- from here to the end mark: tests/matrix.py -->", "<!-- end -->"
# What no result depends on: documentation, and how the results are made.
ASIDE = (":!docs", ":!*.md", ":!tests/matrix.py", ":!tests/test_matrix.py")
GB = 1e9
NEEDED = 14 * GB  # an environment of torch 2.15 with CUDA, the archive, and the tests' own files
# Python, torch, and whether our other requirements are in the lowest versions of setup.py. The oldest and the
# newest of all first: what fails mostly fails there.
ENVIRONMENTS = (
    *(("3.11", "2.6.0", True), ("3.13", "2.15.0", False), ("3.12", "2.9.1", False)),
    *(("3.11", "2.11.0", False), ("3.11", "2.15.0", False)),
)


def main() -> int:
    """Runs what is asked for; 1 where a test failed or an environment could not be made."""
    known = {
        f"python{python}-torch{torch}": (python, torch, o) for python, torch, o in ENVIRONMENTS
    }
    parser = argparse.ArgumentParser(description="Runs the tests with other torch and Python.")
    parser.add_argument("names", nargs="*", choices=[*known, []], default=[], metavar="NAME")
    parser.add_argument("--python", action="append", default=[], help="one beside those in PATH")
    parser.add_argument("--jobs", type=int, default=2, help="test processes")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    names = args.names or [n for n in known if n not in results or changed(results[n]["commit"])]
    if names and changed("HEAD"):
        sys.exit("error: files differ from the last commit, which a result names: commit first")
    failed = False
    for name in names:
        python, torch, oldest = known[name]
        path = find_python(python, args.python)
        if path is None:
            print(
                f"{name} is left out: name a python{python} that makes environments with --python FILE"
            )
            continue
        try:
            results[name] = run_one(FOLDER / name, path, torch, oldest, args.jobs)
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed = True
            continue
        failed |= results[name]["failed"] > 0
        write(results)
        print(f"{name}: {results[name]}")
    return int(failed)


def changed(commit: str) -> bool:
    """Whether the files have changed since a commit, documentation aside; an unknown commit counts too."""
    command = ["git", "diff", "--quiet", commit, "--", ".", *ASIDE]
    return subprocess.run(command, cwd=ROOT, stderr=subprocess.DEVNULL).returncode != 0


def find_python(version: str, more: list[str]) -> str | None:
    """A Python of this version that makes environments: one of ``more``, or ``pythonVERSION`` in PATH."""
    program = "import ensurepip, venv, sys; print('{}.{}'.format(*sys.version_info))"
    for file in [*more, f"python{version}"]:
        if path := shutil.which(file):
            found = subprocess.run([path, "-c", program], capture_output=True, text=True)
            if found.stdout.strip() == version:
                return path
    return None


def run_one(folder: Path, python: str, torch: str, oldest: bool, jobs: int) -> dict:
    """Makes an environment, runs the tests in it, deletes it; returns what came out."""
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    free = shutil.disk_usage(ROOT).free
    if free < NEEDED:
        raise OSError(f"{free / GB:.0f} GB of the disk are free, {NEEDED / GB:.0f} are needed")
    try:
        commit = execute("git", "rev-parse", "--short", "HEAD").strip()
        execute("git", "clone", "-q", ROOT, folder / "source")
        install(folder, python, torch, oldest)
        return test(folder, jobs) | {"oldest": oldest, "commit": commit}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def install(folder: Path, python: str, torch: str, oldest: bool) -> None:
    """torch first, then the rest around it: no version that constraints.txt names takes torch's place."""
    source = folder / "source"
    execute(python, "-m", "venv", folder / "env")
    pip = folder / "env/bin/python", "-m", "pip", "--disable-pip-version-check"
    get = *pip, "install", "-q", "--no-cache-dir", "--progress-bar", "off"
    execute(*get, f"torch=={torch}", "setuptools>=70")
    there = execute(*pip, "freeze", "--all", "--exclude", "pip")
    tested = (source / "constraints.txt").read_text(encoding="utf-8")
    lowest = lowest_versions((source / "setup.py").read_text(encoding="utf-8"))
    constraints = folder / "constraints.txt"
    constraints.write_text(around(there, lowest if oldest else "", tested))
    execute(*get, "-c", constraints, "-e", f"{source}[dev,analysis,export,serve]")
    execute(*get, "--no-deps", "fairseq==0.12.2")


def lowest_versions(setup: str) -> str:
    """Of what setup.py requires to run, as constraints; what it takes for development is not meant."""
    needed = re.search(r"install_requires=\[(.*?)\]", setup, re.DOTALL)[1]
    for extra in ("analysis", "export", "serve"):
        needed += re.search(rf'"{extra}": \[(.*?)\]', setup)[1]
    return "".join(f"{n}=={v}\n" for n, v in re.findall(r'"([\w-]+)>=([\d.]+)', needed))


def around(*constraints: str) -> str:
    """Constraints together; where several name a package, the first counts."""
    lines = {}
    for line in "\n".join(constraints).splitlines():
        if match := re.match(r"[\w.-]+", line):
            lines.setdefault(re.sub(r"[-_.]+", "-", match[0]).lower(), line)
    return "".join(f"{line}\n" for line in lines.values())


def test(folder: Path, jobs: int) -> dict:
    """Runs the tests in an environment."""
    python, report = folder / "env/bin/python", folder / "report.xml"
    words = ("-q", "-n", jobs, "--dist", "loadfile", "-p", "no:cacheprovider", "--junitxml", report)
    execute(python, "-m", "pytest", *words, check=False, folder=folder / "source")
    names = "platform.python_version(), torch.__version__, numpy.__version__"
    program = f"import platform, torch, numpy; print({names})"
    versions = execute(python, "-c", program).split()
    size = int(execute("du", "-sk", folder / "env").split()[0]) * 1024
    return {
        **dict(zip(("python", "torch", "numpy"), versions)),
        **read_report(report.read_text(encoding="utf-8")),
        "size_gb": round(size / GB, 1),
        "date": datetime.date.today().isoformat(),
    }


def execute(*command, check: bool = True, folder: Path = ROOT) -> str:
    """Runs a command in a folder, the checkout; returns its output."""
    command = [str(word) for word in command]
    environment = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "PYTHONHOME")}
    environment["OMP_NUM_THREADS"] = "1"
    if "/" in command[0]:  # commands of this Python come before others of their name
        environment["PATH"] = f"{Path(command[0]).parent}{os.pathsep}{environment['PATH']}"
    options = {"cwd": folder, "env": environment, "stdout": subprocess.PIPE, "text": True}
    return subprocess.run(command, check=check, **options).stdout


def read_report(xml_text: str) -> dict:
    """Numbers of tests in pytest's report, and the names of those that failed."""
    cases = list(xml.etree.ElementTree.fromstring(xml_text).iter("testcase"))
    bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = sum(c.find("skipped") is not None for c in cases)
    failures = sorted({f"{c.get('classname')}::{c.get('name')}" for c in bad})
    counts = {"passed": len(cases) - len(bad) - skipped, "failed": len(failures)}
    return counts | {"skipped": skipped, "failures": failures}


def write(results: dict[str, dict]) -> None:
    """Results to the file, and the table of them between its marks on the page."""
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{START}\n\n{table(results)}\n{END}{after}", encoding="utf-8")


def table(results: dict[str, dict]) -> str:
    """Markdown of all results, the environments in order of torch and Python, then what failed."""
    lines = [
        "| Python | torch | numpy | others | passed | failed | skipped | size | date | commit |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    failures = []
    for name, row in sorted(results.items(), key=lambda item: _order(item[1])):
        cells = [row[key] for key in ("python", "torch", "numpy")]
        cells += ["lowest" if row["oldest"] else "as tested"]
        cells += [row[key] for key in ("passed", "failed", "skipped")]
        cells += [f"{row['size_gb']:.1f} GB", row["date"], row["commit"]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
        failures += [f"- {name}: `{failure}`" for failure in row["failures"]]
    if failures:
        lines += ["", "Failed:", "", *failures]
    return "\n".join(lines) + "\n"


def _order(row: dict) -> list[list[int]]:
    return [[int(n) for n in re.findall(r"\d+", row[key])][:3] for key in ("torch", "python")]


if __name__ == "__main__":
    sys.exit(main())
