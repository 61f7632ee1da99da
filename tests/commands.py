"""Commands run as a user runs them, in processes of their own."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

SCRIPTS = Path(sysconfig.get_path("scripts"))


def run(*command, check=True, cwd=None, stdin="", **environment) -> subprocess.CompletedProcess:
    """Runs a program of this environment (``fairseq-train``, ``smoe``, ``python``, ...).

    In the result, ``stdout`` holds stderr too; ``check`` fails the test on a non-zero status.
    """
    program, *arguments = map(str, command)
    program = sys.executable if program == "python" else str(SCRIPTS / program)
    result = subprocess.run(
        [program, *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    if check:
        assert result.returncode == 0, result.stdout[-4000:]
    return result


def preprocess(raw: Path, folder: Path, *flags) -> None:
    """``fairseq-preprocess`` from the tiny corpus's text to ``folder``."""
    prefixes = [f"--{split}pref={raw / split}" for split in ("train", "valid", "test")]
    run("fairseq-preprocess", "-s", "src", "-t", "tgt", "--destdir", folder, *prefixes, *flags)
