"""Runs the tests with other versions of torch and Python, one environment after the other: `make matrix`.

    python3 tests/matrix.py [--python FILE] [--jobs N] [NAME ...]

Each environment is made in .venv-matrix, several GB for a torch with CUDA, and deleted. The tests run in a
clone of the last commit beside it, since recipes would take the other torch in .venv of this checkout. What
came out goes to docs/compatibility.json as soon as one is finished, and from there into the table of
docs/compatibility.md.
Environments whose result still holds, since nothing but documentation has changed after its commit, are not
run again unless named. Needs Python's own library only.
"""

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import matrix_table
from matrix_table import counts, read_report, read_results

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv-matrix"
# What no result depends on: documentation, and how the results are made.
ASIDE = (":!docs", ":!*.md", ":!tests/matrix*.py", ":!tests/test_matrix.py")
GB = 1e9
# An environment of torch 2.15 with CUDA, and beside it the archive that pip unpacks and the tests' own files.
NEEDED = 14 * GB


class MatrixError(Exception):
    """A sentence for the user."""


@dataclass(frozen=True)
class Environment:
    """Versions that are installed together.

    oldest: our other requirements in the lowest versions of setup.py, not in those of constraints.txt.
    """

    python: str
    torch: str
    oldest: bool = False

    @property
    def name(self) -> str:
        return f"python{self.python}-torch{self.torch}"


# The oldest and the newest of all first: what fails mostly fails there.
ENVIRONMENTS = (
    Environment("3.11", "2.6.0", oldest=True),
    Environment("3.13", "2.15.0"),
    Environment("3.12", "2.9.1"),
    Environment("3.11", "2.11.0"),
    Environment("3.11", "2.15.0"),
)


def main(words: list[str] | None = None) -> int:
    """Runs what is asked for; 1 where a test failed, an environment could not be made, or a word is wrong."""
    parser = argparse.ArgumentParser(description="Runs the tests with other torch and Python.")
    parser.add_argument("names", metavar="NAME", nargs="*", help="such as python3.11-torch2.6.0")
    parser.add_argument(
        "--python", action="append", default=[], help="a Python beside those in PATH"
    )
    parser.add_argument("--jobs", type=int, default=2, help="test processes")
    args = parser.parse_args(words)
    try:
        return run(args.names, args.python, args.jobs)
    except MatrixError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def run(names: list[str], pythons: list[str], jobs: int) -> int:
    results = read_results()
    chosen = choose(names, results, holds)
    for environment in set(ENVIRONMENTS) - set(chosen):
        if not names:
            print(f"{environment.name}: its result still holds")
    if chosen and changed("HEAD"):
        raise MatrixError("files differ from the last commit, which a result names: commit first")
    failed = False
    for environment in chosen:
        python = find_python(environment.python, pythons)
        if python is None:
            print(
                f"{environment.name} is left out: there is no python{environment.python} here that makes "
                f"environments; name one with --python FILE (make matrix PYTHONS=FILE)"
            )
            continue
        try:
            result = run_one(environment, python, jobs)
        except MatrixError as error:
            print(f"{environment.name}: {error}", file=sys.stderr)
            failed = True
            continue
        failed |= result["failed"] > 0
        results[environment.name] = result
        matrix_table.write(results)
        print(f"{environment.name}: {counts(result)}")
    return int(failed)


def choose(names, results, still_holds) -> list[Environment]:
    """Those named; without names all but those that have a result of which ``still_holds`` is true."""
    known = {environment.name: environment for environment in ENVIRONMENTS}
    for name in names:
        if name not in known:
            raise MatrixError(f"{name} is none of {', '.join(known)}")
    if names:
        return [known[name] for name in names]
    return [e for e in ENVIRONMENTS if e.name not in results or not still_holds(results[e.name])]


def holds(result: dict) -> bool:
    return not changed(result["commit"])


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


def run_one(environment: Environment, python: str, jobs: int) -> dict:
    """Makes an environment, runs the tests in it, deletes it; returns what came out."""
    folder = FOLDER / environment.name  # which holds env and source
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    free = shutil.disk_usage(ROOT).free
    print(f"{environment.name}: {free / GB:.0f} GB of the disk are free", flush=True)
    if free < NEEDED:
        raise MatrixError(f"{free / GB:.0f} GB of the disk are free, {NEEDED / GB:.0f} are needed")
    try:
        commit = execute("git", "rev-parse", "--short", "HEAD", output=True).strip()
        execute("git", "clone", "-q", ROOT, folder / "source")
        install(environment, python, folder)
        return test(environment, folder, jobs) | {"commit": commit}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def install(environment: Environment, python: str, folder: Path) -> None:
    """torch first, then the rest around it: no version that constraints.txt names takes torch's place."""
    source = folder / "source"
    execute(python, "-m", "venv", folder / "env")
    pip = folder / "env/bin/python", "-m", "pip", "--disable-pip-version-check"
    get = *pip, "install", "-q", "--no-cache-dir", "--progress-bar", "off"
    execute(*get, f"torch=={environment.torch}", "setuptools>=70")
    there = execute(*pip, "freeze", "--all", "--exclude", "pip", output=True)
    tested = (source / "constraints.txt").read_text(encoding="utf-8")
    lowest = lowest_versions((source / "setup.py").read_text(encoding="utf-8"))
    constraints = folder / "constraints.txt"
    constraints.write_text(around(there, lowest if environment.oldest else "", tested))
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


def test(environment: Environment, folder: Path, jobs: int) -> dict:
    """Runs the tests in an environment."""
    python, report = folder / "env/bin/python", folder / "report.xml"
    words = ("-q", "-n", jobs, "--dist", "loadfile", "-p", "no:cacheprovider", "--junitxml", report)
    execute(python, "-m", "pytest", *words, check=False, folder=folder / "source")
    if not report.exists():
        raise MatrixError("the tests ended without a report")
    program = (
        "import platform, torch, numpy; "
        "print(platform.python_version(), torch.__version__, numpy.__version__)"
    )
    versions = execute(python, "-c", program, output=True).split()
    size = int(execute("du", "-sk", folder / "env", output=True).split()[0]) * 1024
    return {
        **dict(zip(("python", "torch", "numpy"), versions)),
        "oldest": environment.oldest,
        **read_report(report.read_text(encoding="utf-8")),
        "size_gb": round(size / GB, 1),
        "date": datetime.date.today().isoformat(),
    }


def execute(*command, check: bool = True, output: bool = False, folder: Path = ROOT) -> str:
    """Runs a command in a folder, the checkout; its output where that is asked for."""
    command = [str(word) for word in command]
    environment = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "PYTHONHOME")}
    environment["OMP_NUM_THREADS"] = "1"
    if (
        "/" in command[0]
    ):  # the commands that belong to this Python come before others of their name
        environment["PATH"] = f"{Path(command[0]).parent}{os.pathsep}{environment['PATH']}"
    pipe = subprocess.PIPE if output else None
    result = subprocess.run(command, cwd=folder, env=environment, stdout=pipe, text=True)
    if check and result.returncode:
        raise MatrixError(f"`{' '.join(command)}` ended with status {result.returncode}")
    return result.stdout or ""


if __name__ == "__main__":
    sys.exit(main())
