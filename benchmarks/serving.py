"""Requests per second of `smoe serve`, asked one by one and by many clients at once, in turns.

    python -m benchmarks.serving RUN --text FILE --direction de-en --at-once 1 32 --out out.json

Each request is one line of the text. Beside the time it says how long the server's processor was busy, which
other programs on the machine change less.
"""

import argparse
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks import machine

JSON = {"Content-Type": "application/json"}


def main() -> None:
    args = parse_args()
    lines = args.text.read_text(encoding="utf-8").splitlines()[: args.requests]
    words = [sys.executable, "-m", "smoe_fairseq.cli", "serve", str(args.run), "--port", "0"]
    run = machine.describe(torch.device("cpu")) | {"run": str(args.run)}
    run |= {"direction": args.direction, "requests": len(lines)}
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        port = int(re.search(r":(\d+)/", server.stdout.readline())[1])
        measured = {at_once: [] for at_once in args.at_once}
        expected = ask_all(port, lines, args.direction, 1)  # warms up
        for _ in range(args.rounds):
            for at_once, times in measured.items():
                before = busy(server.pid), time.monotonic()
                assert ask_all(port, lines, args.direction, at_once) == expected
                times.append((time.monotonic() - before[1], busy(server.pid) - before[0]))
    finally:
        server.terminate()
        server.wait()
    for at_once, times in measured.items():
        seconds, processor = map(statistics.median, zip(*times))
        run[f"{at_once} at once"] = {
            "requests per second": round(len(lines) / seconds, 1),
            "processor, ms per request": round(1000 * processor / len(lines), 2),
        }
    args.out.write_text(json.dumps(run, indent=1) + "\n")
    print(json.dumps(run, indent=1))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE")
    parser.add_argument("--direction", required=True)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def ask_all(port: int, lines: list[str], direction: str, at_once: int) -> list[str]:
    """The translations, asked for by so many clients, each with a connection of its own."""
    source, target = direction.split("-")

    def client(mine: list[str]) -> list[str]:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        found = []
        for text in mine:
            body = json.dumps({"text": text, "source": source, "target": target})
            connection.request("POST", "/translate", body, JSON)
            found.append(json.load(connection.getresponse())["translations"][0]["translation"])
        connection.close()
        return found

    with ThreadPoolExecutor(at_once) as pool:
        parts = list(pool.map(client, [lines[n::at_once] for n in range(at_once)]))
    return [parts[n % at_once][n // at_once] for n in range(len(lines))]


def busy(pid: int) -> float:
    """Seconds that a process has had the processor."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
