"""Whole trainings through scripts/, as users start them."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.parts import Context
from benchmarks.timing import ROOT

# Stays, so that the next check resumes the study.
STUDY = ROOT / "build/gpu-check/study"


def script(folder: Path, name: str, *words, **variables) -> str:
    """What a script printed; its runs and results are in ``folder``.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
    """
    places = {"RUN_DIR": folder / "runs", "RESULTS_DIR": folder / "results", **variables}
    done = subprocess.run(
        ["bash", str(ROOT / f"scripts/{name}.sh"), *map(str, words)],
        env={**os.environ, **{key: str(value) for key, value in places.items()}},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stdout[-1000:])
    return done.stdout


def demo(context: Context) -> Iterator[dict]:
    """The demo; a rehearsal prepares its corpus and makes two updates."""
    folder = Path(context.folder)
    data = {"DATA_DIR": folder / "data"}
    if context.tiny:
        script(folder, "prepare", "phrasebook", **data)
        words = ["phrasebook", "smoe-2-2-2-2", "--max-update", 2, "--cpu"]
        script(folder, "train", *words, **data)
        yield {"case": "two updates of the demo", "ok": True}
        return
    text = script(folder, "demo", **data)
    yield {"case": "demo", "ok": True, "end": text[-600:]}


def study(context: Context) -> Iterator[dict]:
    """Needs Multi30k, prepared beforehand; the next check resumes what the time limit ends."""
    if context.tiny:
        yield {"case": "left out of a rehearsal", "ok": None}
        return
    if not (ROOT / "data/multi30k").exists():
        yield {"case": "left out: data/multi30k is not there (scripts/prepare.sh)", "ok": None}
        return
    base = ["--arch", "smoe_transformer_base", "--bf16", "--lr", 0.001]
    base += ["--save-interval-updates", 100]
    script(STUDY, "study", "multi30k", "dense", "smoe-4-4", *base)
    yield {"case": "study of dense and smoe-4-4 at base size", "ok": True, "in": str(STUDY)}
