"""Verdicts of a study, beside numbers worked out by hand."""

import math
from pathlib import Path

import numpy as np
import pytest

from smoe_fairseq.recipes.config import load_dataset
from smoe_fairseq.recipes.evaluation.comparison import chance, interval, paired, spearman
from smoe_fairseq.recipes.study import results as study_results
from smoe_fairseq.recipes.study.claims import (
    CONFIRMED,
    OPEN,
    REFUTED,
    about_capacity,
    about_cost,
    about_scores,
)

ROOT = Path(__file__).parents[1]


def test_a_paired_interval_by_hand():
    """A seed that only one of them has says nothing about what lies between them."""
    first = {1: 1.0, 2: 2.0, 3: 3.0, 4: 90.0}
    found = paired(first, {7: 50.0, 3: 8.0, 2: 6.0, 1: 4.0})
    # Differences 3, 4 and 5: their deviation is 1, two degrees of freedom.
    assert found.mean == 4
    width = 4.303 / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((4 - width, 4 + width), abs=1e-3)
    assert paired({1: 1.0}, {1: 2.0, 2: 3.0}).low is None
    assert paired({1: 1.0}, {2: 2.0}) is None
    diverged = paired(first, {1: math.nan, 2: 3.0})
    assert diverged.count == 2 and math.isnan(diverged.mean) and math.isnan(diverged.high)


def by_seed(points: dict[str, list[float]]) -> dict[str, dict[int, float]]:
    return {method: dict(enumerate(values, 1)) for method, values in points.items()}


def test_chance_is_what_systems_and_seeds_leave():
    """Of two systems as in the paired t-test; of more, whatever their means and their seeds', of all."""
    points = {"a": {1: 1.0, 2: 2.0, 3: 3.0}, "b": {3: 8.0, 2: 6.0, 1: 4.0}}
    found, expected = (f(points["a"], points["b"]) for f in (chance(points).between, paired))
    assert (found.low, found.high, found.count) == pytest.approx(
        (expected.low, expected.high, expected.count)
    )
    alone = {"c": {1: 70.0}, "d": {9: 30.0}}  # say nothing of chance
    assert chance(points | alone).between(points["a"], alone["c"]).mean == 69
    found = chance(points | alone)
    assert found.deviation == pytest.approx(chance(points).deviation) and found.freedom == 2
    # From seed to seed they rise by 1, 2 and 6, 3 on average.
    points = {"a": {1: 1.0, 2: 2.0}, "b": {1: 40.0, 2: 42.0}, "c": {1: -3.0, 2: 3.0}}
    found = chance(points)
    assert found.freedom == 2
    assert found.deviation == pytest.approx(
        (((1 - 3) ** 2 + (2 - 3) ** 2 + (6 - 3) ** 2) / 2 / 2) ** 0.5
    )
    width = 4.303 * found.deviation  # of two seeds: the root of 2 / 2
    both = found.between(points["a"], points["b"])
    assert (both.low, both.high) == pytest.approx((39.5 - width, 39.5 + width), abs=1e-3)
    single = found.between(points["a"], {2: 7.0})
    assert (single.mean, single.count) == (5, 1) and single.high - 5 > width
    assert found.between(points["a"], alone["d"]) is None
    diverged = points | {"e": {1: math.nan, 2: 9.0}}
    assert chance(diverged).deviation == pytest.approx(found.deviation)
    assert math.isnan(found.between(points["a"], diverged["e"]).mean)
    squares = {"a": (1 - 3) ** 2, "b": (2 - 3) ** 2, "c": (6 - 3) ** 2}
    assert found.shares == pytest.approx({s: x / sum(squares.values()) for s, x in squares.items()})
    assert chance({}).freedom == 0 == chance(alone).freedom
    assert chance(alone).around([1.0]).low is None


