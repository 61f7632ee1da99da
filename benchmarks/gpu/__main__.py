"""Checks a GPU: python -m benchmarks.gpu --minutes 9 [--device cpu] [--parts right fast-block ...]

It lists what it will run and for how long at most. Parts that compare results run side by side; parts
that measure times run alone, as many as time allows. The folder of --out contains results.jsonl, with each
result as soon as it is there, and report.md and report.json at the end. The exit status is 1 if something
was wrong. No internet is needed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks import forked
from benchmarks.gpu.parts import Context, Part, announce, choose, run_all
from benchmarks.gpu.report import passed, report, summary
from benchmarks.timing import describe


def main(argv: list[str] | None = None) -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything (9)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: rehearsal")
    parser.add_argument("--parts", nargs="+", default=(), help="parts or groups of them (all)")
    parser.add_argument("--out", type=Path, help="folder (results/gpu-check, of a rehearsal -cpu)")
    args = parser.parse_args(argv)
    if not args.minutes > 0:
        parser.error(f"--minutes {args.minutes:g}: expected more than 0")
    try:
        parts = choose(args.parts)
    except ValueError as error:
        parser.error(str(error))
    # In other processes: a process that has touched CUDA cannot fork one that uses it.
    if args.device == "cuda" and not forked.value(torch.cuda.is_available):
        parser.error("--device cuda: torch sees no GPU here; --device cpu makes a rehearsal")
    machine = forked.value(partial(graphics, args.device))
    folder = args.out or Path("results/gpu-check" + ("-cpu" if args.device == "cpu" else ""))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{machine['device']}: {args.minutes:g} minutes at most, in this order")
    print(announce(parts, 60 * args.minutes), flush=True)
    forked.import_commands()
    run = partial(run_part, args.device, folder)
    left = 60 * args.minutes - (time.monotonic() - began)
    results = run_all(parts, left, folder / "results.jsonl", run)
    (folder / "report.md").write_text(report(machine, results))
    content = {"machine": machine, "results": results}
    (folder / "report.json").write_text(json.dumps(content, indent=1) + "\n")
    print(f"\n{summary(machine, results)}\nin {folder}: report.md, report.json, results.jsonl")
    return 0 if passed(results) else 1


def run_part(device: str, out: Path, part: Part) -> Iterator[dict]:
    with tempfile.TemporaryDirectory() as folder:
        yield from part.run(Context(device, folder, str(out)))


def graphics(device: str) -> dict:
    """The machine and, of a GPU, what its driver knows."""
    found = describe(torch.device(device)) | {"command": "python -m benchmarks.gpu"}
    if device == "cpu":
        return found
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    found |= {"cuda": torch.version.cuda, "capability": capability}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        return found | {"driver": answer.split("\n")[0].strip()}
    except (OSError, subprocess.CalledProcessError):
        return found


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    sys.exit(main())
