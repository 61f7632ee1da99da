"""Markdown from what `block.py` and `program.py` measured: python -m benchmarks.report FOLDER"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.layers import DEPTHS, EIGHT_EXPERTS, EXPERTS


def main(folder: Path) -> None:
    names = ("block", "block-2-threads", "program")
    files = {name: folder / f"{name}.json" for name in names}
    runs = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    cpus = {run["cpu"] for name, run in runs.items() if name != "program"}
    if len(cpus) > 1:  # of another machine
        del runs["block-2-threads"]
    goals, parts = [], []
    for name, run in runs.items():
        if name == "program":
            goals += program_goals(run["results"])
            parts += [machine_lines(run), program_table(run["results"])]
            continue
        found = block_goals(run["cases"])
        parts += [machine_lines(run), block_table(run["cases"])]
        if name == "block":
            goals += found
            parts.append(peer_table(run["cases"]))
        else:
            goals += [[f"two threads: {goal[0]}", *goal[1:]] for goal in found if goal[2]]
            parts.insert(-2, "## Two threads")
    first = table(["goal", "at most", "measured", "worst case", ""], goals)
    text = "\n\n".join([first, *filter(None, parts)]) + "\n"
    (folder / "report.md").write_text(text)
    print(text)


def block_goals(results: list[dict]) -> Iterator[list[str]]:
    def over_floor(result: dict) -> float:
        return result["over_floor"]["ours"]["median"]

    def cases(tokens: int, size="base", strata=EIGHT_EXPERTS, mode="train") -> list[dict]:
        wanted = {"tokens": tokens, "size": size, "mode": mode}
        return [r for r in results if r["strata"] in strata and wanted.items() <= r.items()]

    for tokens in (512, 4096, 16384):
        name = f"training block, 8 experts, {tokens} tokens / floor"
        yield goal(name, 1.05, over_floor, cases(tokens))
    for name, found in (
        ("big size, 4096 tokens", cases(4096, size="big")),
        ("8 to 128 experts", cases(4096, strata=EXPERTS)),
        ("1 to 8 strata", cases(4096, strata=DEPTHS)),
    ):
        yield goal(f"training block, {name} / floor", 1.05, over_floor, found)
    found = cases(40, mode="infer")
    yield goal("one decoding step (40 tokens) / floor", 1.15, over_floor, found)
    for kind, text in (("peak", "peak memory"), ("saved", "memory saved for backward")):
        name = f"training block, 8 experts, 4096 tokens and more, {text} / floor's"
        found = cases(4096) + cases(16384)
        yield goal(name, 1.50, lambda result, kind=kind: memory_ratio(result, kind), found)
    for peer in dict.fromkeys(name for result in results for name in result["agreement"]):
        found = [result for result in results if peer in result["over_ours"]]
        name = f"ours / {peer}, every size"
        yield goal(name, 1.0, lambda r, peer=peer: 1 / r["over_ours"][peer]["median"], found)


def program_goals(results: dict) -> Iterator[list[str]]:
    """``results``: by command, then by model (see `program.py`)."""
    for command, models in results.items():
        found = [{"case": "fairseq", **models["fairseq"]}] if "fairseq" in models else []
        name = f"{command}: our dense / fairseq's transformer"
        yield goal(name, 1.0, lambda row: 1 / row["over_dense"]["median"], found)


def goal(text: str, limit: float, value: Callable, results: list[dict]) -> list[str]:
    """A row: the largest value of the cases, and whether it is within the limit."""
    if not results:
        return [text, f"{limit:.2f}", "", "", "not measured"]
    worst = max(results, key=value)
    verdict = "met" if value(worst) <= limit else "missed"
    case = f"{worst['case']}, of {len(results)}"
    return [text, f"{limit:.2f}", f"{value(worst):.2f}", case, verdict]


def memory_ratio(result: dict, kind: str) -> float:
    return result["memory"]["ours"][kind] / result["memory"]["floor"][kind]


def machine_lines(run: dict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    return (
        f"`{run['command']}` at commit {run['commit']}\n\n"
        f"{run['device']}; {run['cpu']}, {run['threads']} of {run['cores']} threads, load"
        f" {run['load']:.1f} at the start; {run['system']}, Python {run['python']}; {versions}"
    )


def block_table(results: list[dict]) -> str:
    def row(result: dict) -> list[str]:
        ratio = result["over_floor"]["ours"]
        memory = [
            f"{memory_ratio(result, kind):.2f}" if result["memory"]["floor"][kind] else ""
            for kind in ("saved", "peak")
        ]
        floor_ms = result["seconds"]["floor"]["median"] * 1000
        best = f"{ratio['best']:.2f}"
        counts = [str(result[name]) for name in ("routed", "rounds")]
        return [result["case"], *counts, f"{floor_ms:.1f}", spread(ratio), best, *memory]

    heading = "case,routed,rounds,floor ms,ours / floor,of the best,saved,peak".split(",")
    return table(heading, map(row, results))


def peer_table(results: list[dict]) -> str | None:
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
    rows = []
    for command, models in results.items():
        for name, model in models.items():
            flops = f"{model['flops']:.2f}" if model.get("flops") else ""
            speed = f"{model['speed']['median']:.0f}"
            rows.append([command, name, speed, spread(model["over_dense"]), flops])
    return table(["", "model", "tokens per second", "time over dense", "FLOPs"], rows)


def spread(ratio: dict) -> str:
    return f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"


def table(heading: list[str], rows) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results"))