def test_verdicts_follow_the_interval():
    """Chance is 0.31 BLEU in each run, so a difference of three seeds is known to 0.54."""
    points = {
        "moe": [30.0, 31.0, 32.0],
        "switch": [28.0, 29.0, 30.0],
        "moe-cmr": [33.0, 34.0, 35.0],
        "moe-16": [31.2, 32.2, 33.2],
        "stacked-4-4": [20.0],
        "smoe-4-4": [29.5, 31.5, 32.5],
        "smoe-2-2-2-2": [31.0, 32.6, 32.4],
        "smoe-8-8": [90.0, 91.0, 92.0],  # of twice the size
        "smoe-budget-4-4": [90.0, 91.0],  # not the paper's
    }
    points = by_seed(points)
    assert {v.claim: v.verdict for v in about_scores(points, experts=8)} == {
        "(a) smoe-4-4 is above moe": OPEN,
        "(a) smoe-4-4 is above switch": CONFIRMED,
        "(a) smoe-4-4 is above moe-cmr": REFUTED,
        "(a) smoe-2-2-2-2 is above moe": CONFIRMED,
        "(a) smoe-2-2-2-2 is above switch": CONFIRMED,
        "(a) smoe-2-2-2-2 is above moe-cmr": REFUTED,
        "(b) moe is above stacked-4-4": f"{OPEN}: a single seed",
        "(c) smoe-4-4 reaches moe-16, within 0.3 BLEU": REFUTED,
        "(c) smoe-2-2-2-2 reaches moe-16, within 0.3 BLEU": OPEN,
        "(d) fewer experts per stratum are better: smoe-2-2-2-2 is above smoe-4-4": CONFIRMED,
    }
    closer = points | by_seed({"moe-16": [30.5, 31.5, 32.5]})
    found = {v.claim: v.verdict for v in about_scores(closer, experts=8)}
    assert found["(c) smoe-2-2-2-2 reaches moe-16, within 0.3 BLEU"] == CONFIRMED
    (other,) = about_scores({"moe": {1: 30.0, 2: 31.0}, "smoe-4-4": {3: 32.0}}, experts=8)
    assert other.verdict == f"{OPEN}: no seed that both have" and other.found is None
    assert about_scores({"dense": {1: 1.0}}, experts=8) == []


def test_cost_is_compared_with_flops():
    flops = {"moe": 10.0, "smoe-4-4": 12.0}
    times = by_seed({"moe": [1.0, 1.01], "smoe-4-4": [1.2, 1.21]})
    (found,) = about_cost(times, flops, "moe")
    assert found.verdict == CONFIRMED and found.found.mean == pytest.approx(0.2, abs=0.01)
    assert "+20% beside moe: from +9% to +32%" in found.claim
    (found,) = about_cost(times | by_seed({"smoe-4-4": [1.6, 1.61]}), flops, "moe")
    assert found.verdict == REFUTED and 0.59 < found.found.mean < 0.61
    (found,) = about_cost(times | by_seed({"smoe-4-4": [1.0, 1.01]}), flops, "moe")
    assert found.verdict == REFUTED and abs(found.found.mean) < 0.01
    (found,) = about_cost(times | by_seed({"smoe-4-4": [1.0, 1.6]}), flops, "moe")
    assert found.verdict == OPEN
    (found,) = about_cost(times | by_seed({"smoe-4-4": [1.2]}), flops, "moe")
    assert found.verdict == f"{OPEN}: a single seed"
    assert about_cost({"dense": {1: 1.0}}, {"dense": 1.0}, "moe") == []


def routing(into, out_of, ranks=(0.1, 0.1), encoder=(1.5,)):
    """Of one run: requested capacity of targets in English, and of others; and the correlation."""
    blocks = {f"encoder.{2 * i + 1}": value for i, value in enumerate(encoder)}
    requested = {f"{x}-en": {"decoder.1": mean} for x, mean in zip("ab", into)}
    requested |= {f"en-{x}": {"decoder.1": mean} for x, mean in zip("ab", out_of)}
    correlation = {f"{x}-en": {"encoder.1": -r, "decoder.1": r} for x, r in zip("ab", ranks)}
    return {
        "requested_capacity": {name: layers | blocks for name, layers in requested.items()},
        "rank_correlation": correlation,
    }


