"""Shell commands, printed as they are run, so that what a user copies is what was done."""

import os
import shlex
import shutil
import signal
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from smoe_fairseq.recipes import child
from smoe_fairseq.system.errors import UsageError

# Programs whose last words are a sentence about what went wrong.
_TELL = {"python", "smoe", "fairseq-train", "fairseq-generate"}
_TELL |= {"torchrun", "srun"}  # about how they themselves ended, below the former's


def command(*words: object, output: object = None) -> str:
    """One quoted line; ``output`` is the file that its standard output goes to."""
    line = shlex.join(str(word) for word in words)
    return line if output is None else f"{line} > {shlex.quote(str(output))}"


def pipe(*commands: str) -> str:
    """Commands that feed one another."""
    return " | ".join(commands)


def dry_run() -> bool:
    """Whether ``DRY_RUN`` asks to print commands only."""
    return os.environ.get("DRY_RUN", "0") not in ("", "0")


def environment() -> dict[str, str]:
    """Of the commands: the programs of this Python's environment come first on the path.

    Python's warnings are off, since fairseq, older than its libraries, draws dozens of them in each command;
    ``PYTHONWARNINGS=default`` shows them.
    """
    scripts = sysconfig.get_path("scripts")
    return {
        "PYTHONWARNINGS": "ignore",
        # libgomp's threads spin for long while they wait, and take the core from those they wait for as
        # soon as anything else runs on the machine: twice to ten times as slow. This is a short spin.
        "GOMP_SPINCOUNT": "2000",
        **os.environ,
        "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}",
    }


def run(lines: Iterable[str]) -> None:
    """Prints each line and, unless ``DRY_RUN`` is set, runs it; comments are printed only.

    The first command that fails ends the recipe, with its own words; those of programs that do not end
    in a sentence are given one. A signal that ends this process is passed on to all that the command has
    started, and waited for (child.py).
    """
    for line in lines:
        print(line, flush=True)
        if dry_run() or line.startswith("#"):
            continue
        status = child.run(["bash", "-o", "pipefail", "-c", line], environment())
        if status < 0:
            raise UsageError(f"{line.split()[0]} was stopped by {signal.Signals(-status).name}")
        if status and line.split()[0] in _TELL:
            raise SystemExit(status)
        if status:
            programs = " | ".join(part.split()[0] for part in line.split(" | "))
            raise UsageError(f"{programs} failed with exit status {status}, for the reason above")


@contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """A folder that commands write to before they give it its name; where they fail, it is removed."""
    try:
        yield folder
    finally:
        if not dry_run():
            shutil.rmtree(folder, ignore_errors=True)


def report(message: str) -> None:
    """Tells the user, loudly and apart from the commands, what a recipe leaves out."""
    print(f"warning: {message}", file=sys.stderr, flush=True)
