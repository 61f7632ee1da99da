"""Which systems of a study are drawn beside one another."""

from smoe_fairseq.recipes.folders import method_of
from smoe_fairseq.recipes.study.results import Result, groups


def drawn(study: list[str], *runs: str) -> list[list[str]]:
    """The runs of each row, in order."""
    systems: dict[str, list[Result]] = {}
    for run in runs:
        systems.setdefault(method_of(run), []).append(Result(run, {}, [], {}))
    found = groups(study, systems, "moe", largest=8)
    for row in found:
        assert all(method_of(r.name) == method for method, results in row.items() for r in results)
    return [[r.name for results in row.values() for r in results] for row in found]


def test_a_system_of_one_seed_stands_beside_the_baseline_s_run_of_that_seed():
    study = ["dense", "moe", "switch", "smoe-4-4", "smoe-2-2"]
    of_study = [f"{method}{seed}" for method in study for seed in ("", ".seed-2")]
    others = ["smoe-4-4.seed-4", "moe-hash.seed-4", "moe-base.seed-4", "deep-2-2"]
    found = drawn(study, *of_study, "moe.seed-4", *others)
    assert found == [
        of_study,
        ["moe.seed-4", "smoe-4-4.seed-4", "moe-hash.seed-4", "moe-base.seed-4"],
        ["moe", "deep-2-2"],
    ]


def test_no_run_is_left_out_and_no_row_is_crowded():
    rivals = [f"moe-{i}.seed-3" for i in range(9)]
    runs = ["moe", "moe.seed-3", "dense", "dense.seed-5", "switch", *rivals]
    found = drawn(["moe", "dense", "switch"], *runs)
    assert {name for row in found for name in row} == set(runs)
    of_rivals = [row for row in found if set(row) & set(rivals)]
    assert [row[0] for row in of_rivals] == ["moe.seed-3"] * 2
    assert max(map(len, of_rivals)) == 1 + 5  # nine in two rows
    assert ["dense.seed-5"] in found  # the baseline does not have it


def test_without_a_study_all_stand_by_their_seeds():
    assert drawn([], "dense", "moe", "moe.seed-2") == [["moe", "dense"], ["moe", "moe.seed-2"]]
