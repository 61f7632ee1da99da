"""A plain report of a check's results."""

GOAL, GOAL_TOKENS = 1.15, 16384


def goal(results: list[dict]) -> str:
    """Whether the block is within 1.15 of its bare grouped products in every case of 16,384 tokens
    or more; a rehearsal and an interrupted part may have none.
    """
    cases = of_part(results, "fast-block")
    large = [c for c in cases if c.get("tokens", 0) >= GOAL_TOKENS]
    failed = [c for c in cases if c["ok"] is False]
    if not large and not failed:
        return f"goal {GOAL}: not measured"
    worst = max((c["ratio"] for c in large), default=None)
    verdict = "met" if not failed and worst <= GOAL else "missed"
    said = [f"worst ratio {worst:.3f} of {len(large)} cases"] if large else []
    said += [f"{len(failed)} cases failed"] if failed else []
    return f"goal {GOAL}: {verdict} ({', '.join(said)})"


def passed(results: list[dict]) -> bool:
    """Whether nothing failed: no case, no part's process. A time limit is no failure."""
    return not any(r.get("ok") is False or r.get("status") == "failed" for r in results)


def report(machine: dict, results: list[dict]) -> str:
    """Markdown: the machine, a line per part, then each part's cases."""
    lines = [f"# Check of {machine['device']}", ""]
    if machine["device"] == "cpu":
        lines += ["A rehearsal on a CPU with tiny sizes: its times say nothing about a GPU.", ""]
    lines += [f"- {key}: {value}" for key, value in machine.items() if key != "device"]
    lines += ["", goal(results)]
    lines += ["", "| part | status | seconds | cases | wrong |", "|---|---|---|---|---|"]
    for part in (r for r in results if "status" in r):
        cases = of_part(results, part["part"])
        wrong = sum(case["ok"] is False for case in cases)
        words = [part["part"], part["status"], part.get("seconds", ""), len(cases), wrong]
        lines.append(row(words))
    for part in dict.fromkeys(r["part"] for r in results):
        cases = of_part(results, part)
        if not cases:
            continue
        lines += ["", f"## {part}", "", "| case | | found |", "|---|---|---|"]
        for case in cases:
            others = {k: v for k, v in case.items() if k not in ("part", "case", "ok")}
            found = ", ".join(f"{key} {short(value)}" for key, value in others.items())
            verdict = {True: "right", False: "WRONG", None: ""}[case["ok"]]
            lines.append(row([case["case"], verdict, found]))
    for part in (r for r in results if r.get("status") == "failed"):
        lines += ["", f"## {part['part']} failed", "", "```", part["output"].strip(), "```"]
    return "\n".join(lines) + "\n"


def of_part(results: list[dict], name: str) -> list[dict]:
    return [r for r in results if r["part"] == name and "case" in r]


def row(words: list) -> str:
    cells = (str(word).replace("|", "/").replace("\n", " ") for word in words)
    return "| " + " | ".join(cells) + " |"


def short(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
