"""Checks a GPU: python -m benchmarks.gpu --minutes 9 [--device cpu] [--parts right fast-block ...]

It says what it will run and for how long at most, then runs it in the order of importance, as much as
there is time for. In the folder of --out, results.jsonl has each result as soon as it is there; report.md
and report.json are made at the end. The exit status is 1 if something was wrong. It needs no internet:
what .venv has is enough.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.gpu.parts import PARTS, Context, choose
from benchmarks.gpu.report import passed, report
from benchmarks.gpu.schedule import announce, command_of, emit, run_all
from benchmarks.machine import describe


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything (9)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: rehearsal")
    parser.add_argument("--parts", nargs="+", default=(), help="parts or groups of them (all)")
    parser.add_argument("--out", type=Path, help="folder (results/gpu-check, of a rehearsal -cpu)")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # what the schedule runs
    args = parser.parse_args(argv)
    if not args.minutes > 0:
        parser.error(f"--minutes {args.minutes:g}: expected more than 0")
    try:
        parts = choose(args.parts)
    except ValueError as error:
        parser.error(str(error))
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; --device cpu makes a rehearsal")
    if args.part:
        return run_part(args)
    folder = args.out or Path("results/gpu-check" + ("-cpu" if args.device == "cpu" else ""))
    folder.mkdir(parents=True, exist_ok=True)
    machine = describe(torch.device(args.device)) | {"command": "python -m benchmarks.gpu"}
    machine |= graphics(args.device)
    print(f"{machine['device']}: {args.minutes:g} minutes at most, in this order")
    print(announce(parts, 60 * args.minutes), flush=True)

    def command(part, limit):
        return command_of(part, args.device, folder, limit)

    results = run_all(parts, 60 * args.minutes, folder / "results.jsonl", command)
    text = report(machine, results)
    (folder / "report.md").write_text(text)
    content = {"machine": machine, "results": results}
    (folder / "report.json").write_text(json.dumps(content, indent=1) + "\n")
    print(f"\n{text}\nin {folder}: report.md, report.json, results.jsonl")
    return 0 if passed(results) else 1


def run_part(args: argparse.Namespace) -> int:
    part = next(part for part in PARTS if part.name == args.part)
    with tempfile.TemporaryDirectory() as folder:
        for result in part.run(Context(args.device, folder, 60 * args.minutes)):
            emit(result)
    return 0


def graphics(device: str) -> dict:
    """What the driver says of a GPU."""
    if device == "cpu":
        return {}
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    found = {"cuda": torch.version.cuda, "capability": capability}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        return found | {"driver": said.split("\n")[0].strip()}
    except (OSError, subprocess.CalledProcessError):
        return found


if __name__ == "__main__":
    sys.exit(main())
