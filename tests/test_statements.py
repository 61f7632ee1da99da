"""Statements of a study: differences paired by seed, margins and verdicts."""

import pytest

from smoe_fairseq.recipes.compare.grid import markdown
from smoe_fairseq.recipes.compare.statements import (
    Statement,
    judge,
    measures_of,
    statements_of,
    statements_table,
)
from smoe_fairseq.recipes.compare.statistics import (
    AHEAD,
    BEHIND,
    EQUAL,
    OPEN,
    Difference,
    holm,
    in_words,
    interval,
    verdicts,
)
from smoe_fairseq.recipes.datasets import load_dataset
from smoe_fairseq.recipes.evaluation.scores import Score
from smoe_fairseq.recipes.study.results import Result

MEASURES = measures_of(load_dataset("multi30k"))


def result(method: str, seed: int, loss: float, points: float = 10.0):
    score = Score(points, "s", 1, 1.0, {"chrF++": (points, "s")})
    curve = [{"validation_nll": loss, "training_nll": None, "update": 1}]
    about = {"machine": "m", "versions": {"torch": "2.13"}}
    return Result(f"{method}.seed-{seed}", seed, {"en-de": score}, curve, about)


def systems(**losses: list[float]) -> dict[str, list[Result]]:
    return {m: [result(m, i, loss) for i, loss in enumerate(of)] for m, of in losses.items()}


def table(statements: list[Statement], runs: dict[str, list[Result]], flops: dict[str, float]):
    found = judge(statements, [runs], MEASURES)
    return statements_table(statements, found, MEASURES, [runs], flops)


def test_a_difference_by_hand():
    """Of 1, 2, 3: mean 2, standard error 1 / sqrt(3), t of 4.303 for two degrees of freedom."""
    found = Difference({1: 1.0, 2: 2.0, 3: 3.0}, margin=1.0)
    assert interval(found.values)[1:] == pytest.approx(
        [2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5], abs=1e-3
    )
    assert found.p_different() == pytest.approx(0.07418, abs=1e-4)  # t = 3.464
    assert found.p_equal() == pytest.approx(1 - 0.11271, abs=1e-4)  # above 1: t = 1.732
    near = Difference({1: -0.1, 2: 0.0, 3: 0.1}, margin=1.0)
    assert near.p_equal() == pytest.approx(0.0016583, abs=1e-6)  # t = 1 / (0.1 / sqrt(3))


def test_one_seed_decides_nothing_and_equal_values_everything():
    one = Difference({1: 5.0}, margin=1.0)
    assert Difference({1: 0.0, 2: 0.0}, margin=1.0).p_different() == 1
    assert verdicts([one], 1) == [OPEN] and in_words(one.values) == "+5.00"
    assert verdicts([Difference({}, 1.0)], 1) == [OPEN]
    same = Difference(dict.fromkeys(range(4), 0.0), margin=1.0)
    assert verdicts([same], 1) == [EQUAL]


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []


@pytest.mark.parametrize("sign, expected", [(1, AHEAD), (-1, BEHIND)])
def test_verdicts_follow_tests_and_sign(sign, expected):
    far = Difference({i: 2 + 0.01 * i for i in range(8)}, margin=0.5)
    close = Difference({i: 0.01 * i for i in range(8)}, margin=0.5)
    wide = Difference({i: (-1) ** i for i in range(8)}, margin=0.5)
    assert verdicts([far, close, wide], sign) == [expected, EQUAL, OPEN]


def test_many_statements_take_more_evidence():
    """A p-value of 0.03 decides alone, and not as one of five."""
    edge = Difference(dict(enumerate([0.3, 0.1, 0.5, 0.9, -0.2, 0.4, 0.6, 0.0])), margin=0.01)
    assert 0.01 < edge.p_different() < 0.05
    assert verdicts([edge], 1) == [AHEAD]
    assert verdicts([edge] * 5, 1) == [OPEN] * 5


def test_the_table():
    rows = [3.10, 3.12, 3.08, 3.11, 3.09]
    runs = systems(moe=rows, dense=[x + 0.1 + 0.001 * i for i, x in enumerate(rows)])
    statements = [Statement("experts | all", "moe", "dense")]
    grid = table(statements, runs, {"moe": 1.8, "dense": 1.5})
    assert r"| experts \| all " in markdown(grid)
    cells = dict(zip(grid.header, grid.rows[0]))
    assert cells["seeds"] == "5" and cells["FLOPs"] == "+20%"
    assert cells["loss"].startswith("-0.102 [") and grid.rows[0][5] == AHEAD
    assert judge(statements, [runs], MEASURES)["BLEU"][0][1] == EQUAL


def test_without_statements_each_system_is_compared_with_moe():
    found = statements_of(load_dataset("m4"), systems(dense=[], moe=[], switch=[]))
    assert [(s.first, s.second) for s in found] == [("dense", "moe"), ("switch", "moe")]
