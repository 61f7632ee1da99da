"""What a run was made with: command, commit, versions, machine."""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

PACKAGES = (
    "torch",
    "fairseq",
    "fairscale",
    "ctranslate2",
    "transformers",
    "st-moe-pytorch",
    "deepspeed",
)
ROOT = Path(__file__).resolve().parent.parent


def describe(device: torch.device, threads: int | None = None) -> dict:
    return {
        "command": f"python -m benchmarks.{Path(sys.argv[0]).stem} {shlex.join(sys.argv[1:])}".strip(),
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": threads or torch.get_num_threads(),
        "device": str(device) if device.type == "cpu" else torch.cuda.get_device_name(device),
        "load": os.getloadavg()[0],
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    """The checkout's commit, with ``+`` where files differ from it."""
    try:
        return _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*args: str) -> str:
    return subprocess.run(
        ["git", "-C", ROOT, *args], capture_output=True, text=True, check=True
    ).stdout.strip()


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
