"""Markdown from what `block.py` and `program.py` measured: python -m benchmarks.report FOLDER"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks import goals
from benchmarks.goals import Goal


def main(folder: Path) -> None:
    runs = {
        name: json.loads(path.read_text())
        for name in ("block", "block-2-threads", "program")
        if (path := folder / f"{name}.json").exists()
    }
    parts, all_goals = [], []
    if run := runs.get("block"):
        all_goals += goals.block_goals(run["cases"])
        parts += [machine_lines(run), block_table(run["cases"]), peer_table(run["cases"])]
    if run := runs.get("block-2-threads"):
        all_goals += [
            replace(goal, text=f"two threads: {goal.text}")
            for goal in goals.block_goals(run["cases"])
            if goal.value is not None
        ]
        parts += ["## Two threads", machine_lines(run), block_table(run["cases"])]
    if run := runs.get("program"):
        all_goals += goals.program_goals(run["results"])
        parts += [machine_lines(run), program_table(run["results"])]
    text = "\n\n".join([goal_table(all_goals), *filter(None, parts)]) + "\n"
    (folder / "report.md").write_text(text)
    print(text)


def goal_table(all_goals: list[Goal]) -> str:
    def row(goal: Goal) -> list[str]:
        value = "" if goal.value is None else f"{goal.value:.2f}"
        return [goal.text, f"{goal.limit:.2f}", value, goal.at or "", goal.verdict]

    return table(["goal", "at most", "measured", "worst case", ""], map(row, all_goals))


def machine_lines(run: dict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    lines = [
        f"`{run['command']}` at commit {run['commit']}",
        f"{run['device']}; {run['cpu']}, {run['threads']} of {run['cores']} threads, load"
        f" {run['load']:.1f} at the start; {run['system']}, Python {run['python']}; {versions}",
    ]
    return "\n\n".join(lines)


def block_table(results: list[dict]) -> str:
    def row(result: dict) -> list[str]:
        ratio = result["over_floor"]["ours"]
        memory = [
            f"{goals.memory_ratio(result, kind):.2f}" if result["memory"]["floor"][kind] else ""
            for kind in ("saved", "peak")
        ]
        floor_ms = result["seconds"]["floor"]["median"] * 1000
        best = f"{ratio['best']:.2f}"
        counts = [str(result[name]) for name in ("routed", "rounds")]
        return [result["case"], *counts, f"{floor_ms:.1f}", spread(ratio), best, *memory]

    heading = [
        "case",
        "routed",
        "rounds",
        "floor ms",
        "ours / floor",
        "of the best",
        "saved",
        "peak",
    ]
    return table(heading, map(row, results))


def peer_table(results: list[dict]) -> str | None:
    """Each peer's time over ours, and its time over the floor."""
    results = [result for result in results if result["agreement"] or result["left_out"]]
    if not results:
        return None
    names = list(dict.fromkeys(n for r in results for n in [*r["agreement"], *r["left_out"]]))

    def cell(result: dict, name: str) -> str:
        if name not in result["over_ours"]:
            return result["left_out"].get(name, "")
        return f"{spread(result['over_ours'][name])}; {result['over_floor'][name]['median']:.2f}"

    def row(result: dict) -> list[str]:
        return [result["case"], *(cell(result, name) for name in names)]

    return (
        "Time over ours (above 1: slower than ours), with quartiles; then over the floor.\n\n"
        + table(["case", *names], map(row, results))
        + "\n\nBefore timing, on the same weights: "
        + "; ".join(agreement_line(results, name) for name in names)
        + "."
    )


def agreement_line(results: list[dict], name: str) -> str:
    found = [result["agreement"][name] for result in results if name in result["agreement"]]
    if not found:
        return f"{name} left out"
    share = min(entry["same_tokens"] for entry in found)
    difference = max(entry["difference"] for entry in found)
    return (
        f"{name} routes at least {share:.0%} of the tokens as ours does, and differs on these by at "
        f"most {difference:.0e}"
    )


def program_table(results: dict) -> str:
    rows = [
        [
            command,
            name,
            f"{model['speed']['median']:.0f}",
            spread(model["over_dense"]),
            f"{model['flops']:.2f}" if model.get("flops") else "",
        ]
        for command, models in results.items()
        for name, model in models.items()
    ]
    return table(["", "model", "tokens per second", "time over dense", "FLOPs"], rows)


def spread(ratio: dict) -> str:
    return f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"


def table(heading: list[str], rows) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results"))
