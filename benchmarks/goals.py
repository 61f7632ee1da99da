"""The goals for the speed, and whether a run met them."""

from dataclasses import dataclass

from benchmarks.contenders import DEPTHS, EXPERTS

EIGHT_EXPERTS = ("8", "4-4", "2-2-2-2")


@dataclass(frozen=True)
class Goal:
    """``at`` names the case with the worst value, of how many; None: the run has no case of this goal."""

    text: str
    limit: float
    value: float | None
    at: str | None

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        return "met" if self.value <= self.limit else "missed"


def block_goals(results: list[dict]) -> list[Goal]:
    def over_floor(result: dict) -> float:
        return result["over_floor"]["ours"]["median"]

    def cases(size="base", strata=EIGHT_EXPERTS, tokens=None, mode="train") -> list[dict]:
        return [
            result
            for result in results
            if result["size"] == size and result["strata"] in strata and result["mode"] == mode
            if tokens is None or result["tokens"] == tokens
        ]

    goals = [
        _goal(f"training block, {what} / floor", limit, over_floor, found)
        for what, limit, found in (
            ("8 experts, 512 tokens", 1.05, cases(tokens=512)),
            ("8 experts, 4096 tokens", 1.05, cases(tokens=4096)),
            ("8 experts, 16384 tokens", 1.05, cases(tokens=16384)),
            ("big size, 4096 tokens", 1.05, cases(size="big", tokens=4096)),
            ("8 to 128 experts", 1.05, cases(strata=EXPERTS, tokens=4096)),
            ("1 to 8 strata", 1.05, cases(strata=DEPTHS, tokens=4096)),
        )
    ]
    goals.append(
        _goal(
            "one decoding step (40 tokens) / floor",
            1.15,
            over_floor,
            cases(tokens=40, mode="infer"),
        )
    )
    for kind, text in (("peak", "peak memory"), ("saved", "memory saved for backward")):
        goals.append(
            _goal(
                f"training block, 8 experts, 4096 tokens and more, {text} / floor's",
                1.50,
                lambda result, kind=kind: memory_ratio(result, kind),
                cases(tokens=4096) + cases(tokens=16384),
            )
        )
    for peer in dict.fromkeys(name for result in results for name in result["agreement"]):
        # Below 1: ours is the faster one.
        goals.append(
            _goal(
                f"ours / {peer}, every size",
                1.0,
                lambda result, peer=peer: 1 / result["over_ours"][peer]["median"],
                [result for result in results if peer in result["over_ours"]],
            )
        )
    return goals


def program_goals(results: dict) -> list[Goal]:
    """``results``: by command, then by model (see `program.py`)."""
    goals = []
    for command, models in results.items():
        rows = [{"case": name, **model} for name, model in models.items()]
        goals.append(
            _goal(
                f"{command}: our dense / fairseq's transformer",
                1.0,
                lambda row: 1 / row["over_dense"]["median"],
                [row for row in rows if row["case"] == "fairseq"],
            )
        )
    return goals


def memory_ratio(result: dict, kind: str) -> float:
    return result["memory"]["ours"][kind] / result["memory"]["floor"][kind]


def _goal(text: str, limit: float, value, results: list[dict]) -> Goal:
    if not results:
        return Goal(text, limit, None, None)
    worst = max(results, key=value)
    return Goal(text, limit, value(worst), f"{worst['case']}, of {len(results)}")
