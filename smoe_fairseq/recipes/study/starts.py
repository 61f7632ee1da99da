"""What a run of a study is trained with, and where: noted in its folder at every start of it."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import smoe_fairseq
from smoe_fairseq.recipes.launch import visible_gpus
from smoe_fairseq.system.errors import UsageError
from smoe_fairseq.system.files import write_whole

FILE = "starts.json"


def note(folder: Path, variables: Mapping[str, str]) -> None:
    """Adds this commit and this machine, of a start with these ``variables`` of the environment.

    Those of an earlier start stay: a run may be begun by one and finished by another.
    """
    now = {"commit": _commit(), "machine": _machine(variables)}
    before = _read(folder)
    if now not in before:
        write_whole(folder / FILE, json.dumps([*before, now], indent=1) + "\n")


def summary(folder: Path) -> dict[str, str]:
    """``commit`` and ``machine`` of all starts, and ``untimed`` where its times are of two machines."""
    starts = _read(folder)
    commits, machines = (
        list(dict.fromkeys(s[key] for s in starts)) for key in ("commit", "machine")
    )
    found = {"commit": ", ".join(commits), "machine": ", then ".join(machines)}
    return found | ({"untimed": "of two machines"} if len(machines) > 1 else {})


def _read(folder: Path) -> list[dict[str, str]]:
    file = folder / FILE
    if not file.exists():
        return []
    try:
        starts = json.loads(file.read_text("utf-8"))
        return [{key: str(start[key]) for key in ("commit", "machine")} for start in starts]
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(
            f"{file} does not say with what the run was started: delete it, and the run is said to be of "
            "its next start alone"
        ) from None


def _commit() -> str:
    """With "-dirty" behind it where the code is not that of the commit."""
    folder = Path(smoe_fairseq.__file__).parent
    try:
        commit, changes = (
            subprocess.run(
                ["git", "-C", folder, *words], capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in (
                ("rev-parse", "--short", "HEAD"),
                ("status", "--porcelain", "--untracked-files=no", "."),
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return f"version {version('smoe_fairseq')}"
    return f"{commit}-dirty" if changes else commit


def _machine(variables: Mapping[str, str]) -> str:
    """Runs that differ in it are not compared in time."""
    import torch

    gpus = variables.get("GPUS")
    if gpus != "0" and torch.cuda.is_available():
        count = int(gpus) if gpus else len(visible_gpus(torch.cuda.device_count()))
        return f"{count} x {torch.cuda.get_device_name(0)}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    machine = f"{os.cpu_count()} cores of {names[0] if names else platform.processor()}"
    threads = variables.get("OMP_NUM_THREADS", "1")
    return machine if threads == "1" else f"{machine}, {threads} threads"