def test_verdicts_about_requested_capacity():
    """Of each system by itself, over its seeds."""
    several = [
        routing((1.5, 1.51), (1.2, 1.8), (0.3, 0.5), (1.9, 1.5, 1.3)),
        routing((1.5, 1.52), (1.3, 1.8), (0.6, 0.22), (1.9, 1.4, 1.3)),
    ]
    one = [routing((1.5, 1.6), (1.2, 1.7), (0.1, -0.3), (1.5, 1.6))]
    found = about_capacity({"smoe-4-4": several, "deep-2-2": one, "smoe-2-2-2-2": []})
    assert [v.claim.split(":")[0] for v in found] == [
        *("(f) smoe-4-4", "(f) deep-2-2", "(g) smoe-4-4", "(g) smoe-4-4"),
        *("(g) deep-2-2", "(g) deep-2-2", "(h) smoe-4-4", "(h) deep-2-2"),
    ]
    f, f_one, encoder, decoder, one_encoder, _, h, h_one = found
    assert f.found.mean == pytest.approx((0.01 / 0.6 + 0.02 / 0.5) / 2) and f.found.count == 2
    assert f.verdict == CONFIRMED and "targets in en " in f.claim
    assert f_one.found.mean == pytest.approx(0.2) and f_one.verdict == f"{OPEN}: a single seed"
    assert (encoder.verdict, decoder.verdict) == (REFUTED, CONFIRMED)
    assert decoder.found.mean == pytest.approx((0.4 + 0.41) / 2)
    assert (encoder.directions, decoder.directions) == (
        "sign + in 0, - in 2",
        "sign + in 2, - in 0",
    )
    assert one_encoder.directions == "sign + in 1, - in 1"
    assert h.verdict == CONFIRMED and h.found.mean == pytest.approx((0.5 + 0.55) / 2)
    assert h_one.found.mean == pytest.approx(-0.1) and h_one.verdict == f"{OPEN}: a single seed"
    apart = [routing((1.2, 1.7), (1.2, 1.8)), routing((1.2, 1.71), (1.2, 1.8))]
    assert about_capacity({"smoe-4-4": apart})[0].verdict == REFUTED
    # A direction that one seed has no correlation of does not give its place to the next one.
    several[0]["rank_correlation"] |= {
        "a-en": {"encoder.1": math.nan},
        "b-en": {"encoder.1": 0.5},
    }
    found = about_capacity({"smoe-4-4": several})
    assert found[1].directions == "sign + in 1, - in 1"  # of a-en -0.6, of b-en 0.5 and -0.22
    assert about_capacity({}) == []


def test_rank_correlation_by_hand():
    assert spearman(np.array([1, 2, 3, 4]), np.array([1.0, 1.5, 1.7, 9.0])) == pytest.approx(1)
    # Ranks 1 2 3 4 and 3.5 1.5 1.5 3.5: covariance 0.
    assert spearman(np.array([1, 2, 3, 4]), np.array([2.0, 1, 1, 2])) == pytest.approx(0)
    assert math.isnan(spearman(np.array([1, 2]), np.array([1.0, 1.0])))


def test_a_loss_that_is_no_number_stays_in_the_curve(tmp_path, monkeypatch):
    """Without it a run that diverged would end at its best checkpoint."""
    monkeypatch.setenv("CONFIG_DIR", str(ROOT / "configs"))
    monkeypatch.setenv("RUN_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("RESULTS_DIR", str(tmp_path / "results"))
    run = tmp_path / "runs/multi30k/moe"
    run.mkdir(parents=True)
    valid = (
        "epoch 001 | valid on 'valid' subset | loss {0} | nll_loss {0} | wps 1 | num_updates {1}\n"
    )
    (run / "train.log").write_text(valid.format("4.5", 500) + valid.format("nan", 1000))
    (run / "identity.json").write_text('{"method": "moe", "dictionary": "d", "flags": {}}')
    (run / "scores.json").write_text('{"scores": {}}')
    study_results.keep(load_dataset("multi30k"), "moe", "command")
    rows = (tmp_path / "results/multi30k/moe" / study_results.CURVE).read_text().splitlines()[1:]
    assert rows == ["500,,4.5,,0,0.0", "1000,,nan,,0,0.0"]


def test_interval_of_a_mean_by_hand():
    found = interval([1.0, 2.0, 3.0])
    assert (found.low, found.high) == pytest.approx(
        (2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5), abs=1e-3
    )
    assert interval([1.0]).low is None
