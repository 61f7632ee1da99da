"""A study: every method and seed, interrupted and resumed, and what its report says of them."""

import csv
import json
import math
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from test_recipes import recipe, refusal, surroundings, write_dataset, write_text
from test_recipes_evaluation import kill_session, wait_until

from smoe_fairseq.recipes.study import kept
from smoe_fairseq.recipes.study.blocks import chance
from smoe_fairseq.recipes.study.capacity_claims import about_capacity
from smoe_fairseq.recipes.study.capacity_summary import spearman
from smoe_fairseq.recipes.study.verdicts import CONFIRMED, OPEN, REFUTED, about_cost, about_scores
from smoe_fairseq.recipes.tables.student import interval, paired, quantile
from smoe_fairseq.settings.dataset import load_dataset

ROOT = Path(__file__).parents[1]
RUNS = ("moe", "smoe-2-2", "moe.seed-2", "smoe-2-2.seed-2")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A data set to study, prepared."""
    folder = tmp_path_factory.mktemp("study")
    raw = write_text(folder / "text", "en-fr", train=100, valid=10, test=30)
    given = write_dataset(
        *(folder / "configs", "tiny"),
        pairs=["en-fr"],
        experts=4,  # of which smoe-2-2 is one
        raw={},
        subwords={"vocab-size": 60},
        train={
            **{"arch": "smoe_transformer_tiny", "max-tokens": 500, "max-update": 2},
            **{"lr": 0.01, "warmup-updates": 1, "num-workers": 0, "log-interval": 1},
        },
        generate={"max-tokens": 1000, "max-len-b": 10, "num-workers": 0},
        study=["moe", "smoe-2-2"],
    )
    given |= {"OMP_NUM_THREADS": "1", "SEEDS": "1 2", "GPUS": "0"}
    prepared = recipe(folder, "prepare", "tiny", RAW=str(raw), **given)
    assert prepared.returncode == 0, prepared.stderr
    return folder, given


@pytest.fixture(scope="module")
def studied(data):
    """Killed when the first run was kept and reported, and started again."""
    folder, given = data
    first = subprocess.Popen(
        [ROOT / "scripts/study.sh", "tiny"],
        cwd=folder,
        env=surroundings() | given | {"JOBS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    report = folder / "results/tiny/report.md"
    wait_until(lambda: report.exists() or first.poll() is not None)
    kill_session(first.pid)
    first.wait()
    (done,) = kept_runs(folder)
    before = (folder / "results/tiny" / done / kept.FILE).stat().st_mtime_ns
    absolute = {"RUN_DIR": str(folder / "runs")}
    result = recipe(folder, "study", "tiny", JOBS="2", **given | absolute)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (folder / "results/tiny" / done / kept.FILE).stat().st_mtime_ns == before
    return folder, result.stdout


def kept_runs(folder: Path) -> list[str]:
    names = [path.parent.name for path in folder.glob(f"results/tiny/*/{kept.FILE}")]
    return [name for name in names if not name.endswith(".partial")]


def kept_command(folder: Path, run: str) -> str:
    return json.loads((folder / "results/tiny" / run / kept.FILE).read_text())["command"]


@pytest.mark.soak
def test_an_interrupted_study_goes_on_with_what_is_left(studied):
    folder, said = studied
    assert "--path runs/tiny/smoe-2-2/checkpoint" in kept_command(folder, "smoe-2-2")
    assert "# tiny: 3 of 4 runs are left" in said and "(3 of 3 runs)" in said
    assert sorted(kept_runs(folder)) == sorted(RUNS)
    for name in RUNS:
        about = json.loads((folder / "results/tiny" / name / kept.FILE).read_text())
        assert about["updates"] == 2
        assert str(folder) not in kept_command(
            folder, name
        )  # of any machine, so as without RUN_DIR
        assert about["flags"]["--seed"] == ("2" if name.endswith("seed-2") else "1")
        assert set(about["versions"]) == {"torch", "fairseq", "sacrebleu"}
        same = folder / "runs/tiny" / name / "scores.json"
        assert (folder / "results/tiny" / name / "scores.json").read_text() == same.read_text()


@pytest.mark.soak
def test_flags_that_kept_runs_were_not_made_with_are_refused(studied, data):
    """They would have no effect; those that are not part of a run have none on its results."""
    folder, _ = studied
    said = refusal(recipe(folder, "study", "tiny", "moe", "--lr", "0.5", **data[1]))
    assert "--lr 0.5" in said and "made with --lr 0.01" in said and "results/tiny/moe " in said
    again = recipe(folder, "study", "tiny", "moe", "--lr=0.01", "--log-interval", "5", **data[1])
    assert again.returncode == 0 and "0 of 2 runs are left" in again.stdout, again.stderr


@pytest.mark.soak
def test_the_curve_is_that_of_the_log(studied):
    folder, _ = studied
    with open(folder / "results/tiny/moe/curve.csv") as lines:
        rows = list(csv.DictReader(lines))
    log = (folder / "runs/tiny/moe/train.log").read_text()
    assert [row["update"] for row in rows] == ["1", "2"]
    for row in rows:
        number = float(row["training_nll"])
        assert f"nll_loss={number:g}, " in log
    assert f"nll_loss {float(rows[-1]['validation_nll']):g} " in log
    assert float(rows[-1]["words"]) > float(rows[0]["words"]) > 0


@pytest.mark.soak
def test_the_report_is_made_of_what_is_kept(studied, tmp_path):
    """On a machine without the runs; again the same."""
    folder, _ = studied
    report = (folder / "results/tiny/report.md").read_text()
    shutil.copytree(folder / "results", tmp_path / "results")
    shutil.copytree(folder / "configs", tmp_path / "configs", symlinks=True)
    given = {"CONFIG_DIR": str(tmp_path / "configs"), "SEEDS": "1 2", "GPUS": "0"}
    (tmp_path / "data/tiny/bin").mkdir(parents=True)
    again = recipe(tmp_path, "study", "tiny", **given)
    assert again.returncode == 0 and "0 of 4 runs are left" in again.stdout, again.stderr
    assert (tmp_path / "results/tiny/report.md").read_text() == report
    kept_pairs = json.loads((folder / "results/tiny/comparisons.json").read_text())
    assert list(kept_pairs) == ["moe smoe-2-2"]
    assert set(kept_pairs["moe smoe-2-2"]["directions"]) == {"en-fr", "fr-en"}
    assert "(e) time per token of smoe-2-2 is within 10% of what FLOPs say" in report
    routing = [
        folder / "results/tiny" / n / "routing.json" for n in ("smoe-2-2", "smoe-2-2.seed-2")
    ]
    told = any(json.loads(file.read_text())["rank_correlation"] for file in routing)
    assert ("(g) smoe-2-2: frequent tokens ask for less" in report) == told
    assert not (tmp_path / "results/tiny/moe/routing.json").exists()
    of_smoe = json.loads((tmp_path / "results/tiny/smoe-2-2/routing.json").read_text())
    assert set(of_smoe["requested_capacity"]["en-fr"]) == {"encoder.1", "decoder.1"}
    with open(folder / "runs/tiny/smoe-2-2/routing/blocks.csv") as lines:
        rows = [r for r in csv.DictReader(lines) if r["kind"] == "text"]
    for row in rows:
        layer = of_smoe["requested_capacity"][row["direction"]][f"{row['side']}.{row['layer']}"]
        assert layer == float(row["requested_capacity"])
    scores = [json.loads((folder / "results/tiny" / n / "scores.json").read_text()) for n in RUNS]
    bleu = {n: sum(d["bleu"] for d in s["scores"].values()) / 2 for n, s in zip(RUNS, scores)}
    mean = (bleu["moe"] + bleu["moe.seed-2"]) / 2
    spread = abs(bleu["moe"] - bleu["moe.seed-2"]) / math.sqrt(2)
    row = next(line for line in report.splitlines() if line.startswith("| moe "))
    assert f"{mean:.2f} ± {spread:.2f}" in row and " 2 |" in row
    assert "(a) smoe-2-2 is above moe" in report
    for name in ("costs", "directions"):
        assert f"![{name}]({name}.png)" in report
        assert (tmp_path / f"results/tiny/{name}.png").stat().st_size > 10_000


@pytest.mark.soak
def test_a_dry_run_prints_what_is_left(data, tmp_path):
    folder, given = data
    result = recipe(tmp_path, "study", "tiny", "dense", "--lr", "1", DRY_RUN="1", **given)
    lines = result.stdout.splitlines()
    assert lines[0] == "# tiny: 2 of 2 runs are left"
    assert lines[2].startswith("SEED=2 python -m smoe_fairseq.recipes train tiny dense --lr 1 && ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
def test_bad_input_of_a_study_is_one_sentence(data, tmp_path):
    _, given = data
    assert "'odd'" in refusal(recipe(tmp_path, "study", "tiny", "odd", **given))
    assert "SEEDS=1x: expected" in refusal(
        recipe(tmp_path, "study", "tiny", **given | {"SEEDS": "1x"})
    )
    assert "each seed once" in refusal(
        recipe(tmp_path, "study", "tiny", **given | {"SEEDS": "1 1"})
    )
    assert "JOBS=no" in refusal(recipe(data[0], "study", "tiny", "dense", JOBS="no", **given))
    assert "prepare.sh tiny" in refusal(recipe(tmp_path, "study", "tiny", **given))
    assert "no runs" in refusal(recipe(tmp_path, "report", "tiny", **given))


@pytest.mark.soak
def test_what_cannot_be_kept_is_known_before_the_first_run(data, tmp_path):
    folder, given = data
    for name in ("configs", "data"):
        os.symlink(folder / name, tmp_path / name)
    (tmp_path / "file").touch()
    result = recipe(tmp_path, "study", "tiny", RESULTS_DIR=str(tmp_path / "file"), **given)
    assert str(tmp_path / "file") in refusal(result)
    assert not (tmp_path / "runs").exists()


@pytest.mark.soak
def test_a_run_that_fails_does_not_end_the_others(data, tmp_path):
    folder, given = data
    for name in ("configs", "data"):
        os.symlink(folder / name, tmp_path / name)
    odd = tmp_path / "runs/tiny/smoe-2-2"
    odd.mkdir(parents=True)
    (odd / "checkpoint_last.pt").write_text("no checkpoint")
    given = given | {"SEEDS": "1"}
    sentence = refusal(recipe(tmp_path, "study", "tiny", "smoe-2-2", "moe", JOBS="1", **given))
    assert "1 of 2 runs failed (smoe-2-2)" in sentence and "smoe-2-2/study.log" in sentence
    assert kept_runs(tmp_path) == ["moe"]
    assert "\n| moe " in (tmp_path / "results/tiny/report.md").read_text()
    assert "checkpoint_last.pt" in (odd / "study.log").read_text()


# Numbers


@pytest.mark.parametrize(
    "freedom, expected",  # of any table of Student's t, two-sided 95 percent
    [(1, 12.706), (2, 4.303), (4, 2.776), (10, 2.228), (30, 2.042)],
)
def test_students_t(freedom, expected):
    assert quantile(0.975, freedom) == pytest.approx(expected, abs=0.001 * expected)


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
    (run / "identity.json").write_text('{"flags": {}}')
    (run / "scores.json").write_text('{"scores": {}}')
    kept.keep(load_dataset("multi30k"), "moe", "command")
    rows = (tmp_path / "results/multi30k/moe" / kept.CURVE).read_text().splitlines()[1:]
    assert rows == ["500,,4.5,0,0.0", "1000,,nan,0,0.0"]


def test_interval_of_a_mean_by_hand():
    found = interval([1.0, 2.0, 3.0])
    assert (found.low, found.high) == pytest.approx(
        (2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5), abs=1e-3
    )
    assert interval([1.0]).low is None
