"""What a check found: a line per result as it comes, a summary for the screen, and a report in full."""

GOAL, GOAL_TOKENS = 1.15, 16384
LINES = 60  # of the summary at most


def goal(results: list[dict]) -> str:
    """Whether the block is within 1.15 of its bare grouped products in every case of 16,384 tokens
    or more, in the execution that is fastest there; a rehearsal and an interrupted part may have none.
    """
    cases = of_part(results, "fast-block")
    large = [c for c in cases if c.get("tokens", 0) >= GOAL_TOKENS and "ratio" in c]
    failed = [c for c in cases if c["ok"] is False]
    if not large and not failed:
        return f"goal {GOAL}: not measured"
    worst = max((c["ratio"] for c in large), default=None)
    verdict = "met" if not failed and worst <= GOAL else "missed"
    numbers = [f"worst ratio {worst:.3f} of {len(large)} cases"] if large else []
    numbers += [f"{len(failed)} cases failed"] if failed else []
    return f"goal {GOAL}: {verdict} ({', '.join(numbers)})"


def passed(results: list[dict]) -> bool:
    """Whether nothing failed: no case, no part's process. A time limit is no failure."""
    return not any(r.get("ok") is False or r.get("status") == "failed" for r in results)


def line_of(result: dict) -> str:
    """A result in one line, for the screen."""
    if "status" in result:
        seconds = f" after {result['seconds']} s" if "seconds" in result else ""
        return f"{result['part']}: {result['status']}{seconds}"
    verdict = {True: "right", False: "WRONG", None: ""}[result["ok"]]
    return f"  {result['part']}: {result['case']}: {verdict} {values(result)}"[:240].rstrip()


def values(result: dict) -> str:
    """All that was measured in a case, but tables."""
    others = {k: v for k, v in result.items() if k not in ("part", "case", "ok")}
    flat = {k: v for k, v in others.items() if not isinstance(v, dict)}
    if flat.get("error"):
        flat["error"] = flat["error"].strip().splitlines()[-1]  # of a stack trace
    return ", ".join(f"{key} {short(value)}" for key, value in flat.items())


def summary(machine: dict, results: list[dict]) -> str:
    """At most `LINES` lines: what is wrong first, then each part, then the measured cases."""
    wrong = [line_of(r) for r in results if r.get("ok") is False]
    for part in (r for r in results if r.get("status") == "failed"):
        wrong += [line_of(part), *(f"    {line}" for line in part["output"].splitlines()[-4:])]
    ended = ("time limit", "no time")
    unchecked = [
        r["part"] for r in results if r.get("status") in ended and r["part"][:5] == "right"
    ]
    verdict = f"not checked: {', '.join(unchecked)}" if unchecked else "nothing is wrong"
    lines = [f"{machine['device']}: {verdict if passed(results) else 'WRONG:'}", *wrong]
    lines += [goal(results), *part_table(results)]
    for part in dict.fromkeys(r["part"] for r in results):
        cases = [r for r in of_part(results, part) if r["ok"] is None]
        lines += [line_of(case) for case in cases]
    if len(lines) > LINES:
        lines = lines[: LINES - 1] + [f"({len(lines) - LINES + 1} more lines in report.md)"]
    return "\n".join(lines)


def part_table(results: list[dict]) -> list[str]:
    lines = ["| part | status | seconds | cases | wrong |", "|---|---|---|---|---|"]
    for part in (r for r in results if "status" in r):
        cases = of_part(results, part["part"])
        wrong = sum(case["ok"] is False for case in cases)
        lines.append(
            row([part["part"], part["status"], part.get("seconds", ""), len(cases), wrong])
        )
    return lines


def report(machine: dict, results: list[dict]) -> str:
    """Markdown: the machine, a line per part, then each part's cases; of right ones only how many."""
    lines = [f"# Check of {machine['device']}", ""]
    if machine["device"] == "cpu":
        lines += ["A rehearsal on a CPU with tiny sizes: its times say nothing about a GPU.", ""]
    lines += [f"- {key}: {value}" for key, value in machine.items() if key != "device"]
    lines += ["", goal(results), "", *part_table(results)]
    for part in dict.fromkeys(r["part"] for r in results):
        cases = of_part(results, part)
        right = [case for case in cases if case["ok"] is True]
        shown = [case for case in cases if case["ok"] is not True]
        if cases:
            lines += ["", f"## {part}"]
        if right:
            names = ", ".join(dict.fromkeys(case["case"].split(",")[0] for case in right))
            lines += ["", f"{len(right)} cases are right: {names}."]
        if shown:
            lines += ["", row(["case", "", "measured"]), "|---|---|---|"]
            for case in shown:
                verdict = "WRONG" if case["ok"] is False else ""
                lines.append(row([case["case"], verdict, values(case)]))
        for table in dict.fromkeys(k for c in shown for k, v in c.items() if isinstance(v, dict)):
            lines += ["", *table_of(table, [case for case in shown if table in case])]
    for part in (r for r in results if r.get("status") == "failed"):
        lines += ["", f"## {part['part']} failed", "", "```", part["output"].strip(), "```"]
    return "\n".join(lines) + "\n"


def table_of(name: str, cases: list[dict]) -> list[str]:
    """A row per case and a column per key of its values under ``name``."""
    columns = list(dict.fromkeys(key for case in cases for key in case[name]))
    lines = [row([name, *columns]), row(["---"] * (1 + len(columns)))]
    return lines + [
        row([case["case"], *(short(case[name].get(key, "")) for key in columns)]) for case in cases
    ]


def of_part(results: list[dict], name: str) -> list[dict]:
    return [r for r in results if r["part"] == name and "case" in r]


def row(words: list) -> str:
    cells = (str(word).replace("|", "/").replace("\n", " ") for word in words)
    return "| " + " | ".join(cells) + " |"


def short(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
